"""What the compiler writes about its work: `rbln_config.json` and each program's graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import torch

from reblock._version import __version__
from reblock.backends.torch.native import interface_digest
from reblock.backends.torch.pieces import PieceShapes, cache_shape
from reblock.backends.torch.structure import Structure, nonlayer_tensors
from reblock.backends.torch.weights import layout_digest
from reblock.config import DTYPE_BYTES
from reblock.json_fields import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import PreTrainedModel

    from reblock.backends.torch.source import ModelSource
    from reblock.info import WeightsFile
    from reblock.options import Dtype, ResolvedOptions, WeightDtype

__all__ = ["cache_bytes", "cache_metas", "config_text", "graph", "piece_shapes", "programs"]


def programs(options: ResolvedOptions) -> dict[str, tuple[int, int]]:
    """Return rows and tokens of every program, by its name."""
    decoders = {f"decoder_batch_{size}": (size, 1) for size in options.decoder_batch_sizes}
    return {"prefill": (1, options.prefill_chunk_size), **decoders}


def piece_shapes(options: ResolvedOptions) -> PieceShapes:
    """Return how large the dimensions of the programs' pieces can get."""
    return PieceShapes(
        max_batch=options.batch_size,
        num_rings=options.batch_size,
        max_tokens=options.prefill_chunk_size,
        block_size=options.kvcache_block_size,
        max_seq_len=options.max_seq_len,
    )


def cache_metas(
    structure: Structure, options: ResolvedOptions, dtype: Dtype
) -> list[dict[str, Any]]:
    """Return the entries of `cache_metas`, keys before values in every layer.

    The first dimension is the most blocks that the programs can use; a window's caches have one
    ring for every sequence that runs.
    """
    shapes = piece_shapes(options)
    metas = []
    for index, shape in enumerate(structure.shapes):
        is_full = shape.window is None
        both = cache_shape(structure, index, shapes, options.bounds.full)
        for offset, dimensions in enumerate(both):
            metas.append(
                {
                    "name": f"past_key_values_{2 * index + offset}",
                    "layer_index": index,
                    "shape": list(dimensions),
                    "layer_type": "full_attention" if is_full else "sliding_attention",
                    "is_auto": is_full,
                    "dtype": dtype,
                }
            )
    return metas


def cache_bytes(metas: list[dict[str, Any]], num_blocks: int) -> dict[str, list[list[int]]]:
    """Return the bytes of every cache at `num_blocks`, as one node of one chiplet."""
    sizes = {}
    for meta in metas:
        first, *rest = meta["shape"]
        num_bytes = (num_blocks if meta["is_auto"] else first) * DTYPE_BYTES[meta["dtype"]]
        for length in rest:
            num_bytes *= length
        sizes[meta["name"]] = [[num_bytes]]
    return sizes


def graph(
    model: nn.Module, structure: Structure, name: str, *, rows: int, tokens: int
) -> dict[str, Any]:
    """Return how the pieces of program `name` are put together, as `LoadedProgram` reads it."""
    embedding: Any = cast("PreTrainedModel", model).get_input_embeddings()
    outside = list(nonlayer_tensors(model, structure.layers_path))
    layers = model.get_submodule(structure.layers_path)
    described = []
    for index, kind in enumerate(structure.kinds):
        module = layers.get_submodule(str(index))
        names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
        described.append(
            {
                "piece": f"layer_{kind}",
                "is_sliding": structure.shapes[index].window is not None,
                "shared": list(structure.shared[index]),
                "caches": [f"past_key_values_{2 * index}", f"past_key_values_{2 * index + 1}"],
                "weights": [f"{structure.layers_path}.{index}.{name}" for name in names],
            }
        )
    if name == "prefill":
        described[-1]["piece"] = f"last_{structure.kinds[-1]}"
    return {
        "batch": rows,
        "tokens": tokens,
        "vocab_size": embedding.num_embeddings,
        "prologue_weights": outside,
        "layers": described,
        "epilogue_weights": outside,
        "operators": interface_digest(),
        "weights_layout": layout_digest(dict([*model.named_parameters(), *model.named_buffers()])),
    }


def config_text(
    source: ModelSource,
    structure: Structure,
    options: ResolvedOptions,
    *,
    architecture: str,
    dtype: Dtype,
    weight_dtype: WeightDtype,
    isa: str,
    num_blocks: int,
    weights: Mapping[str, WeightsFile],
    program_digests: Mapping[str, str],
) -> str:
    """Return the text of `rbln_config.json`, with the keys that optimum-rbln gives it.

    `weights` are the files of weights by name, `program_digests` the digests of the programs by
    name.
    """
    metas = cache_metas(structure, options, dtype)
    sliding = [index for index, shape in enumerate(structure.shapes) if shape.window is not None]
    windows = sorted({shape.window for shape in structure.shapes if shape.window is not None})
    content = {
        "cls_name": f"RBLN{architecture}Config",
        "dtype": dtype,
        "_compile_cfgs": [
            {
                "compiled_model_name": name,
                "input_info": _input_info(rows, tokens, piece_shapes(options).max_width, metas),
                "npu": "cpu",
                "num_devices": 1,
            }
            for name, (rows, tokens) in programs(options).items()
        ],
        "batch_size": options.batch_size,
        "max_seq_len": options.max_seq_len,
        "attn_impl": options.attn_impl,
        "kvcache_partition_len": options.kvcache_partition_len,
        "kvcache_block_size": options.kvcache_block_size,
        "prefill_chunk_size": options.prefill_chunk_size,
        "kvcache_num_blocks": num_blocks,
        "sliding_window": windows[-1] if windows else None,
        "sliding_window_layers": sliding,
        "phases": ["prefill", "decode"],
        "decoder_batch_sizes": list(options.decoder_batch_sizes),
        "cache_metas": metas,
        "reblock": {
            "format_version": FORMAT_VERSION,
            "reblock_version": __version__,
            "backend": "torch",
            "torch_version": torch.__version__,
            "isa": isa,
            "model_type": source.model_type,
            "architecture": architecture,
            # Left out where it says nothing new, so that older versions read the artifact too.
            **({} if weight_dtype == dtype else {"weight_dtype": weight_dtype}),
            "weights": {
                name: {"bytes": file.num_bytes, "sha256": file.sha256}
                for name, file in weights.items()
            },
            "programs": {name: {"sha256": digest} for name, digest in program_digests.items()},
        },
    }
    return json.dumps(content, indent=2) + "\n"


def _input_info(rows: int, tokens: int, width: int, metas: list[dict[str, Any]]) -> list[list[Any]]:
    caches = [
        [m["name"], [1 if m["is_auto"] else m["shape"][0], *m["shape"][1:]], m["dtype"]]
        for m in metas
    ]
    return [
        ["input_ids", [rows, tokens], "int64"],
        ["start", [rows], "int64"],
        ["num_tokens", [rows], "int64"],
        ["num_rows", [1], "int64"],
        ["block_tables", [rows, width], "int64"],
        ["slots", [rows], "int64"],
        *caches,
    ]
