"""What an artifact says of itself that a plan shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES
from reblock.errors import InvalidOption
from reblock.planning.result import CachedModel, LayerGroup
from reblock.planning.target import Target

if TYPE_CHECKING:
    from reblock.artifact.reader import Artifact
    from reblock.config import CacheMeta

__all__ = ["artifact_target", "cached_by"]


def artifact_target(artifact: Artifact, asked: Target | None) -> tuple[Target, tuple[str, ...]]:
    """Return the devices of an artifact, or those that were asked for, and what to say of it.

    Raises:
        CorruptArtifact: It does not say what it is for, and nothing was asked for.
        InvalidOption: It cannot run on the devices that were asked for.
    """
    config = artifact.config
    if asked is None:
        device, count = artifact.device(), config.num_devices
        text = device.name if count == 1 else f"{device.name}x{count}"
        return Target(device=device, num_devices=count, text=text), ()
    if asked.num_devices != config.num_devices:
        raise InvalidOption(
            f"npu={asked.text!r}: {artifact.directory} is compiled for {config.num_devices} "
            f"device(s); name one of another kind only as '{asked.device.name}"
            f"{'' if config.num_devices == 1 else f'x{config.num_devices}'}'",
            option="npu",
        )
    own = config.npu
    if (asked.device.name == "cpu") != (own == "cpu") and own is not None:
        raise InvalidOption(
            f"npu={asked.text!r}: {artifact.directory} is compiled for {own}, and its programs do "
            "not run there; leave npu out, or plan the model itself",
            option="npu",
        )
    if own in (None, asked.device.name):
        return asked, ()
    return asked, (f"It is compiled for {own}; the plan is for its programs on {asked.text}.",)


def cached_by(artifact: Artifact) -> CachedModel:
    """Return what its programs keep of every token, by `cache_metas`."""
    config = artifact.config
    groups: dict[tuple[object, ...], list[CacheMeta]] = {}
    for meta in config.cache_metas:
        key = (meta.layer_type, meta.is_resizable, meta.shape[1:], meta.dtype)
        groups.setdefault(key, []).append(meta)
    layers = tuple(_group(members, config.kvcache_block_size) for members in groups.values())
    full = [group for group, metas in zip(layers, groups.values(), strict=True) if _grows(metas)]
    fixed_bytes = sum(
        meta.bytes_at(config.kvcache_num_blocks)
        for meta in config.cache_metas
        if not meta.is_resizable
    )
    return CachedModel(
        kv_dtype=config.cache_metas[0].dtype if config.cache_metas else config.dtype or "float32",
        bytes_per_token=sum(group.num_layers * group.bytes_per_token for group in layers),
        full_bytes_per_token=sum(group.num_layers * group.bytes_per_token for group in full),
        fixed_bytes_per_request=fixed_bytes // config.batch_size,
        layers=layers,
    )


def _grows(metas: list[CacheMeta]) -> bool:
    return metas[0].is_resizable


def _group(metas: list[CacheMeta], block_size: int) -> LayerGroup:
    """Return the layers whose caches `metas` are, [blocks, KV heads, tokens, width] each."""
    first = metas[0]
    num_layers = len({meta.layer_index for meta in metas})
    num_tensors = len(metas) // num_layers
    heads, tokens, width = (*first.shape[1:], 1, 1, 1)[:3]
    is_full = first.layer_type == "full_attention"
    num_bytes = num_tensors * math.prod(first.shape[1:]) * DTYPE_BYTES[first.dtype]
    return LayerGroup(
        kind=first.layer_type.removesuffix("_attention"),
        num_layers=num_layers,
        num_kv_heads=heads,
        key_width=width,
        value_width=width if num_tensors > 1 else 0,
        index_width=0,
        window=None if is_full else tokens,
        bytes_per_token=num_bytes // (block_size if is_full else tokens),
        state_bytes=0,
    )
