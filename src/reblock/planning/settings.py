"""What a user may say of a compilation that is being planned, and what the rest becomes.

For the cpu, what is left open becomes what `reblock compile` makes of it, and for RBLN devices what
optimum-rbln does. One thing is different: attention that the device has no kernel for is replaced
by the other kind, where the compiler would only say so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, get_args

from reblock.block_count import parse_block_count
from reblock.config import DTYPE_BYTES
from reblock.errors import InvalidOption
from reblock.options import CompileOptions, ResolvedOptions, WeightDtype

if TYPE_CHECKING:
    from reblock.options import AttnImpl
    from reblock.planning.target import Target

__all__ = ["PlanSettings", "resolve_shapes"]

# optimum-rbln's: CR devices read longer pieces of a prompt at a time.
_REBEL_CHUNK_SIZE, _ATOM_CHUNK_SIZE = 512, 128
_CHUNK_STEP = 64
_MAX_BYTES = 2**63 - 1
_DTYPE_NAMES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "half": "float16",
    "float": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What was asked of a plan; None is not given.

    `dtype` is that of the weights, `weight_dtype` that of the weights of linear layers alone, and
    `kv_dtype` that of keys and values. `weight_bytes` is what the
    weights take, of all devices together, where it is known better than from the model's files.
    `batch_size` None means: as many requests of `max_seq_len` as fit side by side.

    Raises:
        InvalidOption: A value on its own is not accepted.
        InvalidBlockCount: `num_blocks` is no whole number in range.
    """

    batch_size: int | None = None
    max_seq_len: int | None = None
    attn_impl: AttnImpl | None = None
    kvcache_partition_len: int | None = None
    kvcache_block_size: int | None = None
    prefill_chunk_size: int | None = None
    dtype: str | None = None
    weight_dtype: WeightDtype | None = None
    kv_dtype: str | None = None
    weight_bytes: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        for option in ("dtype", "weight_dtype", "kv_dtype"):
            name = getattr(self, option)
            if name is not None:
                # The short names of other tools are read as well.
                object.__setattr__(self, option, _dtype(option, name))
        # The compiler's own check of the keys that both have.
        CompileOptions(
            batch_size=1 if self.batch_size is None else self.batch_size,
            max_seq_len=self.max_seq_len,
            attn_impl=self.attn_impl,
            kvcache_partition_len=self.kvcache_partition_len,
            kvcache_block_size=self.kvcache_block_size,
            prefill_chunk_size=self.prefill_chunk_size,
            weight_dtype=self.weight_dtype,
        )
        if self.weight_bytes is not None:
            _check_bytes(self.weight_bytes)
        if self.num_blocks is not None:
            object.__setattr__(self, "num_blocks", parse_block_count(self.num_blocks))

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the settings that were given."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


def resolve_shapes(
    settings: PlanSettings,
    target: Target,
    *,
    batch_size: int,
    max_position_embeddings: int | None,
) -> ResolvedOptions:
    """Return the shapes of the programs for `batch_size` requests, with nothing left open.

    Raises:
        InvalidOption: The settings do not go together, or with the model or the device.
    """
    options = CompileOptions(
        batch_size=batch_size,
        max_seq_len=settings.max_seq_len,
        attn_impl=settings.attn_impl,
        kvcache_partition_len=settings.kvcache_partition_len,
        kvcache_block_size=settings.kvcache_block_size,
        prefill_chunk_size=settings.prefill_chunk_size,
    )
    if not target.is_cpu:
        options = _for_rbln(options, target, max_position_embeddings)
    return options.resolve(max_position_embeddings=max_position_embeddings)


def _for_rbln(
    options: CompileOptions, target: Target, max_position_embeddings: int | None
) -> CompileOptions:
    max_seq_len = options.resolve_max_seq_len(max_position_embeddings)
    chunk = options.prefill_chunk_size or (
        _REBEL_CHUNK_SIZE if target.device.num_chiplets > 1 else _ATOM_CHUNK_SIZE
    )
    if chunk % _CHUNK_STEP:
        raise InvalidOption(
            f"prefill_chunk_size={chunk} must be a multiple of {_CHUNK_STEP} on "
            f"{target.device.name}",
            option="prefill_chunk_size",
        )
    options = replace(options, prefill_chunk_size=min(chunk, max_seq_len))
    if _is_eager(options, target, max_seq_len):
        limit = target.device.max_eager_seq_len
        if limit is not None and max_seq_len > limit:
            raise InvalidOption(
                f"max_seq_len={max_seq_len} is more than the {limit} tokens of eager attention on "
                f"{target.device.name}; lower it, or choose attn_impl='flash_attn'",
                option="max_seq_len",
            )
        return replace(options, attn_impl="eager")
    length = (
        options.kvcache_partition_len
        or options.kvcache_block_size
        or _partition_len(target, max_seq_len)
    )
    _check_partition(options, target, length)
    return replace(options, attn_impl="flash_attn", kvcache_partition_len=length)


def _is_eager(options: CompileOptions, target: Target, max_seq_len: int) -> bool:
    if options.attn_impl is not None:
        return options.attn_impl == "eager"
    if options.kvcache_partition_len is not None:
        return False
    if options.kvcache_block_size is not None:
        return options.kvcache_block_size == max_seq_len
    limit = target.device.max_eager_seq_len
    return limit is None or max_seq_len <= limit


def _partition_len(target: Target, max_seq_len: int) -> int:
    """Return the default length, halved until it divides `max_seq_len` twice or more."""
    device = target.device
    length = device.default_partition_len
    while length >= device.min_partition_len:
        if max_seq_len % length == 0 and max_seq_len >= 2 * length:
            return length
        length //= 2
    raise InvalidOption(
        f"max_seq_len={max_seq_len} does not divide into partitions of "
        f"{device.min_partition_len} tokens or more, which flash attention on {device.name} needs; "
        f"choose a multiple of {device.min_partition_len}",
        option="max_seq_len",
    )


def _check_partition(options: CompileOptions, target: Target, length: int) -> None:
    device = target.device
    longest = device.max_partition_len
    if length < device.min_partition_len or (longest is not None and length > longest):
        option = "kvcache_partition_len" if options.kvcache_partition_len else "kvcache_block_size"
        raise InvalidOption(
            f"{option}={length} must be from {device.min_partition_len} to {longest} on "
            f"{device.name}",
            option=option,
        )


def _check_bytes(value: object) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= _MAX_BYTES:  # type: ignore[operator]
        shown = repr(value) if not isinstance(value, int) or abs(value) < _MAX_BYTES else "it"
        raise InvalidOption(
            f"weight_bytes={shown} must be a whole number of bytes, one at least",
            option="weight_bytes",
        )


def _dtype(option: str, name: object) -> str:
    known = _DTYPE_NAMES.get(name, name) if isinstance(name, str) else repr(name)
    choices = get_args(WeightDtype) if option == "weight_dtype" else tuple(DTYPE_BYTES)
    if known not in choices:
        raise InvalidOption(
            f"{option}={name!r} is not known; choose one of {', '.join(choices)}", option=option
        )
    return known
