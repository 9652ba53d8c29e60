"""Every error on the page about failures is what a rank really raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess import pipeline_work, transport_work
from tests.support.process_pool import Died, ProcessPool

pytestmark = pytest.mark.multiprocess

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
BLOCKS = dict(
    re.findall(r"<!-- error: (\w+) -->\n```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
)
Produce = tuple[int, Callable[..., Any], tuple[Any, ...], list[int]]

PRODUCED_BY: dict[str, Produce] = {
    "exception": (4, pipeline_work.sabotage, ("1f1b", 2, "B", "raise"), []),
    "shape": (4, pipeline_work.sabotage, ("1f1b", 1, "F", "shape"), []),
    "killed": (4, pipeline_work.sabotage, ("1f1b", 1, "B", "kill"), [1]),
    "stalled": (4, pipeline_work.sabotage, ("1f1b", 2, "F", "sleep", 2, 1.0), []),
    "left": (2, transport_work.lose_rank, (1, "close"), []),
    "late": (2, transport_work.stand_still, ("late",), []),
    "stopped": (2, transport_work.stop_one_process, (), []),
    "circle": (2, transport_work.stand_still, ("circle",), []),
    "programs": (2, transport_work.run_different_programs, (), []),
    "absent": (2, transport_work.come_late, (1.0,), []),
}


def test_the_page_shows_every_error_and_no_other() -> None:
    assert set(BLOCKS) == set(PRODUCED_BY)


@pytest.mark.parametrize("name", PRODUCED_BY)
def test_errors_on_the_page(name: str, two_ranks: ProcessPool, four_ranks: ProcessPool) -> None:
    ranks, function, arguments, may_die = PRODUCED_BY[name]
    pool = two_ranks if ranks == 2 else four_ranks
    results = pool.run(function, *arguments, may_die=may_die)
    if name == "absent":
        pool.stop()  # the rank that came late would be one transport behind for ever
    first = next(result for result in results if not isinstance(result, Died))
    text = first if isinstance(first, str) else first[1]
    pattern = re.escape(BLOCKS[name].strip()).replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, text.strip(), re.DOTALL), text
