"""The pictures in the docs are what the tool draws today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[3] / "docs" / "images"


def test_the_drawings_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_images", IMAGES / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = dict(module.draw_images())
    assert drawn
    for name, text in drawn.items():
        if (IMAGES / name).read_text(encoding="utf-8") != text:
            pytest.fail(f"{name} is out of date; run: python docs/images/make_images.py")
