"""What the demo tells: a progress bar while it trains, then what was done, and the files.

::

    zbv · 4 ranks · 8 stages · 8 microbatches
    gradients of 2 steps equal those of the unpipelined model …
    step 84 of 84  ━━━━━━━━━━━━━━━━━━━━━━━  loss 2.31
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pipeloom.cli.common import print_json
from pipeloom.cli.predictions import format_number, format_share
from pipeloom.cli.torch_verbs.character_model import ModelShape
from pipeloom.cli.torch_verbs.demo_training import (
    RECORDED_STEPS,
    Checked,
    DemoPlan,
    RankSummary,
    Recorded,
    Stepped,
)
from pipeloom.ir.timeline import Timeline
from pipeloom.ir.timeline_comparison import align_timeline, compare_timelines
from pipeloom.simulate.analysis import analyse
from pipeloom.simulate.engine import simulate
from pipeloom.view import html_report, perfetto
from pipeloom.view.text import can_encode, draw_coloured

#: Without a terminal there is no bar, but a line now and then.
LINES_WITHOUT_BAR = 5


class Story:
    """Hears what the ranks say, and tells it."""

    def __init__(self, plan: DemoPlan, *, is_local: bool, is_quiet: bool) -> None:
        self._plan = plan
        self._is_local = is_local
        self._is_quiet = is_quiet
        self._console = Console(highlight=False, quiet=is_quiet, soft_wrap=True)
        self._total = plan.steps + RECORDED_STEPS
        self._bar: tuple[Progress, TaskID] | None = None
        self.checks: list[Checked] = []
        self.steps: list[Stepped] = []
        self.memory: dict[int, RankSummary] = {}
        self._timelines: tuple[Timeline, Timeline] | None = None
        self._written: list[Path] = []

    # ── while it trains ──────────────────────────────────────────────────────────────────────

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Say what begins; show how far it is."""
        self._introduce()
        if not self._console.is_terminal or self._is_quiet:
            yield
            return
        columns = (
            TextColumn("step {task.completed} of {task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self._console) as progress:
            self._bar = (progress, progress.add_task("starting", total=self._total))
            yield
        self._bar = None

    def _introduce(self) -> None:
        schedule, plan = self._plan.schedule, self._plan
        place = "in this process" if self._is_local else "a process each"
        threads = f", threads per rank: {plan.threads}" if plan.device == "cpu" else ""
        self._console.print(
            f"[bold]{schedule.name}[/bold] · {schedule.num_ranks} ranks, {place} · "
            f"{schedule.num_stages} stages · {schedule.num_microbatches} microbatches · "
            f"{plan.device}{threads}"
        )

    def hear(self, rank: int, message: Any) -> None:
        """Take what a rank says."""
        if isinstance(message, Checked):
            self.checks.append(message)
            self._console.print(
                f"step {message.step}: the gradients of all {message.num_parameters:,} parameters "
                f"equal the unpipelined model's (largest difference {message.error:.0e})"
            )
        elif isinstance(message, Stepped):
            self.steps.append(message)
            self._show_step(message)
        elif isinstance(message, RankSummary):
            self.memory[rank] = message
        elif isinstance(message, Recorded):
            self._predict(message)

    def _show_step(self, step: Stepped) -> None:
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, advance=1, description=f"loss {step.loss:.3f}")
            return
        every = max(1, self._total // LINES_WITHOUT_BAR)
        if step.step % every == 0 or step.step == self._total - 1:
            self._console.print(f"step {step.step:>4}  loss {step.loss:.3f}")

    def _predict(self, recorded: Recorded) -> None:
        """The measured step and, at the same costs, the predicted one, with the same figures."""
        costs = recorded.costs
        predicted = simulate(recorded.measured.schedule, costs)
        measured = align_timeline(recorded.measured, predicted, scale=1e3)
        # Its memory was counted in activations; with the costs it can be told in bytes.
        measured = replace(measured, memory=(), memory_unit=costs.memory_unit)
        self._timelines = (analyse(measured, costs=costs), predicted)

    # ── afterwards ───────────────────────────────────────────────────────────────────────────

    @property
    def timelines(self) -> tuple[Timeline, Timeline]:
        """(measured, predicted)."""
        assert self._timelines is not None, "every rank returned, so the last step was recorded"
        return self._timelines

    @property
    def seconds_per_step(self) -> float:
        """The median of the ordinary steps; of all, where there are none."""
        times = [step.seconds for step in self.steps if step.counts]
        return statistics.median(times or [step.seconds for step in self.steps])

    @property
    def tokens_per_second(self) -> float:
        tokens = self._plan.rows * ModelShape().context
        return tokens / self.seconds_per_step

    def save(self, report: Path, trace: Path) -> None:
        """Write both timelines as a report and as a trace."""
        title = f"pipeloom demo: {self._plan.schedule.name}"
        html_report.render(self.timelines, report, title=title)
        perfetto.render(self.timelines, trace)
        self._written = [report, trace]

    def print_json(self) -> None:
        """Everything that was found, for programs."""
        measured, predicted = self.timelines
        print_json(
            {
                "schedule": self._plan.schedule.name,
                "ranks": self._plan.schedule.num_ranks,
                "stages": self._plan.schedule.num_stages,
                "microbatches": self._plan.schedule.num_microbatches,
                "transport": "local" if self._is_local else "torch",
                "device": self._plan.device,
                "threads": self._plan.threads,
                "gradient_errors": [check.error for check in self.checks],
                "losses": [step.loss for step in self.steps],
                "seconds_per_step": self.seconds_per_step,
                "tokens_per_second": self.tokens_per_second,
                "measured": _tell_figures(measured),
                "predicted": _tell_figures(predicted),
                "process_peak_mib": [self.memory[rank].peak for rank in sorted(self.memory)],
                "process_start_mib": [self.memory[rank].before for rank in sorted(self.memory)],
                "written": [str(path) for path in self._written],
            }
        )

    def print(self) -> None:
        """Everything that was found, for people."""
        console, (measured, predicted) = self._console, self.timelines
        console.print("\nA step at the end, as it was measured and as it was predicted:\n")
        picture = draw_coloured(
            (measured, predicted), width=console.width, unicode=can_encode(console.encoding)
        )
        console.print(picture)
        for label, text in self._list_facts():
            console.print(f"{label:<16}{text}")
        for note in self._list_notes():
            console.print(f"[dim]{note}[/dim]")
        console.print()
        report, trace = self._written
        console.print(f"wrote {report}  (open it in a browser)", markup=False)
        console.print(f"wrote {trace}  (open it at https://ui.perfetto.dev)", markup=False)

    def _list_facts(self) -> Iterator[tuple[str, str]]:
        measured, predicted = self.timelines
        yield "loss", f"{self.steps[0].loss:.3f} → {self.steps[-1].loss:.3f}"
        yield (
            "throughput",
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"{1e3 * self.seconds_per_step:.1f} ms per step",
        )
        ratio = measured.span / predicted.span - 1
        yield (
            "step",
            f"measured {format_number(measured.span, 'ms')}, predicted "
            f"{format_number(predicted.span, 'ms')} ({ratio:+.0%})",
        )
        difference = compare_timelines(predicted, measured).mean_duration_ratio
        if difference is not None:
            yield "computation", f"measured {difference:.2f} × what was predicted"
        yield (
            "bubble",
            f"measured {format_share(measured.bubble)}, predicted {format_share(predicted.bubble)}",
        )
        yield (
            "peak memory",
            "per rank "
            + ", ".join(f"{peak:.1f}" for peak in measured.peak_memory)
            + " MiB (activations, weights, gradients, optimizer)",
        )
        where = "GPU" if self._plan.device == "cuda" else "process"
        grown = [summary.peak - summary.before for _, summary in sorted(self.memory.items())]
        peaks = [summary.peak for _, summary in sorted(self.memory.items())]
        yield (
            "",
            f"per {where} {', '.join(f'{peak:.0f}' for peak in peaks)} MiB, of which "
            f"{', '.join(f'{size:.0f}' for size in grown)} since the start of training",
        )

    def _list_notes(self) -> Iterator[str]:
        cores = os.cpu_count() or 1
        ranks = self._plan.schedule.num_ranks
        if self._is_local:
            yield "All ranks take turns in one process here, so nothing overlaps."
        elif self._plan.device == "cpu" and cores < ranks:
            yield (
                f"{ranks} ranks share {cores} cores here, so a step takes longer than its schedule "
                "says; with a core or a device for every rank it would not."
            )
        elif self._plan.device == "cuda" and torch.cuda.device_count() < ranks:
            yield f"{ranks} ranks share {torch.cuda.device_count()} GPU here."


def _tell_figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "span_ms": timeline.span,
        "makespan_ms": timeline.makespan,
        "bubble": timeline.bubble,
        "idle_fraction": timeline.idle_fraction,
        "peak_memory_mib": list(timeline.peak_memory),
    }
