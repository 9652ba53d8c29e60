"""What splitting a stage's backward costs, in time and in memory, beside torch's own functions.

Each row is one stage, of transformer blocks or of experts, and one microbatch. ``F+B`` is plain
autograd; ``F+I+W`` is run by ``pipeloom`` (method ``auto``) and by ``stage_backward_input`` and
``stage_backward_weight`` of ``torch.distributed.pipelining``, alternating in one process, so that
the ratios hold whatever else the machine does. Times are medians (of the process's own time on
CPU). Memory is what is alive beyond the weights and their gradients: after F, and between I and W
(on CUDA by the allocator, on CPU by counting what the graph and the kept state hold).

A second table has the same stages with every block compiled: ``F+B`` by torch's own compiler,
``F+I+W`` by the backend ``pipeloom``. torch's functions cannot split those. With a CUDA device
there is a third, in which the stage is captured as CUDA graphs: ``F+B`` is eager, ``F+I+W``
replayed.

    python benchmarks/split_backward.py [--rounds N] [--threads N] [--json] [--blocks eager]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipeloom.runtime.backward import choose_method
from pipeloom.runtime.backward.boxes import Boxes
from pipeloom.runtime.backward.compiled import compile_for_pipelines
from pipeloom.runtime.backward.cuda_graphs import CapturedStage


class Block(nn.Module):
    """A transformer block as most models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        split = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Experts(nn.Module):
    """Experts that are used one by one, each by a slice of the tokens."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(len(self.up), dim=1)
        done = [F.gelu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(parts)]
        return x + torch.cat(done, dim=1)


@dataclass
class Case:
    """One stage."""

    layers: int
    width: int
    tokens: int
    experts: int = 0

    def block(self) -> nn.Module:
        """One of its layers."""
        return Experts(self.width, self.experts) if self.experts else Block(self.width)

    def __str__(self) -> str:
        what = f"{self.layers} layers, d {self.width}, {self.tokens} tokens"
        return f"{what}, {self.experts} experts" if self.experts else what


CUDA_CASES = [Case(4, 4096, 2048), Case(8, 1024, 1024), Case(4, 512, 256), Case(4, 1024, 2048, 8)]
# The last row has so little to compute that only the host's own work is left.
CPU_CASES = [
    Case(2, 384, 192),
    Case(8, 256, 128),
    Case(4, 128, 32),
    Case(4, 128, 128, 8),
    Case(8, 16, 16),
]


KINDS = ("eager", "compiled", "captured")


@dataclass
class Row:
    """Milliseconds and MB of one case."""

    stage: str
    full: float
    ours: float
    torch: float | None
    held_after_forward: float
    held_ours: float | None
    held_torch: float | None


class Bench:
    """One case: three ways to run one microbatch."""

    def __init__(self, case: Case, device: str, kind: str) -> None:
        self.case, self.device = case, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            blocks = [case.block() for _ in range(case.layers)]
        self.module = nn.Sequential(*blocks).to(dtype)
        shape = (1, case.tokens, case.width)
        self.x = torch.randn(shape, device=device, dtype=dtype)
        self.grad = torch.randn_like(self.x)
        self.split = self.module
        self.ways: dict[str, Callable[[Callable[[Any], None]], None]] = {
            "full": self.run_full,
            "ours": self.run_ours,
            "torch": self.run_torch,
        }
        captured: CapturedStage | None = None
        if kind != "eager":
            del self.ways["torch"]
            self.split = copy.deepcopy(self.module)
        if kind == "compiled":
            # Each case by itself: torch would take other sizes for dynamic ones, and would run code
            # that it compiled too often as it is.
            torch._dynamo.reset()
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            backends: tuple[Any, ...] = ("inductor", compile_for_pipelines)
            for module, backend in zip((self.module, self.split), backends, strict=True):
                for block in module.children():
                    block.compile(backend=backend)
        elif kind == "captured":
            sample = self.x.clone().requires_grad_()
            captured = CapturedStage(self.split, sample, num_slots=1, stage=0)
        self.method = choose_method(
            self.split, weight_backward=captured and captured.weight_backward, stage=0
        )

    def run_full(self, between: Callable[[Any], None]) -> None:
        x = self.x.clone().requires_grad_()
        y = self.module(x)
        between(y)
        y.backward(self.grad)

    def run_ours(self, between: Callable[[Any], None]) -> None:
        x = self.x.clone().requires_grad_()
        with self.method.forward():
            y = self.split(x)
        saved = self.method.save(microbatch=0, inputs=[x], outputs=[y])
        del x, y
        self.method.input(saved, [self.grad])
        between(saved)
        self.method.weight(saved)

    def run_torch(self, between: Callable[[Any], None]) -> None:
        x = self.x.clone().requires_grad_()
        y = self.module(x)
        # Without the gradient of the input, which goes to the stage before.
        groups = stage_backward_input([y], [self.grad], [x], self.module.parameters())[1]
        del x, y
        between(groups)
        stage_backward_weight(self.module.parameters(), groups)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, rounds: int) -> dict[str, float]:
        """Median milliseconds of each way, run in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in self.ways}
        names = list(self.ways)
        # On CPU everything runs in this process, so its own time is what others do not disturb.
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        for turn in range(rounds + 2):
            for name in names if turn % 2 else reversed(names):
                # What the way before left behind (hooks that torch registered, caches) is over
                # after one run, as it is in a loop.
                self.ways[name](lambda kept: None)
                self.synchronize()
                start = clock()
                self.ways[name](lambda kept: None)
                self.synchronize()
                if turn >= 2:  # the first two warm up
                    seconds[name].append(clock() - start)
        return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}

    def memory(self, name: str) -> float:
        """MB alive in the middle of one way, beyond weights and their gradients."""
        return (self._on_cuda if self.device == "cuda" else self._on_cpu)(name) / 1e6

    def _on_cuda(self, name: str) -> float:
        gc.collect()
        before = torch.cuda.memory_allocated()
        found: list[float] = []
        self.ways[name](lambda kept: found.append(torch.cuda.memory_allocated() - before))
        return found[0]

    def _on_cpu(self, name: str) -> float:
        modules = (self.module, self.split)
        weights = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        found: list[float] = []

        def count(kept: Any) -> None:
            gc.collect()
            alive = [box.tensor for box in (ref() for ref in boxes.contents) if box is not None]
            storages = {
                storage.data_ptr(): storage.nbytes()
                for storage in (
                    t.untyped_storage() for t in (*alive, *tensors_in(kept)) if t is not None
                )
            }
            found.append(sum(size for key, size in storages.items() if key not in weights))

        # Boxes are not in the way of a split; other hooks it takes for somebody's offloading.
        boxes = Boxes()
        with boxes:
            self.ways[name](count)
        return found[0]


def tensors_in(kept: Any) -> list[Tensor]:
    """The tensors in what a way keeps."""
    if isinstance(kept, Tensor):
        return [kept]
    if hasattr(kept, "pending"):
        return list(kept.pending.tensors())
    if isinstance(kept, dict):
        return [t for value in kept.values() for t in tensors_in(value)]
    if isinstance(kept, (list, tuple)):
        return [t for value in kept for t in tensors_in(value)]
    return []


def measure(case: Case, device: str, kind: str, rounds: int) -> Row:
    """One row of the table."""
    bench = Bench(case, device, kind)
    times = bench.time(rounds)
    # What a captured stage holds, it holds always.
    held = {name: bench.memory(name) for name in bench.ways if (kind, name) != ("captured", "ours")}
    return Row(
        str(case),
        times["full"],
        times["ours"],
        times.get("torch"),
        held["full"],
        held.get("ours"),
        held.get("torch"),
    )


def cell(value: float | None, width: int, *, per: float = 1) -> str:
    """A figure, or a dash where there is none."""
    return f"{'—':>{width}}" if value is None else f"{value / per:{width}.2f}"


def show(rows: list[Row], title: str) -> None:
    """Print the table."""
    print(f"\n{title}")
    print(
        f"{'stage':38}{'F+B ms':>9}{'F+I+W':>9}{'ratio':>7}{'torch':>9}{'ratio':>7}"
        f"{'held F MB':>11}{'I to W':>9}{'/F':>6}{'torch':>9}{'/torch':>8}"
    )
    for row in rows:
        print(
            f"{row.stage:38}{row.full:9.2f}{row.ours:9.2f}{row.ours / row.full:7.2f}"
            f"{cell(row.torch, 9)}{cell(row.torch, 7, per=row.full)}"
            f"{row.held_after_forward:11.2f}{cell(row.held_ours, 9)}"
            f"{cell(row.held_ours, 6, per=row.held_after_forward)}{cell(row.held_torch, 9)}"
            f"{cell(row.held_torch and row.held_ours, 8, per=row.held_torch or 1)}"
        )


def main() -> None:
    """Measure on the CPU, and on CUDA where there is a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each way")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU table")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only the table of this device")
    parser.add_argument("--blocks", choices=KINDS, help="only the table of this kind")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = [("cpu", CPU_CASES)]
    if torch.cuda.is_available():
        tables.append(("cuda", CUDA_CASES))
    tables = [table for table in tables if options.device in (None, table[0])]
    results = {
        f"{kind} blocks, {device}": [measure(case, device, kind, options.rounds) for case in cases]
        for device, cases in tables
        for kind in KINDS
        if options.blocks in (None, kind) and (kind, device) != ("captured", "cpu")
    }
    if options.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in results.items()}))
        return
    for name, rows in results.items():
        machine = (
            torch.cuda.get_device_name()
            if name.endswith("cuda")
            else f"{torch.get_num_threads()} threads"
        )
        show(rows, f"split backward, {name} ({machine}), torch {torch.__version__}")
    if not torch.cuda.is_available():
        print("\nno CUDA device: the CUDA table is not measured here")


if __name__ == "__main__":
    main()
