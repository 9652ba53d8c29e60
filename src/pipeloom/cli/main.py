"""``pipeloom VERB …``: finds the verb's module, and turns errors into messages.

::

    pipeloom show zbv -r 4 -m 8
             └── VERBS["show"] → pipeloom.cli.show → run(…)

A verb is a module with a function ``run`` whose annotated parameters are its arguments and whose
docstring is its help. Modules are loaded when their verb runs, so that ``pipeloom --help`` starts
at once and planning never loads torch.

Exit status: 0 done; 1 a check failed, or a step of training did; 2 a mistake in what was asked.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as make_command

from pipeloom import __version__
from pipeloom.errors import PipeloomError, StepError


class Verb(NamedTuple):
    """Where a verb lives, and what the list of verbs says about it."""

    module: str
    summary: str


VERBS = {
    "schedules": Verb("pipeloom.cli.schedules", "List the library, with constraints."),
    "show": Verb("pipeloom.cli.show", "Show a schedule; --save writes it or its picture."),
    "check": Verb("pipeloom.cli.check", "Verify a schedule; exit 1 with a report when it fails."),
    "passes": Verb("pipeloom.cli.passes", "Run passes and show what each one changed."),
    "simulate": Verb("pipeloom.cli.simulate", "Predict time, idle time and memory."),
    "compare": Verb("pipeloom.cli.compare", "Compare the schedules of the library."),
    "report": Verb("pipeloom.cli.report", "Write timelines as one HTML page."),
    "demo": Verb("pipeloom.cli.torch_verbs.demo", "Train a small model on 4 local ranks."),
    "profile": Verb("pipeloom.cli.torch_verbs.profile", "Measure what the stages cost."),
    "bench": Verb("pipeloom.cli.torch_verbs.bench", "Measure against torch in the same run."),
}


class LazyVerb(TyperCommand):
    """Stands for a verb until it is called: its name and summary, without its module."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Called when the verb is: from here on the real command takes over."""
        assert self.name is not None
        return load_verb(self.name).make_context(info_name, args, *rest, **extra)


@cache
def load_verb(name: str) -> Any:
    """Load the module of a verb and make its command."""
    app = typer.Typer(**_PLAIN)
    app.command(name)(import_module(VERBS[name].module).run)
    return make_command(app)


class VerbGroup(TyperGroup):
    """The verbs of the table; what pipeloom raises on purpose becomes a message."""

    def __init__(self, **attributes: Any) -> None:
        attributes["commands"] = {
            name: LazyVerb(name, help=verb.summary) for name, verb in VERBS.items()
        }
        super().__init__(**attributes)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except PipeloomError as error:
                _complain(error)
                raise typer.Exit(1 if isinstance(error, StepError) else 2) from error
            except BrokenPipeError:
                raise
            except OSError as error:
                _complain(error)
                raise typer.Exit(2) from error


def _complain(error: Exception) -> None:
    for line in (str(error), *getattr(error, "__notes__", ())):
        print(line, file=sys.stderr)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=sys.stderr)


_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(cls=VerbGroup, no_args_is_help=True, **_PLAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pipeloom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plan, check, draw and run pipeline-parallel training."""


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        # Where the terminal cannot show a character, a "?" is better than no output.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="pipeloom")
