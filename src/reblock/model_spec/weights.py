"""How large a checkpoint's weights are, from what its files say of themselves.

No weight is read. A safetensors file starts with eight bytes, the length of a JSON header, and
everything behind the header is weights.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from reblock.errors import CorruptArtifact

__all__ = ["WeightBytes", "read_weight_bytes"]

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_FILES = 4096
_END_BYTES = 64 * 2**10
_TOTAL = re.compile(rb'"metadata"\s*:\s*\{[^{}]*"total_size"\s*:\s*(\d{1,18})\s*[,}]')
# Kept beside the sharded files by some publishers, with the same weights once more.
_OTHER_FORMS = ("consolidated", "original", "adapter_model", "training_args", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """The bytes of a checkpoint's weights as they are stored, and what said so.

    "bin" is the size of pickled files, which are a little larger than the weights in them.
    """

    num_bytes: int
    source: Literal["index", "headers", "bin"]

    @property
    def is_exact(self) -> bool:
        """Whether it is the weights alone."""
        return self.source != "bin"


def read_weight_bytes(directory: str) -> WeightBytes | None:
    """Return the bytes of the weights in a checkpoint's directory, None where there are none.

    Raises:
        CorruptArtifact: A file is not what it must be.
    """
    index = os.path.join(directory, _INDEX)
    if os.path.isfile(index):
        total = _read_index(index)
        if total is not None:
            return WeightBytes(num_bytes=total, source="index")
    names = _weight_files(directory, ".safetensors")
    if names:
        paths = [os.path.join(directory, name) for name in names]
        return WeightBytes(num_bytes=sum(map(_tensor_bytes, paths)), source="headers")
    names = _weight_files(directory, ".bin")
    if names:
        sizes = (os.path.getsize(os.path.join(directory, name)) for name in names)
        return WeightBytes(num_bytes=sum(sizes), source="bin")
    return None


def _weight_files(directory: str, ending: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    found = [name for name in names if name.endswith(ending) and not name.startswith(_OTHER_FORMS)]
    # model.safetensors beside model-00001-of-00002.safetensors is another copy of the same.
    sharded = [name for name in found if "-of-" in name]
    return (sharded or found)[:_MAX_FILES]


def _read_index(path: str) -> int | None:
    """Return the total that an index states, None where it states none.

    An index names every tensor and can be of many megabytes, so only its ends are looked at: the
    total stands in front of the names, or behind them.
    """
    with open(path, "rb") as file:
        ends = file.read(_END_BYTES)
        size = os.path.getsize(path)
        if size > _END_BYTES:
            file.seek(max(size - _END_BYTES, _END_BYTES))
            ends += file.read(_END_BYTES)
    found = _TOTAL.search(ends)
    return int(found[1]) if found else None


def _tensor_bytes(path: str) -> int:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(_LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES:
        raise CorruptArtifact("is cut off: it is no safetensors file", path=path)
    length = int.from_bytes(start, "little")
    if length > _MAX_HEADER_BYTES or _LENGTH_BYTES + length > size:
        raise CorruptArtifact(
            f"states a header of {length:,} bytes in a file of {size:,}: it is no safetensors "
            "file, or it is cut off",
            path=path,
        )
    return size - _LENGTH_BYTES - length
