"""The names of the runtime are found on the package, and say what is missing without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pipeloom

NAMES = ("LocalPipeline", "Pipeline", "StepResult", "PreSplit", "REPLICATE", "Routed")


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert name in pipeloom.__all__
    assert getattr(pipeloom, name) is not None
    assert name in dir(pipeloom)


def test_without_torch_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pipeloom\n"
        "print(pipeloom.build_schedule('1f1b', ranks=2, microbatches=2).num_stages)\n"
        "try:\n"
        "    pipeloom.LocalPipeline\n"
        "except pipeloom.MissingExtraError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'pipeloom[torch]'" in result.stdout
    assert "pipeloom.LocalPipeline needs the package 'torch'" in result.stdout
