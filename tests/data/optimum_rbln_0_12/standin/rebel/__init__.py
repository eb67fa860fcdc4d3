"""A stand-in for the closed RBLN compiler: it knows memory plans, kept as JSON, no more."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

_ALIGNMENT_BYTES = 2**21


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class RBLNCompiledModel:
    """The methods of the compiler's class of this name that deal with memory."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            self._plan: dict[str, Any] = json.load(file)

    def get_alloc_per_chiplet_by_key(self) -> dict[str, list[list[int]]]:
        alloc = {key: [list(node) for node in grid] for key, grid in self._plan["alloc"].items()}
        dram: list[list[int]] = []
        for grid in self._plan["dram"].values():
            aligned = [[_align(num_bytes) for num_bytes in node] for node in grid]
            dram = dram or [[0] * len(node) for node in aligned]
            dram = [
                [total + num_bytes for total, num_bytes in zip(*nodes, strict=True)]
                for nodes in zip(dram, aligned, strict=True)
            ]
        if dram:
            alloc["DramTensor"] = dram
        return alloc

    def get_alloc_per_node_by_key(self) -> dict[str, list[int]]:
        alloc = self.get_alloc_per_chiplet_by_key()
        return {key: [sum(node) for node in grid] for key, grid in alloc.items()}

    def exp_get_dram_tensor_sizes(self) -> dict[str, list[list[int]]]:
        return {name: [list(node) for node in grid] for name, grid in self._plan["dram"].items()}

    def exp_multiply_buffer_size(self, factors: dict[str, int]) -> None:
        self.exp_rescale_buffer_size({name: (factor, 1) for name, factor in factors.items()})

    def exp_rescale_buffer_size(self, ratios: dict[str, tuple[int, int]]) -> None:
        for name, (target, current) in ratios.items():
            for node in self._plan["dram"][name]:
                for chiplet, num_bytes in enumerate(node):
                    scaled = Fraction(num_bytes * target, current)
                    if scaled.denominator != 1:
                        raise ValueError(f"{name}: {num_bytes} * {target} / {current} is not whole")
                    node[chiplet] = scaled.numerator

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self._plan, file)


class Runtime:
    """Named by optimum-rbln at import; never created."""


def npu_is_available(_device: int = 0) -> bool:
    return False


def get_npu_name(_device: int = 0) -> str | None:
    return None


def device_count() -> int:
    return 0


def compile(*_args: object, **_options: object) -> None:  # noqa: A001 - the compiler's name
    raise RuntimeError("the stand-in cannot compile")
