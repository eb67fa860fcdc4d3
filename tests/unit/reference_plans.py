"""Memory plans to test against: the reference artifacts, and plans made up by formula."""

from __future__ import annotations

import json
import os

from reblock.config import RBLNConfig, parse_config
from reblock.memory import CacheTensor, Grid, MemoryPlan, ProgramMemory

DATA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "optimum_rbln_0_12")

QWEN3_CA25 = "qwen3_8b_ca25x4"
QWEN3_CR13 = "qwen3_8b_cr13"
LLAMA2_FLASH = "llama2_7b_flash_ca22"
LLAMA2_EAGER = "llama2_7b_eager_ca22"
ALL = (QWEN3_CA25, QWEN3_CR13, LLAMA2_FLASH, LLAMA2_EAGER)


def read_config_bytes(name: str) -> bytes:
    with open(os.path.join(DATA, name, "rbln_config.json"), "rb") as file:
        return file.read()


def load_config(name: str) -> RBLNConfig:
    return parse_config(read_config_bytes(name), path=name)


def load_programs(name: str) -> list[ProgramMemory]:
    return [_read_program(name, program.name) for program in load_config(name).programs]


def load_plan(name: str) -> MemoryPlan:
    config = load_config(name)
    return MemoryPlan.from_programs(
        load_programs(name),
        resizable=config.resizable,
        current_blocks=config.kvcache_num_blocks,
        source=name,
    )


def make_plan(
    *,
    static: list[list[int]],
    resizable: list[list[list[int]]] | None = None,
    fixed: list[list[list[int]]] | None = None,
    current_blocks: int = 1,
) -> MemoryPlan:
    """Return a plan whose resizable caches are given by their bytes per block."""
    caches = [
        CacheTensor(
            name=f"resizable_{index}",
            is_resizable=True,
            bytes_grid=tuple(tuple(size * current_blocks for size in node) for node in rows),
        )
        for index, rows in enumerate(resizable or [])
    ]
    caches += [
        CacheTensor(name=f"fixed_{index}", is_resizable=False, bytes_grid=to_grid(rows))
        for index, rows in enumerate(fixed or [])
    ]
    return MemoryPlan(
        static={"Weight": to_grid(static)}, caches=tuple(caches), current_blocks=current_blocks
    )


def to_grid(rows: list[list[int]]) -> Grid:
    return tuple(tuple(row) for row in rows)


def _read_program(artifact: str, program: str) -> ProgramMemory:
    with open(os.path.join(DATA, artifact, f"{program}.rbln"), encoding="utf-8") as file:
        values = json.load(file)
    return ProgramMemory(
        name=program,
        alloc={term: to_grid(rows) for term, rows in values["alloc"].items()},
        caches={cache: to_grid(rows) for cache, rows in values["dram"].items()},
    )
