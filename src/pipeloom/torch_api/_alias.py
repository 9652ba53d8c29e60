"""Putting this package in the place of ``torch.distributed.pipelining``, for programs that nobody
edits.

::

    import pipeloom.torch_api

    pipeloom.torch_api.install_as_torch()
    runpy.run_path("train.py", run_name="__main__")
"""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["install_as_torch"]

_TORCH = "torch.distributed.pipelining"
_OURS = "pipeloom.torch_api"
_MODULES = (
    "_IR",
    "_backward",
    "_debug",
    "_schedule_visualizer",
    "_unflatten",
    "_utils",
    "microbatch",
    "schedules",
    "stage",
)


def install_as_torch() -> None:
    """From now on ``import torch.distributed.pipelining`` gives this package, in this process.

    Call it before anything imports torch's package: names that were imported from there already
    stay torch's.
    """
    import torch.distributed

    package = import_module(_OURS)
    sys.modules[_TORCH] = package
    for name in _MODULES:
        sys.modules[f"{_TORCH}.{name}"] = import_module(f"{_OURS}.{name}")
    vars(torch.distributed)["pipelining"] = package
