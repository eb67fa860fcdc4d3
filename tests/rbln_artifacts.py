"""Artifacts as optimum-rbln lays them out, and a stand-in for the compiler that reads them.

See `data/optimum_rbln_0_12/README.md`: the configurations are optimum-rbln's own, the `.rbln` files
are memory plans in JSON, and `rebel` is a stand-in with the methods of the real compiler's class.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data" / "optimum_rbln_0_12"
STANDIN = DATA / "standin"

QWEN3_CA25, QWEN3_CR13 = "qwen3_8b_ca25x4", "qwen3_8b_cr13"
LLAMA2_FLASH, LLAMA2_EAGER = "llama2_7b_flash_ca22", "llama2_7b_eager_ca22"
FLASH = (QWEN3_CA25, QWEN3_CR13, LLAMA2_FLASH)

# Without the method that resizes, as in compilers that are too old.
OLD_COMPILER = """
import importlib.util
spec = importlib.util.spec_from_file_location("standin_rebel", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
class RBLNCompiledModel(module.RBLNCompiledModel):
    def __getattribute__(self, name):
        if name == "exp_rescale_buffer_size":
            raise AttributeError(name)
        return super().__getattribute__(name)
"""


def copy_artifact(name: str, directory: Path) -> Path:
    """Copy one of the four artifacts to `directory` and return it."""
    return shutil.copytree(DATA / name, directory)


def make_old_compiler(directory: Path) -> Path:
    """Write a compiler that is too old below `directory` and return what to put on the path."""
    package = directory / "rebel"
    package.mkdir(parents=True)
    path = str(STANDIN / "rebel" / "__init__.py")
    (package / "__init__.py").write_text(OLD_COMPILER.format(path=path))
    return directory


def make_vision_language(directory: Path, name: str = QWEN3_CA25) -> Path:
    """Write an artifact of two modules, of which one has the KV cache.

    Its configuration repeats that of the language model, as optimum-rbln writes it for models
    that are made of others.
    """
    language = copy_artifact(name, directory / "language_model")
    config = read_json(language / "rbln_config.json")
    outer = {
        "cls_name": "RBLNLlavaForConditionalGenerationConfig",
        "optimum_rbln_version": "0.12.0",
        "_compile_cfgs": [],
        "batch_size": config["batch_size"],
        "vision_tower": {"cls_name": "RBLNCLIPVisionModelConfig", "image_size": 336},
        "language_model": config,
    }
    (directory / "rbln_config.json").write_text(json.dumps(outer, indent=2))
    vision = directory / "vision_tower"
    vision.mkdir()
    (vision / "rbln_config.json").write_text(json.dumps(outer["vision_tower"], indent=2))
    (vision / "compiled_model.rbln").write_text('{"alloc": {}, "dram": {}}')
    (directory / "config.json").write_text('{"model_type": "llava"}')
    return directory


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def caches(directory: Path, program: str = "prefill") -> dict[str, list[list[int]]]:
    """Return what the caches of a program hold, by node and chiplet."""
    held: dict[str, list[list[int]]] = read_json(directory / f"{program}.rbln")["dram"]
    return held


def add_alloc(directory: Path, term: str, node: int, chiplet: int, num_bytes: int) -> None:
    """Make one chiplet heavier."""
    path = directory / "prefill.rbln"
    plan = read_json(path)
    plan["alloc"][term][node][chiplet] += num_bytes
    path.write_text(json.dumps(plan))


def programs(directory: Path) -> list[str]:
    """Return the names of the programs of an artifact."""
    return sorted(
        name.removesuffix(".rbln") for name in os.listdir(directory) if "rbln" in name[-4:]
    )
