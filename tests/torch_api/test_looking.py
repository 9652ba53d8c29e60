"""Looking at schedules, cutting models, and standing in for torch's package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom.errors import ScheduleError
from pipeloom.torch_api import Pipe, SplitPoint, pipe_split, pipeline
from pipeloom.torch_api._IR import PipeSequential
from pipeloom.torch_api._schedule_visualizer import (
    add_schedule_op_spacing,
    get_schedule_ops,
    visualize_schedule,
)
from pipeloom.torch_api.schedules import ScheduleZBVZeroBubble

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
         "ZBVZeroBubble", "DualPipeV")  # fmt: skip
WIDTHS = {"F": 1, "I": 1, "W": 1, "B": 2, "OVERLAP_F_B": 3}


@pytest.mark.parametrize("name", NAMES)
def test_spacing_leaves_a_rank_idle_while_it_waits(name: str) -> None:
    rows = get_schedule_ops(name, 4, 8, add_spacing=True)
    ends: dict[tuple[int, str, int], int] = {}
    starts: dict[tuple[int, str, int], int] = {}
    for row in rows:
        time = 0
        for cell in row:
            if cell is None:
                time += 1
                continue
            for part in cell.sub_actions or (cell,):
                assert part.microbatch_index is not None
                kind = part.computation_type.value
                key = (part.stage_index, kind, part.microbatch_index)
                starts[key] = time
                time += WIDTHS[kind]
                ends[key] = time
    last = max(stage for stage, _, _ in ends)
    for stage, kind, microbatch in starts:
        begin = starts[stage, kind, microbatch]
        if kind == "F" and stage:
            assert ends[stage - 1, "F", microbatch] <= begin
        if kind in "BI" and stage < last:
            after = [
                ends[stage + 1, k, microbatch] for k in "BI" if (stage + 1, k, microbatch) in ends
            ]
            # A part of an overlap may begin before its own input is needed.
            assert min(after) <= begin + 1
    assert sum(1 for _, kind, _ in starts if kind == "F") == 8 * (last + 1)


@pytest.mark.parametrize("name", NAMES)
def test_programs_have_every_action_on_its_rank(name: str) -> None:
    rows = get_schedule_ops(name, 2, 4, with_comms=True)
    for rank, row in enumerate(rows):
        stages = {part.stage_index for cell in row if cell for part in cell.sub_actions or (cell,)}
        if name in ("GPipe", "1F1B"):
            assert stages == {rank}
        elif name in ("ZBVZeroBubble", "DualPipeV"):
            assert stages == {rank, 3 - rank}
        else:
            assert stages == {rank, rank + 2}
        assert any(cell and "RECV" in str(cell) for cell in row)


def test_what_cannot_be_shown() -> None:
    assert get_schedule_ops(ScheduleZBVZeroBubble, 2, 3)
    with pytest.raises(ValueError, match="at the same time"):
        get_schedule_ops("1F1B", 2, 4, add_spacing=True, with_comms=True)
    with pytest.raises(AssertionError, match="to be 1, got 2"):
        get_schedule_ops("1F1B", 2, 4, num_stages_per_rank=2)
    assert add_schedule_op_spacing([]) == []


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    visualize_schedule(get_schedule_ops("DualPipeV", 2, 4, add_spacing=True), str(path))
    assert path.stat().st_size > 2000
    visualize_schedule(get_schedule_ops("1F1B", 2, 4, with_comms=True), str(path))


# ── cutting ──────────────────────────────────────────────────────────────────────────────────────


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def require_equal(pipe: Pipe, model: nn.Module, x: torch.Tensor) -> None:
    assert torch.equal(pipe(x), model(x))
    keys = [key for i in range(pipe.num_stages) for key in pipe.get_stage_module(i).state_dict()]
    assert keys == list(model.state_dict())


@pytest.mark.parametrize("point", list(SplitPoint))
def test_cuts_at_submodules(point: SplitPoint) -> None:
    model, x = Model(), torch.tensor([[1, 2], [3, 4]])
    pipe = pipeline(model, (x,), split_spec={"layers.1": point, "head": SplitPoint.BEGINNING})
    assert pipe.num_stages == 3
    first = list(pipe.get_stage_module(0).state_dict())
    assert ("layers.1.weight" in first) is (point is SplitPoint.END)
    require_equal(pipe, model, x)


def test_cuts_where_forward_says_so() -> None:
    class Marked(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.layers(self.embed(tokens))
            pipe_split()
            return self.head(x)

    model, x = Marked(), torch.tensor([[1, 2]])
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == pipe.info().num_stages == 2
    require_equal(pipe, model, x)
    sequential = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert (
        pipeline(PipeSequential.from_sequential(sequential), (torch.zeros(1, 2),)).num_stages == 3
    )
    assert pipeline(Model(), (x,)).num_stages == 1


def test_what_is_no_chain_is_refused() -> None:
    class Residual(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            return self.head(x + self.layers(x))

    x = torch.tensor([[1, 2]])
    with pytest.raises(ScheduleError, match=r"'head' something else than the output of 'layers'"):
        pipeline(Residual(), (x,), split_spec={"head": SplitPoint.BEGINNING})
    with pytest.raises(ScheduleError, match="calls no modules"):
        pipeline(Leaf(), (torch.zeros(2),))
    with pytest.raises(AttributeError, match="Specified target nope"):
        pipeline(Model(), (x,), split_spec={"nope": SplitPoint.END})
    with pytest.raises(ValueError, match="only one of them"):
        pipeline(Model(), (x,), split_spec={}, split_policy=lambda graph: graph)
    with pytest.raises(ValueError, match="Invalid stage index 4"):
        pipeline(Model(), (x,)).get_stage_module(4)


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        pipe_split()
        return x.sin()


def test_shared_parameters_are_named() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared))
    pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"2": SplitPoint.BEGINNING})
    assert [set(users) for users in pipe.replicated_params] == [{"submod_pp_0", "submod_pp_1"}] * 2


# ── in torch's place ─────────────────────────────────────────────────────────────────────────────

CLIENT = """
import tempfile, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, get_schedule_class
from torch.distributed.pipelining.stage import _PipelineStageBase
import torch.distributed.pipelining as package

dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
stage = PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
schedule = get_schedule_class("1F1B")(stage, 2, loss_fn=torch.nn.functional.mse_loss)
losses = []
schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2), losses=losses)
assert len(losses) == 2 and stage.submod.weight.grad is not None
print(type(schedule).__module__, package.__name__, _Action.from_str("0F0"))
dist.destroy_process_group()
"""


def test_a_client_that_was_never_edited(tmp_path: Path) -> None:
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    start = (
        "import pipeloom.torch_api, runpy; pipeloom.torch_api.install_as_torch(); "
        f"runpy.run_path({str(client)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pipeloom.torch_api._single", "pipeloom.torch_api", "0F0"]
