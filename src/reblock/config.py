"""`rbln_config.json`: what an artifact says about itself.

Two tools write the file. Ours has an object under the key "reblock" and nothing in it that this
version does not know; anything else is read as optimum-rbln's, whose further keys are kept.

`kvcache_num_blocks` alone says how many blocks an artifact holds. The first dimension of a
resizable cache's shape is the most it can ever use, and stays as it is when the cache is resized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reblock.block_count import parse_block_count
from reblock.errors import ArtifactMismatch
from reblock.info import check_file_name, parse_info
from reblock.json_edit import replace_integer
from reblock.json_fields import JsonFields, parse_json_object
from reblock.sizing import BlockBounds, block_bounds

if TYPE_CHECKING:
    from collections.abc import Collection

    from reblock.info import ReblockInfo

__all__ = [
    "DTYPE_BYTES",
    "CacheMeta",
    "CompiledProgram",
    "RBLNConfig",
    "parse_config",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}

_MAX_DIMENSIONS = 8

# What our own programs compute in, and how their layers may attend.
_OUR_DTYPES = ("float32", "bfloat16")
_OUR_LAYER_TYPES = ("full_attention", "sliding_attention")

_PROGRAM_KEYS = ("compiled_model_name", "input_info", "npu", "num_devices")
_CACHE_KEYS = ("name", "layer_index", "shape", "layer_type", "is_auto", "dtype")
_KEYS = (
    "cls_name",
    "dtype",
    "_compile_cfgs",
    "batch_size",
    "max_seq_len",
    "attn_impl",
    "kvcache_partition_len",
    "kvcache_block_size",
    "prefill_chunk_size",
    "kvcache_num_blocks",
    "sliding_window",
    "sliding_window_layers",
    "phases",
    "decoder_batch_sizes",
    "cache_metas",
    "reblock",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMeta:
    """One cache tensor as it was compiled; `shape[0]` counts blocks."""

    name: str
    layer_index: int
    shape: tuple[int, ...]
    layer_type: str
    is_auto: bool
    dtype: str

    @property
    def is_resizable(self) -> bool:
        """Whether the cache may change its block count after compilation."""
        return self.is_auto and self.layer_type == "full_attention"

    def bytes_at(self, num_blocks: int) -> int:
        """Return the bytes on all devices together, at `num_blocks` where it is resizable."""
        first = num_blocks if self.is_resizable else self.shape[0]
        return first * math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One compiled program, which lies in `<name>.rbln`, and the devices it was compiled for.

    `npu` is None where it is not noted.
    """

    name: str
    npu: str | None
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RBLNConfig:
    """The part of `rbln_config.json` that reblock uses, checked; `text` is the whole file.

    `reblock` is None where another tool wrote the file.
    """

    cls_name: str
    dtype: str
    batch_size: int
    max_seq_len: int
    attn_impl: Literal["eager", "flash_attn"]
    kvcache_partition_len: int | None
    kvcache_block_size: int
    kvcache_num_blocks: int
    prefill_chunk_size: int
    sliding_window: int | None
    sliding_window_layers: tuple[int, ...]
    phases: tuple[str, ...]
    decoder_batch_sizes: tuple[int, ...]
    cache_metas: tuple[CacheMeta, ...]
    programs: tuple[CompiledProgram, ...]
    reblock: ReblockInfo | None
    text: str

    @property
    def backend(self) -> str:
        """The backend that can run the programs: "torch" or "rbln"."""
        return "rbln" if self.reblock is None else self.reblock.backend

    @property
    def weight_dtype(self) -> str:
        """The type of the weights of linear layers; what stands beside them is of `dtype`."""
        own = None if self.reblock is None else self.reblock.weight_dtype
        return own or self.dtype

    @property
    def npu(self) -> str | None:
        """The device that all programs were compiled for, None where it is not noted."""
        return self.programs[0].npu

    @property
    def num_devices(self) -> int:
        """How many such devices they span."""
        return self.programs[0].num_devices

    @property
    def bounds(self) -> BlockBounds:
        """The fewest and the most blocks that the programs can use."""
        return block_bounds(
            attn_impl=self.attn_impl,
            max_seq_len=self.max_seq_len,
            block_size=self.kvcache_block_size,
            batch_size=self.batch_size,
        )

    @property
    def resizable(self) -> dict[str, bool]:
        """For the name of every cache, whether it can be resized."""
        return {meta.name: meta.is_resizable for meta in self.cache_metas}

    def with_num_blocks(self, num_blocks: int) -> RBLNConfig:
        """Return the same configuration with another block count; nothing else in it changes."""
        num_blocks = parse_block_count(num_blocks)
        text = replace_integer(self.text, ["kvcache_num_blocks"], num_blocks)
        return replace(self, kvcache_num_blocks=num_blocks, text=text)


def parse_config(text: str | bytes, *, path: str) -> RBLNConfig:
    """Return the configuration that `text` holds; `path` is named in errors.

    Raises:
        CorruptArtifact: It is no valid JSON object, a key is missing or of the wrong type, or
            two keys contradict each other.
        UnknownFormat: A newer reblock wrote it, or it has keys of ours that are not known.
        ArtifactMismatch: Its programs are compiled for different devices.
    """
    raw = parse_json_object(text, path=path)
    fields = JsonFields(raw, path=path)
    reblock = None
    if "reblock" in fields.values:
        reblock = parse_info(fields.nested("reblock"))
        fields.refuse_unknown(_KEYS)
    programs = _parse_programs(fields, is_ours=reblock is not None)
    if reblock is None and any(program.npu == "cpu" for program in programs):
        raise fields.corrupt("reblock", "is missing, though the programs are for the cpu")
    caches = _parse_caches(fields, is_ours=reblock is not None)
    config = RBLNConfig(
        cls_name=fields.text("cls_name"),
        dtype=fields.text("dtype"),
        batch_size=fields.integer("batch_size"),
        max_seq_len=fields.integer("max_seq_len"),
        attn_impl=_parse_attn_impl(fields),
        kvcache_partition_len=fields.optional_integer("kvcache_partition_len"),
        kvcache_block_size=fields.integer("kvcache_block_size"),
        kvcache_num_blocks=fields.integer("kvcache_num_blocks"),
        prefill_chunk_size=fields.integer("prefill_chunk_size"),
        sliding_window=fields.optional_integer("sliding_window"),
        sliding_window_layers=fields.integers("sliding_window_layers", minimum=0),
        phases=fields.texts("phases"),
        decoder_batch_sizes=fields.integers("decoder_batch_sizes"),
        cache_metas=caches,
        programs=programs,
        reblock=reblock,
        text=text if isinstance(text, str) else text.decode(),
    )
    if config.kvcache_block_size > config.max_seq_len:
        raise fields.corrupt("kvcache_block_size", f"is above max_seq_len, {config.max_seq_len}")
    if max(config.decoder_batch_sizes, default=0) > config.batch_size:
        raise fields.corrupt("decoder_batch_sizes", f"goes above batch_size, {config.batch_size}")
    if reblock is not None:
        _check_shapes(config, fields)
        _check_caches(config, fields)
        _check_digests(reblock, programs, fields)
    return config


def _check_shapes(config: RBLNConfig, fields: JsonFields) -> None:
    """Refuse what our own compiler never writes, before a program runs on it."""
    batch_size, max_seq_len = config.batch_size, config.max_seq_len
    block_size = config.kvcache_block_size
    is_flash = config.attn_impl == "flash_attn"
    _check_known(fields, "dtype", config.dtype, _OUR_DTYPES)
    if config.npu == "cpu" and config.num_devices != 1:
        raise fields.corrupt("_compile_cfgs", f"has num_devices {config.num_devices} for one cpu")
    if max(config.decoder_batch_sizes, default=0) != batch_size:
        raise fields.corrupt("decoder_batch_sizes", f"does not reach batch_size, {batch_size}")
    if config.prefill_chunk_size > max_seq_len:
        raise fields.corrupt("prefill_chunk_size", f"is above max_seq_len, {max_seq_len}")
    if max_seq_len % block_size or not (is_flash or block_size == max_seq_len):
        fault = "does not divide" if is_flash else "must with eager attention be"
        raise fields.corrupt("kvcache_block_size", f"{fault} max_seq_len, {max_seq_len}")
    if config.kvcache_partition_len != (block_size if is_flash else None):
        raise fields.corrupt(
            "kvcache_partition_len",
            f"is {config.kvcache_partition_len}, but must be "
            + (f"kvcache_block_size, {block_size}" if is_flash else "null with eager attention"),
        )


def _check_caches(config: RBLNConfig, fields: JsonFields) -> None:
    block_size = config.kvcache_block_size
    for index, cache in enumerate(config.cache_metas):
        key = f"cache_metas[{index}]"
        _check_known(fields, f"{key}.dtype", cache.dtype, _OUR_DTYPES)
        _check_known(fields, f"{key}.layer_type", cache.layer_type, _OUR_LAYER_TYPES)
        if len(cache.shape) != 4:
            raise fields.corrupt(f"{key}.shape", f"has {len(cache.shape)} dimensions, not 4")
        if cache.layer_type == "full_attention" and cache.shape[2] != block_size:
            raise fields.corrupt(
                f"{key}.shape",
                f"has blocks of {cache.shape[2]} tokens, but kvcache_block_size is {block_size}",
            )


def _check_digests(
    info: ReblockInfo, programs: tuple[CompiledProgram, ...], fields: JsonFields
) -> None:
    names = {program.name for program in programs}
    if absent := names - info.programs.keys():
        raise fields.corrupt("reblock.programs", f"lacks {min(absent)!r}")
    if unknown := info.programs.keys() - names:
        fault = f"has {min(unknown)!r}, which _compile_cfgs does not name"
        raise fields.corrupt("reblock.programs", fault)


def _check_known(fields: JsonFields, key: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise fields.corrupt(key, f"is {value!r}; known are {', '.join(known)}")


def _parse_programs(fields: JsonFields, *, is_ours: bool) -> tuple[CompiledProgram, ...]:
    programs = []
    for item in fields.nested_list("_compile_cfgs"):
        if is_ours:
            item.refuse_unknown(_PROGRAM_KEYS)
        key = "compiled_model_name"
        programs.append(
            CompiledProgram(
                name=check_file_name(item, key, item.text(key)),
                npu=item.text("npu") if is_ours or item.values.get("npu") is not None else None,
                # None is how optimum-rbln writes one device that it was not told about.
                num_devices=item.optional_integer("num_devices") or 1,
            )
        )
    if not programs:
        raise fields.corrupt("_compile_cfgs", "names no compiled program")
    fields.refuse_duplicates("_compile_cfgs", (program.name for program in programs))
    devices = {(program.npu, program.num_devices) for program in programs}
    if len(devices) > 1:
        raise ArtifactMismatch(
            f"_compile_cfgs names programs for different devices: {sorted(map(str, devices))}",
            path=fields.path,
        )
    return tuple(programs)


def _parse_caches(fields: JsonFields, *, is_ours: bool) -> tuple[CacheMeta, ...]:
    caches = []
    for item in fields.nested_list("cache_metas"):
        if is_ours:
            item.refuse_unknown(_CACHE_KEYS)
        shape = item.integers("shape")
        if not 1 <= len(shape) <= _MAX_DIMENSIONS:
            raise item.corrupt("shape", f"has {len(shape)} dimensions, not 1 to {_MAX_DIMENSIONS}")
        dtype = item.text("dtype")
        _check_known(item, "dtype", dtype, DTYPE_BYTES)
        caches.append(
            CacheMeta(
                name=item.text("name"),
                layer_index=item.integer("layer_index", minimum=0),
                shape=shape,
                layer_type=item.text("layer_type"),
                is_auto=item.boolean("is_auto"),
                dtype=dtype,
            )
        )
    fields.refuse_duplicates("cache_metas", (cache.name for cache in caches))
    return tuple(caches)


def _parse_attn_impl(fields: JsonFields) -> Literal["eager", "flash_attn"]:
    match fields.text("attn_impl"):
        case "eager":
            return "eager"
        case "flash_attn":
            return "flash_attn"
        case other:
            raise fields.corrupt("attn_impl", f"is {other!r}; known are 'eager' and 'flash_attn'")
