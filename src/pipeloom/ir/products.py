"""What actions make and use, spelled as *products*: plain tuples.

::

    ("output", 2, 0, None)            what F made on stage 2 for microbatch 0
    ("received output", 3, 0, 2)      the same, once stage 3 has received it from stage 2
"""

from __future__ import annotations

from typing import TypeAlias

#: (what, stage, microbatch, other stage). Plain, because a large program has millions of them.
Product: TypeAlias = tuple[str, int, int | None, int | None]

OUTPUT = "output"
INPUT_GRADIENT = "input gradient"
PENDING_WEIGHTS = "pending weights"
WEIGHT_GRADIENT = "weight gradient"
SENT_OUTPUT = "sent output"
SENT_GRADIENT = "sent gradient"
RECEIVED_OUTPUT = "received output"
RECEIVED_GRADIENT = "received gradient"
REDUCED_GRADIENT = "reduced gradient"
#: Memory only: what F leaves for the backward, and what I leaves for W.
ACTIVATION = "activation"
RETAINED = "retained"
#: Memory only: the whole parameters of a sharded stage.
GATHERED = "gathered parameters"
