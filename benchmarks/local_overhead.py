"""What a pipeline costs beside a plain accumulation loop, in one process.

    python benchmarks/local_overhead.py              rows for the CPU, and for a GPU if there is one

Each row alternates the plain loop and the pipeline on the same stages and microbatches and prints
the median of the paired ratios with the 95 % interval of that median. On the CPU it is processor
time of this thread that counts, so that other work on the machine does not. "per action" is what
is left after subtracting the plain loop, divided by the actions of the program, messages included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from pipeloom import LocalPipeline

TARGET_ON_GPU = 1.01


@dataclass(frozen=True)
class Row:
    """One comparison."""

    case: str
    plain_ms: float
    pipeline_ms: float
    ratio: float
    low: float
    high: float
    microseconds_per_action: float


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + half))
    return ordered[low], ordered[high]


def make_layer(width: int) -> nn.Module:
    """A small stage."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def compare(
    case: str,
    stages: list[nn.Module],
    schedule: str,
    *,
    microbatches: int,
    batch: Tensor,
    target: Tensor,
    repeats: int,
) -> Row:
    """Alternate the plain loop and the pipeline."""
    loss_fn = nn.functional.mse_loss
    pipe = LocalPipeline(stages, schedule, microbatches=microbatches, loss_fn=loss_fn)
    on_gpu = batch.is_cuda

    def run_plain() -> None:
        for x, y in zip(batch.chunk(microbatches), target.chunk(microbatches), strict=True):
            for stage in stages:
                x = stage(x)
            (loss_fn(x, y) / microbatches).backward()

    def run_pipeline() -> None:
        pipe.step(batch, target=target)

    def measure(function: Callable[[], None]) -> float:
        if on_gpu:
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            return time.perf_counter() - start
        start = time.thread_time()
        function()
        return time.thread_time() - start

    for function in (run_plain, run_pipeline) * 3:
        function()
    pairs = []
    for repeat in range(repeats):
        if repeat % 2:
            pairs.append((measure(run_plain), measure(run_pipeline)))
        else:
            late = measure(run_pipeline)
            pairs.append((measure(run_plain), late))
    ratios = [pipeline / plain for plain, pipeline in pairs]
    plain = statistics.median(p for p, _ in pairs)
    pipeline = statistics.median(p for _, p in pairs)
    low, high = interval_of_median(ratios)
    num_actions = sum(map(len, pipe.program.actions))
    return Row(
        case,
        plain * 1e3,
        pipeline * 1e3,
        statistics.median(ratios),
        low,
        high,
        (pipeline - plain) / num_actions * 1e6,
    )


def rows_on_cpu(repeats: int) -> list[Row]:
    """Stages so small that nothing but overhead is left, and one that computes."""
    torch.set_num_threads(1)
    rows = []
    for width, tokens, count in ((32, 16, 16), (512, 256, 8)):
        for schedule, num_stages in (("gpipe", 1), ("1f1b", 4), ("interleaved_1f1b", 8)):
            rows.append(
                compare(
                    f"{schedule}, {num_stages} stages, d={width}",
                    [make_layer(width) for _ in range(num_stages)],
                    schedule,
                    microbatches=count,
                    batch=torch.randn(tokens * count, width),
                    target=torch.randn(tokens * count, width),
                    repeats=repeats if width == 32 else max(6, repeats // 5),
                )
            )
    return rows


def rows_on_gpu(repeats: int) -> list[Row]:
    """One rank, one stage: a transformer in bfloat16."""
    rows = []
    for width, layers in ((4096, 4), (1024, 8)):
        blocks = [
            nn.TransformerEncoderLayer(
                width, width // 128, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        stage = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
        shape = (16, 512, width)
        rows.append(
            compare(
                f"1 stage, {layers} layers, d={width}, bf16, GPU",
                [stage],
                "gpipe",
                microbatches=16,
                batch=torch.randn(shape, device="cuda", dtype=torch.bfloat16),
                target=torch.randn(shape, device="cuda", dtype=torch.bfloat16),
                repeats=repeats,
            )
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = rows_on_cpu(options.repeats)
    if torch.cuda.is_available():
        rows += rows_on_gpu(options.repeats)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'':36} {'plain':>9} {'pipeline':>9}  ratio   95 % interval    per action")
    for row in rows:
        target = f"   target {TARGET_ON_GPU}" if row.case.endswith("GPU") else ""
        print(
            f"{row.case:36} {row.plain_ms:6.2f} ms {row.pipeline_ms:6.2f} ms  {row.ratio:5.3f}  "
            f"[{row.low:5.3f}, {row.high:5.3f}]  {row.microseconds_per_action:7.2f} µs{target}"
        )


if __name__ == "__main__":
    main()
