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
