"""`import reblock`: cheap, and with every name that it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reblock


def test_all_is_sorted_and_every_name_in_it_can_be_imported() -> None:
    assert reblock.__all__ == sorted(reblock.__all__)
    for name in reblock.__all__:
        assert getattr(reblock, name) is not None
    assert dir(reblock) == reblock.__all__


def test_all_holds_every_name_that_is_loaded_on_first_use() -> None:
    assert set(reblock.__all__) == {*reblock._HOMES, "__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'resize_all'"):
        reblock.resize_all  # noqa: B018  looking it up is the test


def test_importing_the_package_imports_none_of_its_modules() -> None:
    code = "import reblock, sys; print(sorted(m for m in sys.modules if m[:7] == 'reblock'))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "['reblock', 'reblock._version']\n"
