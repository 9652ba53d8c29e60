"""Every error that pipeloom raises on purpose.

::

    PipeloomError
    ├── ScheduleError      (ValueError)    a schedule or a request for one is wrong
    │   └── VerificationError              the verifier found violations; ``.report`` lists them
    ├── ParseError         (ValueError)    text, CSV or JSON that says no action or schedule
    ├── ShapeError         (ValueError)    batch, microbatch or boundary tensors of a wrong shape
    ├── CostFileError      (ValueError)    a cost file or cost model that cannot be used
    ├── BackwardMethodError (ValueError)   a stage's backward cannot be split as asked
    ├── BackwardError      (RuntimeError)  a stage's backward would be wrong; names the parameters
    ├── MissingExtraError  (ImportError)   an optional package is needed; names the extra to install
    └── StepError          (RuntimeError)  with rank, stage, microbatch, action and origin
        ├── StepFailed                     an action raised, here or on another rank
        ├── RankLost                       a rank went away without a word
        └── PipelineStalled                nothing moved for the timeout

Mistakes of a user are ``ValueError``; what happens while a step runs is ``RuntimeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeloom.verify.report import Report

__all__ = [
    "BackwardError",
    "BackwardMethodError",
    "CostFileError",
    "MissingExtraError",
    "ParseError",
    "PipelineStalled",
    "PipeloomError",
    "RankLost",
    "ScheduleError",
    "ShapeError",
    "StepError",
    "StepFailed",
    "VerificationError",
]


class PipeloomError(Exception):
    """The root: ``except PipeloomError`` catches everything pipeloom raises on purpose."""


class ScheduleError(PipeloomError, ValueError):
    """A schedule, or a request for one, is wrong; the message says which values are legal."""


class VerificationError(ScheduleError):
    """A schedule does not verify. The message is the report; ``report`` is the data."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[VerificationError], tuple[Report]]:
        return type(self), (self.report,)


class ParseError(PipeloomError, ValueError):
    """Text that does not say what it should; the message quotes it and says where and why."""


class ShapeError(PipeloomError, ValueError):
    """A batch, a microbatch or a boundary tensor has a shape or type nobody promised."""


class CostFileError(PipeloomError, ValueError):
    """A cost file or model cannot be used; the message goes through it field by field."""


class BackwardMethodError(PipeloomError, ValueError):
    """A stage's backward cannot be split in the way asked for; says why and what works."""


class BackwardError(PipeloomError, RuntimeError):
    """A stage's backward cannot give the right gradients; ``parameters`` names those concerned."""

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        parameters: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch
        self.parameters = parameters

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_backward_error, (self.args[0], dict(self.__dict__))


def _rebuild_backward_error(message: str, attributes: dict[str, object]) -> BackwardError:
    error = BackwardError(message)
    error.__dict__.update(attributes)
    return error


class MissingExtraError(PipeloomError, ImportError):
    """An optional package is missing; the message is the command that installs it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'pipeloom[{extra}]'"
        )
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_missing_extra, (self.package, self.extra, self.purpose)


def _rebuild_missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    return MissingExtraError(package, extra=extra, purpose=purpose)


class StepError(PipeloomError, RuntimeError):
    """A training step could not be finished.

    ``rank``, ``stage``, ``microbatch`` and ``action`` say where (``None`` where it is not known),
    ``origin`` is the traceback text of the rank where it began.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        origin: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.origin = origin

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_step_error, (type(self), self.args[0], dict(self.__dict__))


def _rebuild_step_error(
    kind: type[StepError], message: str, attributes: dict[str, object]
) -> StepError:
    error = kind(message)
    error.__dict__.update(attributes)
    return error


class StepFailed(StepError):
    """An action raised an exception, on this rank or on another."""


class RankLost(StepError):
    """A rank went away without saying why (killed, crashed, or its host is gone)."""


class PipelineStalled(StepError):
    """Nothing moved for the timeout; the message shows what every rank was doing."""
