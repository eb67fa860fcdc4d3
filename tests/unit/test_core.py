"""What holds for the whole core: what it imports, and that its examples are true."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest

CORE = [
    "block_count",
    "budget",
    "config",
    "devices",
    "errors",
    "info",
    "json_edit",
    "json_fields",
    "memory",
    "model_spec",
    "options",
    "planning",
    "planning.target",
    "sizing",
    "units",
]

# Imported by the command that only reads the block count, which must start fast.
LIGHT = ["block_count", "errors", "json_fields"]


def modules_after_import(*names: str) -> set[str]:
    """Return the top-level modules in a fresh interpreter that imported `names` of the core."""
    imports = "; ".join(f"import reblock.{name}" for name in names)
    code = f"import sys; {imports}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {module.partition(".")[0] for module in result.stdout.split()}


@pytest.mark.parametrize("name", CORE)
def test_examples_in_the_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"reblock.{name}")).failed == 0


def test_core_imports_the_standard_library_only() -> None:
    foreign = modules_after_import(*CORE) - sys.stdlib_module_names - {"__main__", "reblock"}
    assert not foreign


def test_light_modules_import_nothing_that_is_slow() -> None:
    slow = {"dataclasses", "enum", "fractions", "inspect", "pathlib", "typing"}
    # json brings in re, which brings in enum.
    assert not modules_after_import(*LIGHT) & (slow - {"enum"})
    assert not modules_after_import("errors", "block_count") & slow
