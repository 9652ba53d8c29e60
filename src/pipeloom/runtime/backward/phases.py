"""In which order the backward of one microbatch may be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom.errors import BackwardError, PipeloomError
from pipeloom.runtime.backward.method import SavedMicrobatch

__all__ = ["enter_phase", "failed_unless_done", "where"]

# phase → what must be done before: F ─► B, or F ─► I ─► W
BEFORE = {"B": "F", "I": "F", "W": "I"}


def enter_phase(saved: SavedMicrobatch, phase: str, stage: int | None) -> None:
    """Go on to a phase, or say why that cannot be.

    >>> saved = SavedMicrobatch(3, [], [])
    >>> enter_phase(saved, "W", 1)
    Traceback (most recent call last):
    pipeloom.errors.BackwardError: stage 1, microbatch 3: W needs I before it, but the last was F
    """
    if saved.done != BEFORE[phase]:
        raise BackwardError(
            f"{where(stage, saved.microbatch)}: {phase} needs {BEFORE[phase]} before it, "
            f"but the last was {saved.done}",
            stage=stage,
            microbatch=saved.microbatch,
        )
    saved.done = phase


@contextmanager
def failed_unless_done(saved: SavedMicrobatch, stage: int | None) -> Iterator[None]:
    """Nothing goes on from a phase that raised."""
    try:
        yield
    except BaseException as error:
        saved.done = f"a failed {saved.done}"
        if isinstance(error, RuntimeError) and str(error).startswith("Mismatch in shape"):
            raise BackwardError(
                f"{where(stage, saved.microbatch)}: a gradient does not fit its output: {error}",
                stage=stage,
                microbatch=saved.microbatch,
            ) from error
        note = f"in the backward of {where(stage, saved.microbatch)}"
        if not isinstance(error, PipeloomError) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def where(stage: int | None, microbatch: int) -> str:
    """How messages name a place."""
    return (
        f"microbatch {microbatch}" if stage is None else f"stage {stage}, microbatch {microbatch}"
    )
