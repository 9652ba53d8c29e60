"""Orders, programs and files: the same as torch's, cell by cell and byte by byte."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

import pipeloom.torch_api.schedules as ours
from pipeloom.torch_api._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from pipeloom.verify.verifier import verify
from tests.torch_api.peers import MULTI, OURS, SINGLE, TORCH, as_text, construct, convert, stand_in

SHAPES = [(r, m, v) for r in (2, 3, 4) for m in (1, 3, 4, 6, 8, 12) for v in (1, 2, 3)]


def dump(package: str, name: str, shape: tuple[int, int, int], path: Path, defer: bool) -> Any:
    """The order and both files, or the error."""
    try:
        made = construct(package, name, *shape, defer_pp_recv=defer)
    except ValueError as error:
        # Torch calls DualPipeV by the name of the other one there.
        return str(error).replace("ZBV requires", f"{name[8:].removesuffix('ZeroBubble')} requires")
    files = []
    for format in ("compute_only", "compute_comms"):
        made._dump_csv(path, format=format)
        files.append(path.read_bytes())
    return as_text(made.pipeline_order), made.stage_index_to_group_rank, files


@pytest.mark.parametrize("name", MULTI)
def test_orders_programs_and_files_of_torch(name: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    made = 0
    for shape in SHAPES:
        expected = dump(TORCH, name, shape, path, defer=False)
        assert dump(OURS, name, shape, path, defer=False) == expected, shape
        made += not isinstance(expected, str)
    assert made > 5


@pytest.mark.parametrize("name", MULTI)
def test_deferred_receives_are_torchs_or_torchs_are_wrong(name: str) -> None:
    same = different = 0
    for shape in ((2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 16, 2)):
        peer = construct(TORCH, name, *shape, defer_pp_recv=True).pipeline_order_with_comms
        mine = construct(OURS, name, *shape, defer_pp_recv=True)
        program = mine.pipeline_order_with_comms
        assert verify(mine._as_schedule(program)).ok
        if as_text(program) == as_text(peer):
            same += 1
        else:
            different += 1
            report = verify(mine._as_schedule(convert(peer)))
            assert "CHANNEL_ORDER" in {violation.code for violation in report.violations}
    # Where two stages of a rank receive from one rank, deferring mixes up their messages.
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        assert different
    else:
        assert same


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", MULTI)
def test_files_are_read_back(name: str, format: str, tmp_path: Path) -> None:
    written, again = tmp_path / "written.csv", tmp_path / "again.csv"
    construct(TORCH, name, 4, 8)._dump_csv(written, format=format)
    stages = [stand_in(OURS, i, 8, 4) for i in range(2)]
    loaded = ours._PipelineScheduleRuntime(stages, 8)
    loaded._load_csv(written, format=format)
    loaded._dump_csv(again, format=format)
    assert again.read_bytes() == written.read_bytes()
    assert loaded.stage_index_to_group_rank == construct(OURS, name, 4, 8).stage_index_to_group_rank
    assert sum(map(len, loaded._simulate().values())) > 0


@pytest.mark.parametrize("name", [name for name in MULTI if name != "ScheduleDualPipeV"])
def test_passes_and_simulation_of_torch(name: str) -> None:
    for ranks, microbatches in ((2, 4), (3, 6), (4, 12)):
        peer = construct(TORCH, name, ranks, microbatches)
        where = peer.stage_index_to_group_rank.__getitem__
        order = convert(peer.pipeline_order)
        expected = theirs._add_send_recv(copy.deepcopy(peer.pipeline_order), where, 2 * ranks)
        program = ours._add_send_recv(order, where, 2 * ranks)
        assert as_text(program) == as_text(expected)
        steps = ours._simulate_comms_compute(program, where, 2 * ranks)
        assert as_text(steps) == as_text(theirs._simulate_comms_compute(expected, where, 2 * ranks))
        for rank, row in order.items():
            merged = theirs._merge_bw(list(peer.pipeline_order[rank]))
            assert list(map(str, ours._merge_bw(row))) == list(map(str, merged))
        for step in (None, 3):
            grid = theirs._format_pipeline_order(peer.pipeline_order, error_step_number=step)
            assert ours._format_pipeline_order(order, error_step_number=step) == grid


def test_gathering_looks_as_far_ahead_as_torch() -> None:
    order = construct(TORCH, "ScheduleInterleaved1F1B", 2, 8, 4).pipeline_order
    for most in (1, 2, 3, 5):
        for rank, row in convert(order).items():
            expected = theirs._add_unshard_reshard(order[rank], most)
            assert list(map(str, ours._add_unshard_reshard(row, most))) == list(map(str, expected))


@pytest.mark.parametrize("name", SINGLE)
def test_single_orders_are_the_library_on_every_rank(name: str) -> None:
    order = construct(OURS, name, 4, 8).pipeline_order
    expected = construct(TORCH, name, 4, 8).pipeline_order
    # Torch begins the last rank of 1F1B with microbatch 1, which it never runs like that.
    ranks = range(3) if name == "Schedule1F1B" else range(4)
    assert all(as_text(order)[rank] == as_text(expected)[rank] for rank in ranks)
    assert as_text(order)[3][:4] == (
        ["3F0", "3B0", "3F1", "3B1"] if name == "Schedule1F1B" else ["3F0", "3F1", "3F2", "3F3"]
    )


@pytest.mark.parametrize("seed", range(50))
def test_rows_of_interleaved_orders(seed: int) -> None:
    rng = random.Random(seed)
    rank, chunks, per_round = rng.randrange(4), rng.choice((1, 2, 3)), rng.choice((2, 4))
    microbatches = per_round * rng.choice((1, 2, 3))
    arguments = (rank, chunks, per_round, 4, microbatches, rng.choice((1, 2)))
    warmup = theirs._get_warmup_ops(*arguments)
    assert ours._get_warmup_ops(*arguments) == warmup

    def forward(step: int) -> int:
        return step // per_round % chunks * 4 + rank

    def backward(step: int) -> int:
        return (chunks - 1 - (step - warmup) // per_round % chunks) * 4 + rank

    steady = chunks * microbatches - warmup
    row = (chunks, 4, warmup, steady, warmup, rank, forward, backward, rng.randrange(4))
    for split in (False, True):
        expected = theirs._get_1f1b_rank_ops(*row, split)
        assert list(map(str, ours._get_1f1b_rank_ops(*row, split))) == list(map(str, expected))


@pytest.mark.parametrize("style", ["loop", "v"])
def test_placements_of_torch(style: str) -> None:
    from torch.distributed.pipelining import _utils

    for ranks, stages in ((1, 3), (2, 4), (4, 12), (3, 3)):
        assert generate_stage_to_rank_mapping(
            ranks, stages, style
        ) == _utils.generate_stage_to_rank_mapping(ranks, stages, style)
        assert generate_rank_to_stage_mapping(
            ranks, stages, style
        ) == _utils.generate_rank_to_stage_mapping(ranks, stages, style)
    with pytest.raises(ValueError, match=r"evenly divisible|not supported"):
        generate_stage_to_rank_mapping(2, 3, "v")


# ── what is wrong ────────────────────────────────────────────────────────────────────────────────


def order_of(*rows: str) -> dict[int, Any]:
    return {
        rank: [ours._Action.from_str("" if cell == "." else cell) for cell in row.split()]
        for rank, row in enumerate(rows)
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0B0 0F0", "1F0 1B0"), "Full Backward for stage 0, microbatch 0 without first running"),
        (("0I0 0F0 0W0", "1F0 1B0"), "Backward Input for stage 0, microbatch 0 without first"),
        (("0F0 0W0 0I0", "1F0 1B0"), "Backward Weight for stage 0, microbatch 0 without first"),
        (("0B0", "1F0 1B0"), "Got 0 F microbatches for stage 0, expected 1"),
        (("0F0 0I0", "1F0 1B0"), "I and W must have equal counts, but got I=1, W=0"),
        (("0F0", "1F0 1B0"), "expected 1 total backwards, but got B=0"),
        (("0F0 0B0 1F0", "1F0 1B0"), "Stage 1 is assigned to both rank"),
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 runs twice"),
        (("0F0 0B0 7F0", "1F0 1B0"), "names a stage outside"),
        (("0F0 0B0 1F0 1B0",), "incorrect number of ranks - expected 2, actual 1"),
    ],
)
def test_wrong_orders_are_told(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        ours._validate_schedule(order_of(*rows), 2, 2, 1)
    assert message in str(caught.value)
    if len(rows) == 2:
        assert "Rank 0 Rank 1" in str(caught.value)


def test_all_that_is_wrong_is_told_and_the_first_place_is_marked() -> None:
    with pytest.raises(AssertionError) as caught:
        ours._validate_schedule(order_of("0F0 0B1 0B0", "1F0 1B0 1F1"), 2, 2, 2)
    message = str(caught.value)
    assert "without first running Forward" in message
    assert "Got 1 F microbatches for stage 0, expected 2" in message
    assert "Step 1: 0B1    1B0    <-- ERROR HERE" in message


def test_halts_are_told() -> None:
    with pytest.raises(AssertionError, match="rank 0 cannot run 0B0"):
        ours._add_send_recv(order_of("0F0 0B0", "1F0"), lambda stage: stage, 2)
    program = order_of("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0")
    with pytest.raises(ValueError, match="Schedule is not progressing"):
        ours._simulate_comms_compute(program, lambda stage: stage, 2)
    with pytest.raises(AssertionError, match="leftover RECV"):
        ours._defer_recv_ops(order_of("0F0 0SEND_F0", "1RECV_F0"), lambda stage: stage)


@pytest.mark.parametrize("text", ["2F0x", "F0", "2F", "1UNSHARD3", "2Q0", "1SEND_F0>3"])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(RuntimeError, match="Invalid action string"):
        ours._Action.from_str(text)


def test_communication_in_a_compute_only_order_is_refused() -> None:
    runtime = ours._PipelineScheduleRuntime([stand_in(OURS, 0, 2, 2)], 1)
    with pytest.raises(ValueError, match="'0SEND_F0' at rank 0, position 1"):
        runtime._prepare_schedule_with_comms(order_of("0F0 0SEND_F0 0B0", "1F0 1B0"))
    with pytest.raises(AssertionError, match="no idle cells"):
        runtime._prepare_schedule_with_comms(
            order_of("0F0 . 0B0", "1F0 1B0"), format="compute_comms"
        )


def test_classes_by_name() -> None:
    names = "1f1b GPIPE interleaved1F1B LoopedBFS InterleavedZeroBubble zbvzerobubble DualPipeV"
    for name in (*names.split(), "PipelineScheduleSingle", "PipelineScheduleMulti"):
        assert ours.get_schedule_class(name).__name__ == theirs.get_schedule_class(name).__name__
    with pytest.raises(ValueError, match="Unknown schedule name 'nope'"):
        ours.get_schedule_class("nope")
    assert issubclass(ours.ScheduleZBVZeroBubble, ours._PipelineScheduleRuntime)
    assert issubclass(ours._PipelineScheduleRuntime, ours.PipelineScheduleMulti)
    assert issubclass(ours.Schedule1F1B, ours.PipelineScheduleSingle)


def test_wholly_compiled_stages_are_refused_where_the_backward_is_split() -> None:
    import torch

    stages = [stand_in(OURS, i, 4, 2) for i in range(2)]
    stages[0].submod = torch.compile(torch.nn.Linear(2, 2))
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        with pytest.raises(RuntimeError, match=r"torch\.compile.*Interleaved1F1B"):
            getattr(ours, name)(stages, 4)
    ours.ScheduleInterleaved1F1B(stages, 4)
    stages[0].submod = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)))
    ours.ScheduleZBVZeroBubble(stages, 4)
