"""Builds artifacts of the torch backend by hand, so that most tests need neither torch nor models.

The artifacts are whole in all that reblock reads: `rbln_config.json`, `.rbln` archives with their
memory plan, and other files in all the shapes that artifacts in the wild have them.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from typing import TYPE_CHECKING, Any

from reblock.artifact.checksum import program_digest

if TYPE_CHECKING:
    from pathlib import Path

NUM_LAYERS = 2
KV_HEADS = 8
HEAD_DIM = 128
BLOCK_SIZE = 256
MAX_SEQ_LEN = 2048
BATCH_SIZE = 4
WINDOW = 512
# One tensor of one layer: 1 MiB, half of what tensors are aligned to.
BYTES_PER_BLOCK = KV_HEADS * BLOCK_SIZE * HEAD_DIM * 4
NUM_MIN_BLOCKS = 9
NUM_FULL_BLOCKS = 32
PROGRAMS = ("prefill", "decoder_batch_4", "decoder_batch_1")


def make_artifact(
    directory: Path,
    *,
    num_blocks: int = 16,
    attn_impl: str = "flash_attn",
    sliding_layers: tuple[int, ...] = (),
    npu: str = "cpu",
    weight_bytes: int = 1_000_000,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write a whole artifact at `directory`, which must not exist, and return the directory."""
    is_flash = attn_impl == "flash_attn"
    metas = cache_metas(num_blocks, is_flash=is_flash, sliding_layers=sliding_layers)
    block_size = BLOCK_SIZE if is_flash else MAX_SEQ_LEN
    config: dict[str, Any] = {
        "cls_name": "RBLNLlamaForCausalLMConfig",
        "dtype": "float32",
        "_compile_cfgs": [
            {"compiled_model_name": name, "input_info": [], "npu": npu, "num_devices": None}
            for name in PROGRAMS
        ],
        "batch_size": BATCH_SIZE,
        "max_seq_len": MAX_SEQ_LEN,
        "attn_impl": attn_impl,
        "kvcache_partition_len": BLOCK_SIZE if is_flash else None,
        "kvcache_block_size": block_size,
        "prefill_chunk_size": 128,
        "kvcache_num_blocks": num_blocks,
        "sliding_window": WINDOW if sliding_layers else None,
        "sliding_window_layers": list(sliding_layers),
        "phases": ["prefill", "decode"],
        "decoder_batch_sizes": [4, 1],
        "cache_metas": metas,
        "reblock": {
            "format_version": 1,
            "reblock_version": "0.1.0",
            "backend": "torch",
            "torch_version": "2.13.0+cpu",
            "isa": "x86_64-avx2",
            "model_type": "llama",
            "architecture": "LlamaForCausalLM",
            "weights": {},
            "programs": {},
        },
    }
    config |= extra_config or {}
    directory.mkdir(parents=True)
    for name in PROGRAMS:
        # Weights are shared, and one program reports them.
        weight = weight_bytes if name == "prefill" else 0
        write_program(directory, name, num_blocks, dram_of(metas, num_blocks), weight=weight)
    (directory / "config.json").write_text('{"model_type": "llama"}\n')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (directory / "weights.safetensors").write_bytes(bytes(range(256)) * 64)
    write_config(directory, config)
    record_checksums(directory)
    return directory


def record_checksums(directory: Path) -> None:
    """Let `rbln_config.json` say of the programs and the weights that they are right."""
    config = read_config(directory)
    weights = directory / "weights.safetensors"
    config["reblock"]["weights"] = {
        weights.name: {
            "bytes": weights.stat().st_size,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
    }
    config["reblock"]["programs"] = {
        name: {"sha256": program_digest(str(directory / f"{name}.rbln"))} for name in PROGRAMS
    }
    write_config(directory, config)


def cache_metas(
    num_blocks: int, *, is_flash: bool, sliding_layers: tuple[int, ...]
) -> list[dict[str, Any]]:
    metas = []
    for index in range(2 * NUM_LAYERS):
        is_sliding = index // 2 in sliding_layers
        if is_sliding:
            shape = [BATCH_SIZE, KV_HEADS, WINDOW, HEAD_DIM]
        elif is_flash:
            shape = [NUM_FULL_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
        else:
            shape = [num_blocks, KV_HEADS, MAX_SEQ_LEN, HEAD_DIM]
        metas.append(
            {
                "name": f"past_key_values_{index}",
                "layer_index": index // 2,
                "shape": shape,
                "layer_type": "sliding_attention" if is_sliding else "full_attention",
                "is_auto": is_flash and not is_sliding,
                "dtype": "float32",
            }
        )
    return metas


def dram_of(metas: list[dict[str, Any]], num_blocks: int) -> dict[str, list[list[int]]]:
    """Return the bytes of every cache as a program holds them at `num_blocks`."""
    dram = {}
    for meta in metas:
        blocks, heads, tokens, width = meta["shape"]
        held = num_blocks if meta["is_auto"] else blocks
        dram[meta["name"]] = [[held * heads * tokens * width * 4]]
    return dram


def write_program(
    directory: Path,
    name: str,
    num_blocks: int,
    dram: dict[str, list[list[int]]],
    *,
    weight: int = 0,
    changes: dict[str, Any] | None = None,
) -> Path:
    description: dict[str, Any] = {
        "format_version": 1,
        "name": name,
        "kvcache_num_blocks": num_blocks,
        "alloc": {"Weight": [[weight]], "Workspace": [[50_000]]},
        "dram": dram,
        "graph": {"inputs": ["input_ids", {"shape": [1, 128]}]},
    }
    description |= changes or {}
    path = directory / f"{name}.rbln"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/archive_format", "pt2")
        archive.writestr(f"{name}/extra/reblock.json", json.dumps(description))
        archive.writestr(f"{name}/data/aotinductor/model/code.so", os.urandom(2_000))
    return path


def read_description(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("extra/reblock.json")]
        description: dict[str, Any] = json.loads(archive.read(name))
    return description


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "rbln_config.json").read_text())
    return config


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "rbln_config.json").write_text(json.dumps(config, indent=2) + "\n")


def fingerprint(directory: Path) -> dict[str, tuple[str, int, str]]:
    """Return the kind, mode and content of everything below `directory`."""
    found: dict[str, tuple[str, int, str]] = {}
    for root, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = os.path.join(root, name)
            relative = os.path.relpath(path, directory)
            mode = os.lstat(path).st_mode & 0o7777
            if os.path.islink(path):
                found[relative] = ("link", 0, os.readlink(path))
            elif os.path.isdir(path):
                found[relative] = ("directory", mode, "")
            else:
                with open(path, "rb") as file:
                    found[relative] = ("file", mode, hashlib.sha256(file.read()).hexdigest())
    return found
