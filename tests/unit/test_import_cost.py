"""Planning starts fast because it loads little: what an import may bring in, and what not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "pipeloom"
HEAVY = ("torch", "numpy", "matplotlib", "scipy", "ortools", "IPython")
TERMINAL = ("typer", "click", "rich")
BELOW_THE_TORCH_LINE = (
    "pipeloom.runtime",
    "pipeloom.model",
    "pipeloom.checkpoint",
    "pipeloom.torch_api",
    "pipeloom.integrations",
    "pipeloom.bench",
    "pipeloom.cli.torch_verbs",
)


def find_modules_above_the_torch_line() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("pipeloom", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        below = any(f"{name}.".startswith(f"{low}.") for low in BELOW_THE_TORCH_LINE)
        if not below and parts[-1] != "__main__":
            names.append(name)
    return names


def loaded_after(statement: str, *, among: tuple[str, ...]) -> set[str]:
    """The top-level packages of `among` that a fresh interpreter has loaded after `statement`."""
    code = (
        f"import sys\n{statement}\n"
        f"print(*({{name.partition('.')[0] for name in sys.modules}} & set({among!r})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_after("import rich.text", among=TERMINAL) == {"rich"}


def test_importing_pipeloom_loads_no_heavy_package_and_no_terminal_package() -> None:
    assert loaded_after("import pipeloom", among=HEAVY + TERMINAL) == set()


def test_importing_the_command_line_loads_no_heavy_package() -> None:
    assert loaded_after("import pipeloom.cli.main", among=HEAVY) == set()


def test_no_module_above_the_torch_line_loads_a_heavy_package() -> None:
    """Optional packages are imported when a function needs them, never when a module loads."""
    modules = find_modules_above_the_torch_line()
    assert "pipeloom.ir.action" in modules
    everything = "import " + ", ".join(modules)
    if loaded_after(everything, among=HEAVY):
        guilty = {name: loaded_after(f"import {name}", among=HEAVY) for name in modules}
        pytest.fail(f"loads on import: { {k: sorted(v) for k, v in guilty.items() if v} }")


def test_planning_works_where_torch_is_not_installed() -> None:
    """With the heavy packages made unfindable, a schedule is still built, verified and printed."""
    code = (
        "import sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        "import pipeloom\n"
        "schedule = pipeloom.build_schedule('1f1b', ranks=2, microbatches=3)\n"
        "pipeloom.verify(schedule).raise_for_errors()\n"
        "print(schedule)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "1F2" in result.stdout
