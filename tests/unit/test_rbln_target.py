from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from reference_plans import ALL, DATA, load_config

from reblock.errors import UsageError
from reblock.rbln import RBLNDecoderOnlyModelForCausalLMConfig
from reblock.rbln.target import target_device


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in its place makes the import fail, whatever is installed.
    monkeypatch.setitem(sys.modules, "rebel", None)


@pytest.mark.parametrize("name", ALL)
def test_device_of_an_artifact_is_that_of_its_programs(name: str) -> None:
    config = RBLNDecoderOnlyModelForCausalLMConfig.load(os.path.join(DATA, name))
    assert target_device(config) == load_config(name).npu


def test_device_of_the_configuration_goes_first() -> None:
    programs = [{"npu": "RBLN-CA25"}]
    assert target_device(SimpleNamespace(npu="cpu", _compile_cfgs=programs)) == "cpu"
    assert target_device(SimpleNamespace(npu=None, _compile_cfgs=programs)) == "RBLN-CA25"


@pytest.mark.parametrize("attribute", ["_compile_cfgs", "compile_cfgs"])
@pytest.mark.parametrize(
    "programs",
    [
        [{"npu": None}, {"npu": "RBLN-CR13"}],
        [{}, {"npu": "RBLN-CR13"}],
        (SimpleNamespace(npu=None), SimpleNamespace(npu="RBLN-CR13")),
    ],
)
def test_programs_may_be_dictionaries_or_objects(attribute: str, programs: Any) -> None:
    assert target_device(SimpleNamespace(**{attribute: programs})) == "RBLN-CR13"


def test_device_that_nobody_names_is_the_attached_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(get_npu_name=lambda: "RBLN-CA22")
    monkeypatch.setitem(sys.modules, "rebel", compiler)
    assert target_device(SimpleNamespace(npu=None, _compile_cfgs=[])) == "RBLN-CA22"


def test_compiler_without_a_device_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(get_npu_name=lambda: None)
    monkeypatch.setitem(sys.modules, "rebel", compiler)
    with pytest.raises(UsageError, match=r"set rbln_config\.npu"):
        target_device(SimpleNamespace())


@pytest.mark.usefixtures("no_compiler")
def test_device_that_nobody_names_is_asked_for_where_no_compiler_is() -> None:
    with pytest.raises(ValueError, match=r"set rbln_config\.npu"):
        target_device(SimpleNamespace(npu=None))
