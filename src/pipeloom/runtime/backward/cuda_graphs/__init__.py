"""F, I and W of a stage as captured CUDA graphs: for small stages, where the host is the limit.

Opt-in, for stages whose shapes never change::

    captured = CapturedStage(module, sample, num_slots=slots_needed(schedule, stage))
    pipe = Pipeline({stage: module}, schedule, …, weight_backward={stage: captured.weight_backward})

A slot is one microbatch in flight: its own inputs, outputs and gradients, and three graphs that are
replayed in turn::

    slot 0   F ─────► I ─────► W
    slot 1        F ─────► I ─────► W      slots may interleave as they like

Seen from the pipeline, the module defers its own weight gradients: its forward is replaced by one
that replays F, the backward of that replays I, and ``weight_backward`` gives what replays W.

What a capture fixes: shapes and types, the memory of parameters, buffers and ``.grad``, and the
Python code of the stage, which does not run at replay. What would make a replay wrong is refused
when the stage is captured; what may change afterwards is checked at every replay.

::

    stage.py       CapturedStage
    obstacles.py   what stands in the way of a capture
    traces.py      what a first run shows of that
    settings.py    what must be as it was at the capture
    memory.py      and where
    recorder.py    who records: CUDA, or a test
"""

from pipeloom.runtime.backward.cuda_graphs.recorder import CudaRecorder, Recorder
from pipeloom.runtime.backward.cuda_graphs.stage import CapturedStage, slots_needed

__all__ = ["CapturedStage", "CudaRecorder", "Recorder", "slots_needed"]
