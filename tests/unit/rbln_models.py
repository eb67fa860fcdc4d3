"""Compiled models to test against: those of the stand-in compiler, and ones made up."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

from reference_plans import DATA

from reblock.rbln import RBLNDecoderOnlyModelForCausalLMConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

Rows = list[list[int]]


def load_standin() -> ModuleType:
    """Return the stand-in for the compiler, loaded by path and not as `rebel`."""
    path = os.path.join(DATA, "standin", "rebel", "__init__.py")
    spec = importlib.util.spec_from_file_location("rebel_standin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STANDIN = load_standin()


def load_artifact(name: str) -> tuple[dict[str, Any], RBLNDecoderOnlyModelForCausalLMConfig]:
    """Return the compiled models and the configuration of a stand-in artifact."""
    directory = os.path.join(DATA, name)
    models = {
        file.removesuffix(".rbln"): STANDIN.RBLNCompiledModel(os.path.join(directory, file))
        for file in sorted(os.listdir(directory))
        if file.endswith(".rbln")
    }
    return models, RBLNDecoderOnlyModelForCausalLMConfig.load(directory)


def sizes_of(models: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every model holds, to compare before and after."""
    return {name: model.exp_get_dram_tensor_sizes() for name, model in models.items()}


class FakeModel:
    """A compiled model of given sizes, which need not be of one shape."""

    def __init__(
        self, alloc: Mapping[str, Sequence[Sequence[int]]], dram: Mapping[str, Rows] | None = None
    ) -> None:
        self.alloc = alloc
        self.dram = {name: [list(row) for row in rows] for name, rows in (dram or {}).items()}
        self.scaled: list[dict[str, tuple[int, int]]] = []

    def get_alloc_per_chiplet_by_key(self) -> dict[str, Any]:
        # The sum of the caches is reported among the rest, and must not be counted.
        return {**self.alloc, "DramTensor": [[10**30]]}

    def exp_get_dram_tensor_sizes(self) -> dict[str, Rows]:
        return self.dram

    def exp_multiply_buffer_size(self, factors: dict[str, int]) -> None:
        for name, factor in factors.items():
            self.dram[name] = [[size * factor for size in row] for row in self.dram[name]]

    def exp_rescale_buffer_size(self, ratios: dict[str, tuple[int, int]]) -> None:
        self.scaled.append(ratios)
        for name, (target, current) in ratios.items():
            assert all(size * target % current == 0 for row in self.dram[name] for size in row)
            self.dram[name] = [
                [size * target // current for size in row] for row in self.dram[name]
            ]


class OldModel:
    """A compiled model of a compiler that cannot rescale."""

    def __init__(self, model: Any) -> None:
        self.get_alloc_per_chiplet_by_key = model.get_alloc_per_chiplet_by_key
        self.exp_get_dram_tensor_sizes = model.exp_get_dram_tensor_sizes
        self.exp_multiply_buffer_size = model.exp_multiply_buffer_size


class BrokenModel(FakeModel):
    """A compiled model that fails when it is rescaled."""

    def exp_rescale_buffer_size(self, ratios: dict[str, tuple[int, int]]) -> None:
        raise OSError("no memory")


def warnings_in(caplog: Any) -> list[str]:
    """Return the warnings that were logged."""
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
