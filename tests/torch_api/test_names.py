"""The table of names in the documentation is what both packages say."""

from __future__ import annotations

import pytest
import torch

from tests.torch_api import name_table


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the table is made with torch 2.13"
)
def test_the_table_is_up_to_date() -> None:
    assert name_table.make_table() in name_table.PAGE.read_text(), (
        "run: python -m tests.torch_api.name_table"
    )


def test_every_name_that_torch_exports_is_here() -> None:
    missing = [
        f"{module}.{name}"
        for module in name_table.NAMES
        for name in name_table.names_of(module)
        if name_table.find("pipeloom.torch_api", module, name) is None
        and name not in name_table.MISSING
    ]
    assert missing == []
