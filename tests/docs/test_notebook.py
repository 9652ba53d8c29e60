"""The tour in a notebook runs from top to bottom, and shows what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    loaded = nbformat.read(TOUR, as_version=4)
    folder = str(tmp_path_factory.mktemp("tour"))
    client = nbclient.NotebookClient(
        loaded, timeout=100, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    return loaded


def find_cell(notebook: Any, text: str) -> Any:
    [cell] = [c for c in notebook.cells if c.cell_type == "code" and text in c.source]
    return cell


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_it_is_stored_without_outputs() -> None:
    stored = nbformat.read(TOUR, as_version=4)
    assert [
        cell for cell in stored.cells if cell.get("outputs") or cell.get("execution_count")
    ] == []


def test_schedules_and_proofs_are_printed(notebook: Any) -> None:
    assert "rank 3   3F0  3B0" in printed(find_cell(notebook, "print(schedule)"))
    assert "1B1 ← here" in printed(find_cell(notebook, "broken ="))
    assert "makespan 33, bubble 27.3%" in printed(find_cell(notebook, "timeline ="))


def test_timelines_draw_themselves(notebook: Any) -> None:
    for text in ("timeline = ", "*before, measured", "predicted ="):
        outputs = find_cell(notebook, text).outputs
        pictures = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
        assert len(pictures) == 1, text
        assert "<svg" in pictures[0]


def test_running_and_comparing(notebook: Any) -> None:
    assert "all 32 gradients equal" in printed(find_cell(notebook, "LocalPipeline"))
    assert printed(find_cell(notebook, "comparison.largest")).count(" on rank ") == 5
    assert "measured.html" in printed(find_cell(notebook, "schedule.csv"))
