"""What the cache tensors of a compiled model are, one object each, as optimum-rbln names them.

CacheMeta
|-- KVCacheMeta                         keys or values: blocks, heads, tokens, head size
|   |-- FullAttentionKVCacheMeta          layers that see the whole past
|   `-- SlidingWindowAttentionKVCacheMeta layers that see a window of it
`-- LinearAttentionCacheMeta            the state of a layer that keeps no tokens
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from reblock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CacheMeta",
    "FullAttentionKVCacheMeta",
    "KVCacheMeta",
    "LinearAttentionCacheMeta",
    "SlidingWindowAttentionKVCacheMeta",
]


class BlockShapes(Protocol):
    """What the shape of a full-attention cache follows from."""

    @property
    def kvcache_block_size(self) -> int | None:
        """How many tokens a block holds."""
        ...

    @property
    def kvcache_num_blocks(self) -> int:
        """How many blocks there are, where that was given."""
        ...

    @property
    def num_full_blocks(self) -> int:
        """How many blocks a full batch uses."""
        ...

    @property
    def is_auto_num_blocks(self) -> bool:
        """Whether the block count is still to be estimated."""
        ...


class WindowShapes(Protocol):
    """What the shape of a sliding-window cache follows from."""

    @property
    def batch_size(self) -> int:
        """How many sequences there are side by side."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """How many tokens such a layer sees."""
        ...


@dataclass(frozen=True, slots=True)
class CacheMeta:
    """One cache tensor; `shape` is what it is compiled for, or the most it can ever use.

    Raises:
        UsageError: A value is not of its kind.
    """

    name: str
    layer_index: int
    shape: list[int]
    dtype: str

    layer_type: ClassVar[str] = "cache"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"a cache has the name {self.name!r}; it must be text")
        if not isinstance(self.dtype, str):
            raise UsageError(f"cache {self.name!r}: dtype={self.dtype!r} must be text")
        if not _is_whole_number(self.layer_index, minimum=0):
            raise UsageError(
                f"cache {self.name!r}: layer_index={self.layer_index!r} must be 0 or more"
            )
        if not isinstance(self.shape, list) or not all(
            _is_whole_number(size, minimum=1) for size in self.shape
        ):
            raise UsageError(
                f"cache {self.name!r}: shape={self.shape!r} must be a list of numbers from 1 up"
            )

    @property
    def can_resize(self) -> bool:
        """Whether its block count may change after compilation."""
        return False

    @property
    def compile_shape(self) -> list[int]:
        """The shape that it has in a program that was just compiled."""
        return self.shape

    @classmethod
    def from_serialized(cls, serialized: Mapping[str, object]) -> CacheMeta:
        """Return the object that stands in `rbln_config.json`; keys of other kinds are dropped.

        Raises:
            UsageError: It is of no known kind, lacks a field or has a bad value.
        """
        layer_type = serialized.get("layer_type")
        kind = next((kind for kind in _KINDS if kind.layer_type == layer_type), None)
        if kind is None:
            known = ", ".join(sorted(repr(kind.layer_type) for kind in _KINDS))
            raise UsageError(
                f"the layer_type {layer_type!r} of a cache is not known; known are {known}. A "
                "newer optimum-rbln may have written it: upgrade reblock"
            )
        names = [field.name for field in fields(kind)]
        if missing := [name for name in names if name not in serialized]:
            raise UsageError(f"a cache of layer_type {layer_type!r} lacks {', '.join(missing)}")
        # Every class checks its own values.
        return kind(**{name: serialized[name] for name in names})  # type: ignore[arg-type]

    def _prepare_for_serialization(self) -> dict[str, object]:
        """Return the object as it stands in `rbln_config.json`."""
        return {
            "name": self.name,
            "layer_index": self.layer_index,
            "shape": self.shape,
            "layer_type": self.layer_type,
            "is_auto": getattr(self, "is_auto", False),
            "dtype": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class KVCacheMeta(CacheMeta):
    """A cache of keys or of values, in blocks: [blocks, KV heads, tokens of a block, head size]."""

    def __post_init__(self) -> None:
        # Named, because super() knows nothing of the class that slots=True makes of this one.
        CacheMeta.__post_init__(self)
        if len(self.shape) != 4:
            raise UsageError(
                f"cache {self.name!r}: shape={self.shape!r} must have four dimensions: blocks, KV "
                "heads, tokens of a block, head size"
            )

    @property
    def num_blocks(self) -> int:
        """How many blocks `shape` has."""
        return self.shape[0]

    @property
    def block_size(self) -> int:
        """How many tokens a block holds."""
        return self.shape[2]


@dataclass(frozen=True, slots=True)
class FullAttentionKVCacheMeta(KVCacheMeta):
    """The cache of a layer that sees the whole past.

    With `is_auto` it is compiled with one block and grown afterwards, and `shape` counts the
    blocks of a full batch, however many it holds.
    """

    is_auto: bool

    layer_type: ClassVar[str] = "full_attention"

    def __post_init__(self) -> None:
        KVCacheMeta.__post_init__(self)
        if not isinstance(self.is_auto, bool):
            raise UsageError(f"cache {self.name!r}: is_auto={self.is_auto!r} must be True or False")

    @property
    def can_resize(self) -> bool:
        """Whether its block count may change after compilation."""
        return self.is_auto

    @property
    def compile_shape(self) -> list[int]:
        """The shape that it has in a program that was just compiled."""
        return [1, *self.shape[1:]] if self.is_auto else self.shape

    @classmethod
    def from_config(
        cls,
        name: str,
        layer_index: int,
        num_key_value_heads: int,
        head_dim: int,
        dtype: str,
        rbln_config: BlockShapes,
    ) -> FullAttentionKVCacheMeta:
        """Return the cache of one layer of a model that is compiled with `rbln_config`."""
        is_auto = rbln_config.is_auto_num_blocks
        num_blocks = rbln_config.num_full_blocks if is_auto else rbln_config.kvcache_num_blocks
        block_size = _settled("kvcache_block_size", rbln_config.kvcache_block_size)
        shape = [num_blocks, num_key_value_heads, block_size, head_dim]
        return cls(name, layer_index, shape, dtype, is_auto)


@dataclass(frozen=True, slots=True)
class SlidingWindowAttentionKVCacheMeta(KVCacheMeta):
    """The cache of a layer that sees a window of the past: a block of it for each sequence."""

    layer_type: ClassVar[str] = "sliding_attention"

    @classmethod
    def from_config(
        cls,
        name: str,
        layer_index: int,
        num_key_value_heads: int,
        head_dim: int,
        dtype: str,
        rbln_config: WindowShapes,
    ) -> SlidingWindowAttentionKVCacheMeta:
        """Return the cache of one layer of a model that is compiled with `rbln_config`."""
        window = _settled("sliding_window", rbln_config.sliding_window)
        shape = [rbln_config.batch_size, num_key_value_heads, window, head_dim]
        return cls(name, layer_index, shape, dtype)


@dataclass(frozen=True, slots=True)
class LinearAttentionCacheMeta(CacheMeta):
    """The state of a layer with linear attention, whose size has nothing to do with tokens."""

    layer_type: ClassVar[str] = "linear_attention"

    @classmethod
    def from_config(
        cls, name: str, layer_index: int, shape: list[int], dtype: str
    ) -> LinearAttentionCacheMeta:
        """Return the state of one layer, whose shape the model gives."""
        return cls(name, layer_index, shape, dtype)


_KINDS = (
    FullAttentionKVCacheMeta,
    LinearAttentionCacheMeta,
    SlidingWindowAttentionKVCacheMeta,
)


def _is_whole_number(value: object, *, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _settled(option: str, value: int | None) -> int:
    if value is None:
        raise UsageError(f"{option} is not set; give it before the caches are laid out")
    return value
