"""What a user may ask of a compilation for the cpu: the keys of `rbln_config`.

`CompileOptions` holds what was asked, and `CompileOptions.resolve` settles what was left open.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, get_args

from reblock.block_count import parse_block_count
from reblock.budget import parse_budget
from reblock.devices import CPU_DEFAULT_PARTITION_LEN, CPU_MIN_PARTITION_LEN
from reblock.errors import BelowMinimum, InvalidOption, UsageError
from reblock.sizing import BlockBounds, block_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.budget import MemoryBudget

__all__ = [
    "AttnImpl",
    "CompileOptions",
    "Dtype",
    "ResolvedOptions",
    "WeightDtype",
    "resolve_weight_dtype",
]

AttnImpl = Literal["eager", "flash_attn"]
Dtype = Literal["float32", "bfloat16"]
WeightDtype = Literal["float32", "bfloat16", "int8"]

_DEFAULT_PREFILL_CHUNK_SIZE = 128
_MAX_INTEGER = 2**31 - 1

_INTEGER_KEYS = (
    "batch_size",
    "max_seq_len",
    "kvcache_partition_len",
    "kvcache_block_size",
    "prefill_chunk_size",
)

_RBLN_ONLY = "it belongs to RBLN devices, and the programs run on the cpu"
_ONE_WAY = "the programs are always compiled in one way here"
_WRITTEN = "the compiler writes it"

# Keys of optimum-rbln that mean nothing here, with the reason; ignoring them would be a lie.
_UNSUPPORTED = {
    "cache_impl": "the model's own configuration says which layers have a sliding window",
    "_compile_cfgs": _WRITTEN,
    "cache_metas": _WRITTEN,
    "cls_name": "the model's own configuration says what it is",
    "create_runtimes": _RBLN_ONLY,
    "device": _RBLN_ONLY,
    "device_map": _RBLN_ONLY,
    "activate_profiler": _RBLN_ONLY,
    "logits_to_keep": "the programs return the logits of the last token",
    "lora_config": "LoRA adapters are not supported; merge the adapter into the model first",
    "num_devices": "the cpu is one device",
    "num_threads": "threads are chosen when the programs run: reblock generate --threads N",
    "optimize_host_memory": _RBLN_ONLY,
    "optimum_rbln_version": _WRITTEN,
    "output_hidden_states": "the programs return logits only",
    "phases": _ONE_WAY,
    "quantization": "choose weight_dtype=int8, which quantizes the weights as they are compiled",
    "sliding_window": "the model's own configuration says how large its window is",
    "sliding_window_layers": "the model's own configuration says which layers have a window",
    "tensor_parallel_size": "the cpu is one device",
    "timeout": _RBLN_ONLY,
    "use_attention_mask": _ONE_WAY,
    "use_inputs_embeds": "the programs take token ids",
    "use_position_ids": _ONE_WAY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The shapes of the programs to compile, with nothing left open.

    `kvcache_num_blocks` is None where the count is to be estimated. `decoder_batch_sizes` falls
    from `batch_size`, and there is one decoder for each.
    """

    batch_size: int
    max_seq_len: int
    attn_impl: AttnImpl
    kvcache_partition_len: int | None
    kvcache_block_size: int
    kvcache_num_blocks: int | None
    prefill_chunk_size: int
    decoder_batch_sizes: tuple[int, ...]

    @property
    def bounds(self) -> BlockBounds:
        """The fewest and the most blocks that the programs can use."""
        return block_bounds(
            attn_impl=self.attn_impl,
            max_seq_len=self.max_seq_len,
            block_size=self.kvcache_block_size,
            batch_size=self.batch_size,
        )

    def without_blocks(self) -> ResolvedOptions:
        """Return the shapes for a model whose layers all have a window: one ring a sequence."""
        return replace(
            self,
            attn_impl="eager",
            kvcache_partition_len=None,
            kvcache_block_size=self.max_seq_len,
            kvcache_num_blocks=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What was asked of a compilation; None is not given.

    Raises:
        InvalidOption: A value on its own is not accepted.
        UsageError: Two options exclude each other.
    """

    batch_size: int = 1
    max_seq_len: int | None = None
    dtype: Dtype | None = None
    weight_dtype: WeightDtype | None = None
    attn_impl: AttnImpl | None = None
    kvcache_partition_len: int | None = None
    kvcache_block_size: int | None = None
    kvcache_num_blocks: int | None = None
    prefill_chunk_size: int | None = None
    decoder_batch_sizes: tuple[int, ...] | None = None
    memory_budget: MemoryBudget | None = None
    npu: str = "cpu"

    def __post_init__(self) -> None:
        for key in _INTEGER_KEYS:
            value = getattr(self, key)
            if value is not None:
                _check_integer(key, value)
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("weight_dtype", self.weight_dtype, get_args(WeightDtype))
        if self.dtype is not None:
            resolve_weight_dtype(self.weight_dtype, self.dtype)
        _check_choice("attn_impl", self.attn_impl, get_args(AttnImpl))
        if self.kvcache_num_blocks is not None:
            parse_block_count(self.kvcache_num_blocks)
        if self.decoder_batch_sizes is not None:
            _check_decoders(self.decoder_batch_sizes, self.batch_size)
        if self.npu != "cpu":
            raise InvalidOption(
                f"npu={self.npu!r} is not supported: programs are compiled for 'cpu', and RBLN "
                "devices need optimum-rbln and its compiler",
                option="npu",
            )
        if self.memory_budget is not None and self.kvcache_num_blocks is not None:
            raise UsageError(
                f"memory_budget={self.memory_budget.text!r} and "
                f"kvcache_num_blocks={self.kvcache_num_blocks} exclude each other: one asks for as "
                "many blocks as fit, the other says how many; leave one of them out"
            )

    @classmethod
    def from_keys(cls, keys: Mapping[str, object]) -> CompileOptions:
        """Return the options given under the keys of `rbln_config`, with dashes or underscores.

        A text is read as a command line gives it; other values are taken as they are.

        Raises:
            InvalidOption: A key is unknown or not supported, is given twice, or its value is not
                accepted.
            InvalidBudget: `memory_budget` cannot be read.
            InvalidBlockCount: `kvcache_num_blocks` is no whole number in range.
            UsageError: Two options exclude each other.
        """
        known = tuple(field.name for field in fields(cls))
        values: dict[str, object] = {}
        for written, value in keys.items():
            key = written.replace("-", "_")
            _check_key(written, key, known)
            if key in values:
                raise InvalidOption(f"{key} is given twice", option=key)
            values[key] = (
                _parse_value(key, value) if isinstance(value, str) else _read_value(key, value)
            )
        return cls(**values)  # type: ignore[arg-type]  # checked when it is made

    def resolve(self, *, max_position_embeddings: int | None) -> ResolvedOptions:
        """Return concrete values for everything that was left open.

        Args:
            max_position_embeddings: The longest sequence the model was made for; None where its
                configuration does not say.

        Raises:
            InvalidOption: The values do not go together or with the model.
            BelowMinimum: `kvcache_num_blocks` is less than the programs need.
        """
        max_seq_len = self.resolve_max_seq_len(max_position_embeddings)
        attn_impl, block_size = self._resolve_attention(max_seq_len)
        if self.prefill_chunk_size is not None and self.prefill_chunk_size > max_seq_len:
            raise InvalidOption(
                f"prefill_chunk_size={self.prefill_chunk_size} is more than "
                f"max_seq_len={max_seq_len}; lower it to that or less",
                option="prefill_chunk_size",
            )
        resolved = ResolvedOptions(
            batch_size=self.batch_size,
            max_seq_len=max_seq_len,
            attn_impl=attn_impl,
            kvcache_partition_len=block_size if attn_impl == "flash_attn" else None,
            kvcache_block_size=block_size,
            kvcache_num_blocks=self.kvcache_num_blocks,
            prefill_chunk_size=(
                self.prefill_chunk_size or min(_DEFAULT_PREFILL_CHUNK_SIZE, max_seq_len)
            ),
            decoder_batch_sizes=tuple(
                sorted(self.decoder_batch_sizes or (self.batch_size,), reverse=True)
            ),
        )
        minimum = resolved.bounds.minimum
        if self.kvcache_num_blocks is not None and self.kvcache_num_blocks < minimum:
            raise BelowMinimum(
                f"kvcache_num_blocks={self.kvcache_num_blocks} is below {minimum}, the fewest for "
                f"max_seq_len={max_seq_len}, kvcache_block_size={block_size} and "
                f"batch_size={self.batch_size}; raise it to {minimum}, or lower max_seq_len or "
                "batch_size",
                num_blocks=self.kvcache_num_blocks,
                num_min_blocks=minimum,
            )
        return resolved

    def resolve_max_seq_len(self, max_position_embeddings: int | None) -> int:
        """Return the longest sequence: what was asked for, else what the model was made for.

        Raises:
            InvalidOption: It is not said, or more than the model was made for.
        """
        max_seq_len = self.max_seq_len or max_position_embeddings
        if max_seq_len is None:
            raise InvalidOption(
                "max_seq_len is not given, and the model does not say how long its sequences may "
                "be; give max_seq_len",
                option="max_seq_len",
            )
        if max_position_embeddings is not None and max_seq_len > max_position_embeddings:
            raise InvalidOption(
                f"max_seq_len={max_seq_len} is more than the {max_position_embeddings} positions "
                "the model was made for; lower it to that or less",
                option="max_seq_len",
            )
        return max_seq_len

    def _resolve_attention(self, max_seq_len: int) -> tuple[AttnImpl, int]:
        """Return the kind of attention and the block size."""
        attn_impl, block_size = self.attn_impl, self.kvcache_block_size
        given = {
            key: value
            for key, value in (
                ("kvcache_partition_len", self.kvcache_partition_len),
                ("kvcache_block_size", block_size),
            )
            if value is not None
        }
        default = _default_partition_len(max_seq_len)
        if attn_impl is None:
            # One block for a whole sequence is what eager attention means.
            is_eager = given == {"kvcache_block_size": max_seq_len} or not (given or default)
            attn_impl = "eager" if is_eager else "flash_attn"
        if attn_impl == "eager":
            _check_eager(given, max_seq_len)
            return attn_impl, max_seq_len
        if given:
            return attn_impl, _check_partition(given, max_seq_len)
        if default is None:
            raise InvalidOption(
                f"attn_impl='flash_attn' needs partitions of {CPU_MIN_PARTITION_LEN} tokens or "
                f"more, two at least, that divide max_seq_len={max_seq_len}; choose a max_seq_len "
                f"that is a multiple of {CPU_MIN_PARTITION_LEN}, or attn_impl='eager'",
                option="max_seq_len",
            )
        return attn_impl, default


def resolve_weight_dtype(weight_dtype: WeightDtype | None, dtype: Dtype) -> WeightDtype:
    """Return the type of the weights of linear layers: what was asked for, else `dtype`.

    Raises:
        InvalidOption: It is wider than the type that the programs compute in.
    """
    if weight_dtype == "float32" and dtype == "bfloat16":
        raise InvalidOption(
            "weight_dtype='float32' is wider than dtype='bfloat16', which the programs would "
            "compute in: the weights would take twice the memory and answer no better; leave "
            "weight_dtype out, or choose dtype=float32",
            option="weight_dtype",
        )
    return weight_dtype or dtype


def _default_partition_len(max_seq_len: int) -> int | None:
    length = CPU_DEFAULT_PARTITION_LEN
    while length >= CPU_MIN_PARTITION_LEN:
        if max_seq_len % length == 0 and max_seq_len >= 2 * length:
            return length
        length //= 2
    return None


def _check_eager(given: Mapping[str, int], max_seq_len: int) -> None:
    if "kvcache_partition_len" in given:
        raise InvalidOption(
            f"kvcache_partition_len={given['kvcache_partition_len']} is for "
            "attn_impl='flash_attn'; eager attention has no partitions, leave it out",
            option="kvcache_partition_len",
        )
    if given.get("kvcache_block_size", max_seq_len) != max_seq_len:
        raise InvalidOption(
            f"kvcache_block_size={given['kvcache_block_size']} must be max_seq_len={max_seq_len} "
            "with attn_impl='eager'; leave it out, or choose attn_impl='flash_attn'",
            option="kvcache_block_size",
        )


def _check_partition(given: Mapping[str, int], max_seq_len: int) -> int:
    """Return the one length in `given`, the partition length or the block size or both."""
    if len(set(given.values())) > 1:
        raise InvalidOption(
            f"kvcache_block_size={given['kvcache_block_size']} must equal "
            f"kvcache_partition_len={given['kvcache_partition_len']} with attn_impl='flash_attn'; "
            "leave one of them out",
            option="kvcache_block_size",
        )
    option, length = next(iter(given.items()))
    if length < CPU_MIN_PARTITION_LEN:
        raise InvalidOption(
            f"{option}={length} is below {CPU_MIN_PARTITION_LEN}, the least; raise it to that",
            option=option,
        )
    if max_seq_len % length or max_seq_len < 2 * length:
        raise InvalidOption(
            f"max_seq_len={max_seq_len} must be a multiple of {option}={length}, twice it at "
            f"least; choose a {option} that divides max_seq_len, or attn_impl='eager'",
            option=option,
        )
    return length


def _check_integer(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        # Printing endless digits is slow, and refused at last.
        is_endless = isinstance(value, int) and abs(value) > _MAX_INTEGER**2
        shown = "a number of many digits" if is_endless else repr(value)
        raise InvalidOption(
            f"{key}={shown} must be a whole number from 1 to {_MAX_INTEGER:,}", option=key
        )


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidOption(
            f"{key}={value!r} is not supported; choose {' or '.join(choices)}", option=key
        )


def _check_decoders(sizes: tuple[int, ...], batch_size: int) -> None:
    key = "decoder_batch_sizes"
    for size in sizes:
        _check_integer(key, size)
    if len(set(sizes)) != len(sizes):
        raise InvalidOption(f"{key}={list(sizes)} has a size twice", option=key)
    # A larger decoder would never be full, and without one of batch_size none would take a full
    # batch.
    if max(sizes, default=0) != batch_size:
        raise InvalidOption(
            f"{key}={list(sizes)} must have batch_size={batch_size} as its largest; add it, or "
            "change batch_size to match",
            option=key,
        )


def _parse_integer(key: str, text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_INTEGER)):
        return int(text)
    raise InvalidOption(
        f"{key}={text!r} must be a whole number from 1 to {_MAX_INTEGER:,}", option=key
    )


def _parse_integers(key: str, text: str) -> tuple[int, ...]:
    # Both 8,4,1 and the [8, 4, 1] of JSON are natural to write.
    inner = text.strip().removeprefix("[").removesuffix("]")
    return tuple(_parse_integer(key, part.strip()) for part in inner.split(","))


def _parse_value(key: str, text: str) -> object:
    if key in _INTEGER_KEYS:
        return _parse_integer(key, text)
    match key:
        case "kvcache_num_blocks":
            return parse_block_count(text)
        case "decoder_batch_sizes":
            return _parse_integers(key, text)
        case "memory_budget":
            return parse_budget(text)
    return text


def _read_value(key: str, value: object) -> object:
    """Return a value that is no text as its field has it; most are checked there."""
    if key == "memory_budget":
        return parse_budget(value)
    if key == "decoder_batch_sizes":
        if not isinstance(value, list | tuple):
            raise InvalidOption(f"{key}={value!r} must be a list of whole numbers", option=key)
        return tuple(value)
    return value


def _check_key(written: str, key: str, known: tuple[str, ...]) -> None:
    if key in known:
        return
    if key in _UNSUPPORTED:
        raise InvalidOption(
            f"option {written!r} is not supported here: {_UNSUPPORTED[key]}", option=key
        )
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    raise InvalidOption(
        f"option {written!r} is unknown; the nearest known one is {close[0]!r}, and all are "
        f"{', '.join(known)}",
        option=key,
        nearest=close[0],
    )
