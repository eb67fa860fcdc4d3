from __future__ import annotations

import inspect
import pickle

import pytest

from reblock import errors
from reblock.errors import ReblockError

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, ReblockError)
]

# What any of the keyword arguments may look like.
DATA: dict[str, object] = {
    "holder": "process 4711",
    "available_bytes": 10,
    "budget": "10G",
    "budget_bytes": 11,
    "device": "RBLN-CA99",
    "install": "pip install 'reblock[torch]'",
    "known": ("RBLN-CA22", "cpu"),
    "max_tokens": 5,
    "method": "exp_rescale_buffer_size",
    "model": "org/name",
    "modules": ("language_model",),
    "nearest": "batch_size",
    "needed_bytes": 12,
    "num_blocks": 1,
    "num_min_blocks": 9,
    "num_tokens": 6,
    "option": "batch_sise",
    "package": "torch",
    "path": "/artifact",
    "smallest_budget_bytes": 13,
    "tightest": (0, 1),
}


def make(cls: type[ReblockError]) -> tuple[ReblockError, dict[str, object]]:
    names = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    data = {name: DATA[name] for name in names}
    return cls("it is so", **data), data


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_carries_its_data_as_attributes(cls: type[ReblockError]) -> None:
    error, data = make(cls)
    assert {name: getattr(error, name) for name in data} == data
    assert "it is so" in str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_the_way_to_another_process(cls: type[ReblockError]) -> None:
    error, data = make(cls)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert {name: getattr(copy, name) for name in data} == data


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_stands_in_the_tree_of_the_module(cls: type[ReblockError]) -> None:
    assert f"{cls.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", CLASSES)
def test_exit_code_follows_the_family(cls: type[ReblockError]) -> None:
    families = {errors.UsageError: 2, errors.DoesNotFit: 3, errors.BadArtifact: 4}
    families[errors.InvalidLogits] = 4
    expected = next((code for family, code in families.items() if issubclass(cls, family)), 1)
    assert cls.exit_code == expected


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.DoesNotFit, ValueError),
        (errors.NotResizable, ValueError),
        (errors.CompilerTooOld, RuntimeError),
        (errors.InvalidLogits, RuntimeError),
    ],
)
def test_error_is_also_the_builtin_that_callers_expect(
    cls: type[ReblockError], builtin: type[Exception]
) -> None:
    assert issubclass(cls, builtin)


def test_error_of_an_artifact_always_names_the_path() -> None:
    assert str(errors.CorruptArtifact("is cut off", path="/a/b.rbln")) == "/a/b.rbln: is cut off"


def test_unknown_device_is_an_error_of_the_option_npu() -> None:
    error = errors.UnknownDevice("no", device="x", known=("cpu",))
    assert error.option == "npu"
    assert error.nearest is None
