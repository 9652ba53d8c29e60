"""Compiled code whose backward comes in halves.

A compiled region is one node of the autograd graph, and its backward computes the gradients of
inputs and weights in one call. ``torch.compile(…, backend="pipeloom")`` keeps that backward as a
graph, so that a plan can have it cut in two::

    backend.py      what torch.compile calls
    cut.py          which operations of a backward are I's, which W's
    operations.py   what a cut has to know of them
    parts.py        a graph for I, code for W
    halves.py       the backward that torch runs: whole, or I's half
    finish.py       values that I left ─► products of W
"""

from pipeloom.runtime.backward.compiled.backend import (
    compile_for_pipelines,
    run_eagerly_for_pipelines,
)

__all__ = ["compile_for_pipelines", "run_eagerly_for_pipelines"]
