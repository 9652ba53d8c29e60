"""Backward of one stage, whole or in two halves.

``B`` is an ordinary backward. ``I`` computes the gradients of a stage's inputs and frees what the
rest does not need; ``W`` computes the gradients of its weights later, when the rank would idle::

            F            I                         W
    x ──► linear ──► … ──► loss        dx ◄── dy·W   (x, dy kept)        W.grad += dyᵀ·x

One object per stage, one small value per microbatch in flight:

>>> import torch
>>> stage = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
>>> backward = choose_method(stage, method="auto", stage=2)
>>> x = torch.randn(3, 4, requires_grad=True)            # a detached leaf: what F received
>>> with backward.forward():                             # F, around the module's call
...     y = stage(x)
>>> saved = backward.save(microbatch=0, inputs=[x], outputs=[y])
>>> [dx] = backward.input(saved, [torch.ones_like(y)])   # I
>>> stage[0].weight.grad is None
True
>>> backward.weight(saved)                               # W
>>> stage[0].weight.grad.shape
torch.Size([8, 4])

What a caller must know
-----------------------
- ``forward()`` is entered around every forward that will have a backward, and ``save`` is called
  right after it, in the same thread, with flat lists: the leaves the stage received (tensors;
  those with ``requires_grad`` get a gradient) and the tensors it returned. The caller drops its
  own references to what it no longer needs: ``saved`` holds the graph.
- ``full(saved, output_grads)`` is B, ``input(saved, output_grads)`` is I: both return one gradient
  or ``None`` per input, and leave ``.grad`` of the inputs untouched. ``output_grads`` has one entry
  per output, ``None`` for a gradient nobody sent, which is zero. ``output_grads=None`` means that
  the outputs are scalar losses, whose gradient is one.
- ``weight(saved)`` is W, in any order among microbatches, once, after that microbatch's I. Every
  method may be asked for B or for I and W, microbatch by microbatch.
- After I, tensors that W needs are still in use, among them the stage's inputs and the gradients
  that I was given and returned: a buffer that held one may be reused only after W. A change made by
  an operation of torch is reported, not computed with.
- After W, ``.grad`` of parameters has grown as in an ordinary backward: in the parameter's type,
  unscaled, with the parameter's hooks fired once per microbatch, at W. Some weight products may
  already be added at the end of I, where that keeps memory down and nobody listens.
- ``choice`` says what was chosen and why, after the first forward; ``held_bytes(saved)`` counts
  what a microbatch keeps between I and W.
"""

from pipeloom.runtime.backward.choose import check_compiled, choose_method
from pipeloom.runtime.backward.method import (
    BackwardMethod,
    Choice,
    SavedMicrobatch,
    SplitBackwardWarning,
)

__all__ = [
    "BackwardMethod",
    "Choice",
    "SavedMicrobatch",
    "SplitBackwardWarning",
    "check_compiled",
    "choose_method",
]
