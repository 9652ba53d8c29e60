"""``pipeloom profile``: measure what stages cost on their device, and write it as a cost file.

::

    stages.py:make_stages ──call──► stages, one microbatch ──run──► costs.json ──► simulate, compare
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeloom.cli.common import AsJson, check_target, print_table
from pipeloom.errors import MissingExtraError, PipeloomError


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function, in a file or a module, that makes the stages.",
            show_default=False,
        ),
    ],
    save: Annotated[
        Path, typer.Option("--save", metavar="FILE", help="Where the costs go.")
    ] = Path("costs.json"),
    microbatches: Annotated[
        int, typer.Option("-m", "--microbatches", metavar="N", min=1, help="Measured per step.")
    ] = 8,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Measured, after one to warm up.")
    ] = 3,
    optimizer_states: Annotated[
        int,
        typer.Option(
            "--optimizer-states",
            metavar="N",
            min=0,
            help="Numbers that the optimizer keeps per parameter: 2 for Adam.",
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="N", min=1, help="Of torch, on the CPU.", show_default="torch's"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure F, I, W and B, what is kept and what crosses, for every stage; write a cost file.

    FUNCTION takes nothing and returns a dict: stages, a list of modules in order, on their device;
    arguments, a tuple with one microbatch for the first stage; and, if the last stage has no loss
    in it, loss_fn(output, target) and target.

    The stages run one at a time in this process. The time of messages is not measured: add latency
    and bandwidth to the file.
    """
    check_target(save)
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose="pipeloom profile")
    import torch

    from pipeloom.cli.torch_verbs.stage_costs import (
        add_bytes,
        in_milliseconds,
        measure_bytes,
        measure_times,
    )
    from pipeloom.cost.files import costs_to_json, save_costs

    if threads is not None:
        torch.set_num_threads(threads)
    stages, arguments, loss = read_made(source, load_function(source)())
    times = measure_times(stages, arguments, microbatches=microbatches, steps=steps, **loss)
    kept = measure_bytes(stages, arguments, **loss)
    costs = in_milliseconds(add_bytes(times, kept, optimizer_states=optimizer_states))
    save_costs(costs, save)
    if as_json:
        print(costs_to_json(costs), end="")
        return
    columns: list[Any] = [costs.forward, costs.input, costs.weight, costs.full]
    sizes: list[Any] = [costs.activation, costs.retained, costs.boundary, costs.weights]
    print_table(
        ["stage", "F ms", "I ms", "W ms", "B ms", "kept MiB", "until W", "sent MiB", "weights MiB"],
        [
            [
                str(stage),
                *(f"{column[stage]:.3f}" for column in columns),
                *(f"{column[stage]:.2f}" for column in sizes),
            ]
            for stage in range(len(stages))
        ],
        numbers=range(9),
    )
    print(f"wrote {save}")


def load_function(source: str) -> Any:
    """The function that ``file.py:name`` or ``package.module:name`` means."""
    where, colon, name = source.rpartition(":")
    if not colon or not where or not name:
        raise PipeloomError(
            f"{source!r} does not say a function; write it as stages.py:make_stages or "
            "package.module:make_stages"
        )
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise PipeloomError(f"there is no file {path}")
        # As `python file.py` does: what lies beside it can be imported.
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise PipeloomError(f"{source}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise PipeloomError(f"{where} has no function {name!r}")
    return function


def read_made(source: str, made: Any) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """(stages, arguments, loss) of what the function returned, or everything wrong with it."""
    from torch import nn

    if not isinstance(made, Mapping):
        raise PipeloomError(f"{source} returned {type(made).__name__}; it must return a dict")
    known = ("stages", "arguments", "loss_fn", "target")
    problems = [f"{key!r} is none of {', '.join(known)}" for key in made if key not in known]
    problems += [f"{key!r} is missing" for key in known[:2] if key not in made]
    stages = list(made.get("stages", ()))
    if not all(isinstance(stage, nn.Module) for stage in stages) or ("stages" in made) > len(
        stages
    ):
        problems.append("'stages' must be a list of modules, at least one")
    arguments = made.get("arguments", ())
    if not isinstance(arguments, (tuple, list)):
        problems.append("'arguments' must be a tuple, such as (batch,)")
    if "target" in made and "loss_fn" not in made:
        problems.append("'target' is given without 'loss_fn'")
    if problems:
        raise PipeloomError(
            f"what {source} returned cannot be used:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    loss = {key: made[key] for key in ("loss_fn", "target") if key in made}
    return stages, tuple(arguments), loss
