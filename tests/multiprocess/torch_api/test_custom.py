"""What users write themselves: orders, files, functions in place of actions, deferred weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.torch_api import custom_programs as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess

MULTI, RUNTIME = "PipelineScheduleMulti", "_PipelineScheduleRuntime"


@pytest.mark.parametrize(
    ("rows", "placed", "base"),
    [
        (work.V_ORDER, [[0, 3], [1, 2]], MULTI),
        (work.V_ORDER, [[0, 3], [1, 2]], RUNTIME),
        (work.UNBALANCED, [[0, 1], [2, 3, 4]], MULTI),
        (work.SEPARATE_W, [[0], [1]], MULTI),
        (work.SEPARATE_W, [[0], [1]], RUNTIME),
        (work.REORDERED_B, [[0], [1]], RUNTIME),
        (work.OUT_OF_ORDER, [[0], [1]], MULTI),
    ],
)
def test_orders_of_a_users_own(
    two_ranks: ProcessPool, rows: tuple[str, ...], placed: list[list[int]], base: str
) -> None:
    assert two_ranks.run(work.run_custom, rows, placed, base) == [[], []]


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_files_that_torch_wrote(two_ranks: ProcessPool, tmp_path: Path, format: str) -> None:
    assert two_ranks.run(work.load_csv, str(tmp_path), format) == [[], []]


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_functions_in_place_of_actions(two_ranks: ProcessPool, name: str) -> None:
    assert two_ranks.run(work.compare_functions, name, 8) == [[], []]


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "Interleaved1F1B", "DualPipeV"])
def test_modules_that_defer_their_weights(two_ranks: ProcessPool, name: str) -> None:
    assert two_ranks.run(work.deferred_weights, name) == [[], []]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_functions_with_graphs_of_their_own(two_ranks: ProcessPool, name: str) -> None:
    assert two_ranks.run(work.train_graphs, name) == [[], []]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0B1",
                "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1",
            ),
            "0B1",
        ),
        (
            (
                "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0",
            ),
            "DEADLOCK",
        ),
    ],
)
def test_programs_that_would_never_end_are_refused(
    two_ranks: ProcessPool, rows: tuple[str, ...], code: str
) -> None:
    for kind, message in two_ranks.run(work.refuse, rows):
        assert kind == "VerificationError"
        assert code in message


def test_ranks_with_different_programs_are_told(two_ranks: ProcessPool) -> None:
    for kind, message in two_ranks.run(work.differ):
        assert kind == "ScheduleError"
        assert "different programs" in message
