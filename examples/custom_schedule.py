"""Run an order of your own, and put your own code in place of a kind of action.

    python examples/custom_schedule.py

The order is text; it is verified before it runs. Its fused actions run a forward and a backward
together: the handler below is where a kernel that overlaps the two would go.
"""

from __future__ import annotations

import torch
from torch import nn

import pipeloom
from pipeloom.runtime.executor import ActionContext

ORDER = """
0F0  0F1  0F2  0B0  (0F3;0B1)OVERLAP_F_B  0B2  0B3
1F0  1B0  1F1  (1F2;1B1)OVERLAP_F_B  1B2  1F3  1B3
"""


def run_fused(context: ActionContext) -> None:
    """Forward of one microbatch and backward of another, as one action."""
    forward, backward = context.parts
    assert forward.stage is not None
    assert forward.microbatch is not None
    stage = context.stages[forward.stage]
    assert stage.backward is not None
    with stage.backward.forward():
        arguments, keywords = stage.open_forward(forward.microbatch)
        output = stage.module(*arguments, **keywords)
        stage.close_forward(forward.microbatch, output)
    context.run(backward)


def main() -> list[str]:
    """One step; the fused actions in the order in which they ran."""
    schedule = pipeloom.parse_grid(ORDER, name="by hand")
    pipeloom.verify(schedule).raise_for_errors()
    print(schedule)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are not worth more
    pipe = pipeloom.LocalPipeline(
        [nn.Linear(8, 8), nn.Linear(8, 8)],
        schedule,
        loss_fn=nn.functional.mse_loss,
        handlers={"OVERLAP_F_B": run_fused},
    )
    fused: list[str] = []
    pipe.on("*OVERLAP_F_B", lambda event: fused.append(str(event.action)))
    result = pipe.step(torch.randn(16, 8), target=torch.zeros(16, 8))
    assert result.loss is not None
    print(f"loss {result.loss:.4f}; fused: {', '.join(fused)}")
    return fused


if __name__ == "__main__":
    main()
