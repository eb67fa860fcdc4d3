"""`import reblock.rbln`: without torch, and with every name that it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reblock.rbln

NEEDS_TORCH = "RBLNAutoModelForCausalLM"


def modules_after(statements: str) -> set[str]:
    """Return the top-level modules in a fresh interpreter that ran `statements`."""
    code = f"import sys; sys.path[:] = {sys.path!r}; {statements}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return {module.partition(".")[0] for module in result.stdout.split()}


def test_import_loads_the_standard_library_only() -> None:
    modules = modules_after("import reblock.rbln")
    assert not modules & {"torch", "transformers", "numpy", "rebel", "optimum"}
    assert not modules - sys.stdlib_module_names - {"__main__", "reblock"}


def test_every_name_but_the_model_is_there_without_torch() -> None:
    names = ", ".join(name for name in reblock.rbln.__all__ if name != NEEDS_TORCH)
    assert "torch" not in modules_after(f"from reblock.rbln import {names}")


def test_all_is_sorted_and_holds_what_dir_shows() -> None:
    assert reblock.rbln.__all__ == sorted(reblock.rbln.__all__)
    assert dir(reblock.rbln) == reblock.rbln.__all__
    assert NEEDS_TORCH in reblock.rbln.__all__


def test_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RBLNLlamaForCausalLM'"):
        reblock.rbln.RBLNLlamaForCausalLM  # noqa: B018  looking it up is the test
