"""Hooks, recorded timelines, profiler names, and handlers in place of a kind of action."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import pipeloom
from pipeloom import LocalPipeline, PreSplit
from pipeloom.ir.questions import is_compute
from support.models import (
    ZOO,
    compare_gradients,
    copy_stages,
    make_batch,
    run_plainly,
    squared_error,
)


def make_pipe(schedule="zbv", *, stages=None, **options):
    stages = ZOO["blocks"].make_stages(4) if stages is None else stages
    return LocalPipeline(stages, schedule, microbatches=4, loss_fn=squared_error, **options)


def test_hooks_run_where_their_pattern_says():
    pipe = make_pipe()
    seen: list[str] = []
    inputs: list[str] = []
    pipe.on("3F0", lambda event: seen.append(f"{event.when} {event.action} on {event.rank}"))
    pipe.on("3F0", lambda event: seen.append(f"{event.when} {event.action}"), when="before")
    with pipe.on("*I*", lambda event: inputs.append(str(event.action))):
        pipe.step(*make_batch(8)[:1], target=make_batch(8)[1])
    assert seen == ["before 3F0", "after 3F0 on 0"]
    assert sorted(inputs) == sorted(str(a) for a in pipe.program.all_actions() if "I" in str(a))
    inputs.clear()
    pipe.step(*make_batch(8)[:1], target=make_batch(8)[1])
    assert not inputs
    assert len(seen) == 4
    with pytest.raises(ValueError, match="before"):
        pipe.on("*", print, when="during")


def test_hooks_see_the_parts_of_fused_actions():
    pipe = make_pipe("dualpipev")
    seen = []
    pipe.on("*", lambda event: seen.append(str(event.action)))
    x, y = make_batch(8)
    pipe.step(x, target=y)
    fused = [a for a in pipe.program.all_actions() if a.parts]
    assert fused
    for action in fused:
        assert str(action) in seen
        assert all(seen.count(str(part)) == 1 for part in action.parts)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "chimera"])
def test_a_recorded_step_is_a_timeline_of_the_whole_program(schedule):
    shape = pipeloom.build_schedule(schedule, ranks=2, microbatches=4)
    parts = ZOO["blocks"].make_stages(len(shape.topology.chains[0]))
    stages = [stage for _ in shape.topology.chains for stage in copy_stages(parts)]
    pipe = LocalPipeline(stages, schedule, ranks=2, microbatches=4, loss_fn=squared_error)
    x, y = make_batch(8)
    with pipe.record() as recording:
        pipe.step(x, target=y)
        pipe.eval(x)
    pipe.step(x, target=y)
    assert len(recording) == 2
    timeline = recording.timelines[0]
    assert timeline.source == "measured"
    assert timeline.schedule == pipe.program
    for rank in range(2):
        spans = timeline.spans_of(rank)
        assert sorted(str(s.action) for s in spans) == sorted(map(str, pipe.program.actions[rank]))
        compute = [s for s in spans if s.lane == "compute"]
        ran = [s.action for s in compute]
        assert ran == [a for a in pipe.program.actions[rank] if is_compute(a)]
        assert all(one.end <= other.start for one, other in pairwise(compute))
    assert all(0 <= span.start <= span.end for span in timeline.spans)
    assert min(span.start for span in timeline.spans) == 0
    assert timeline.makespan == max(span.end for span in timeline.spans)
    # One thread: no two computations at one time, on any rank.
    every = sorted(s for r in range(2) for s in timeline.spans_of(r, "compute"))
    assert sum(span.duration for span in every) <= timeline.makespan
    assert "1F0" in str(recording.timeline.schedule)


def test_nothing_recorded_says_so():
    with pytest.raises(ValueError, match="nothing was recorded"):
        _ = make_pipe().record().timeline


def test_actions_are_named_in_profiles():
    pipe = make_pipe()
    x, y = make_batch(8)
    pipe.step(x, target=y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(x, target=y)
    names = {event.key for event in profile.key_averages()}
    assert {f"pipeloom:{action}" for action in pipe.program.all_actions()} <= names


def test_watching_changes_no_gradient():
    stages = ZOO["blocks"].make_stages(4)
    plain = copy_stages(stages)
    pipe = make_pipe(stages=stages)
    x, y = make_batch(8)
    pipe.on("*", lambda event: None)
    with pipe.record():
        pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)


def test_a_handler_replaces_a_kind():
    """A fused forward and backward that calls the module itself."""
    stages = ZOO["blocks"].make_stages(4)
    plain = copy_stages(stages)
    fused: list[str] = []

    def overlap(context):
        forward, backward = context.parts
        fused.append(str(context.action))
        stage = context.stages[forward.stage]
        with stage.backward.forward():
            arguments, keywords = stage.open_forward(forward.microbatch)
            output = stage.module(*arguments, **keywords)
            stage.close_forward(forward.microbatch, output)
        context.run(backward)

    pipe = make_pipe("dualpipev", stages=stages, handlers={"OVERLAP_F_B": overlap})
    x, y = make_batch(8)
    pipe.step(x, target=y)
    run_plainly(plain, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    compare_gradients(stages, plain)
    assert sorted(fused) == sorted(str(a) for a in pipe.program.all_actions() if a.parts)


def test_a_handler_for_an_ordinary_kind():
    stages = ZOO["blocks"].make_stages(2)
    plain = copy_stages(stages)
    ran = []

    def forward(context):
        ran.append(str(context.action))
        context.run(context.action)

    pipe = LocalPipeline(
        stages, "1f1b", microbatches=2, loss_fn=squared_error, handlers={pipeloom.Kind.F: forward}
    )
    x, y = make_batch(4)
    pipe.step(PreSplit(x.chunk(2)), target=y)
    run_plainly(plain, list(zip(x.chunk(2), y.chunk(2), strict=True)))
    compare_gradients(stages, plain)
    assert sorted(ran) == ["0F0", "0F1", "1F0", "1F1"]


def test_the_logger_tells_methods_times_and_progress(caplog):
    pipe = make_pipe()
    x, y = make_batch(8)
    with caplog.at_level("DEBUG", logger="pipeloom.runtime"):
        # The progress is a logger below it, so it is switched on as well.
        for _ in range(2):
            pipe.step(x, target=y)
    by_name: dict[str, list[str]] = {}
    for record in caplog.records:
        by_name.setdefault(record.name, []).append(record.getMessage())
    told = by_name["pipeloom.runtime"]
    assert [line.partition(":")[0] for line in told if line.startswith("stage")] == [
        f"stage {stage}" for stage in range(4)
    ]
    assert [line.partition(":")[0] for line in told if line.startswith("step")] == [
        "step 1",
        "step 2",
    ]
    actions = [f"rank {r}: {a}" for r, row in enumerate(pipe.program.actions) for a in row]
    assert sorted(by_name["pipeloom.runtime.progress"]) == sorted(2 * actions)
    caplog.clear()
    pipe.step(x, target=y)
    assert not caplog.records


def test_a_pipeline_tells_how_its_backwards_are_split():
    pipe = make_pipe(backward={0: "auto", 1: "graph", 2: "whole", 3: "deferred"})
    assert {stage: choice.method for stage, choice in pipe.backward_choices.items()} == {2: "whole"}
    x, y = make_batch(8)
    pipe.eval(x, target=y)
    assert set(pipe.backward_choices) == {2}
    pipe.step(x, target=y)
    choices = pipe.backward_choices
    assert {stage: choice.method for stage, choice in choices.items()} == {
        0: "deferred",
        1: "graph",
        2: "whole",
        3: "deferred",
    }
    assert choices[2].reason == "asked for"
    trained = {name for name, p in pipe.modules[3].named_parameters() if p.grad is not None}
    assert {*choices[3].deferred, *choices[3].computed_in_input} == trained


def test_a_gradient_scaler_in_the_loss():
    stages = [stage.float() for stage in ZOO["blocks"].make_stages(2)]
    plain = copy_stages(stages)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipe = LocalPipeline(
        stages,
        "1f1b",
        microbatches=2,
        loss_fn=lambda output, target: scaler.scale(squared_error(output, target)),
    )
    x, y = (tensor.float() for tensor in make_batch(4))
    pipe.step(x, target=y)
    optimizer = torch.optim.SGD((p for stage in stages for p in stage.parameters()), lr=0.1)
    scaler.unscale_(optimizer)
    run_plainly(plain, list(zip(x.chunk(2), y.chunk(2), strict=True)))
    compare_gradients(stages, plain, tolerance=1e-6)
