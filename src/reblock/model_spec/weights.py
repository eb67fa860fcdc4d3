"""How large a checkpoint's weights are, from what its files say of themselves.

No weight is read. A safetensors file starts with eight bytes, the length of a JSON header, and
everything behind the header is weights. A header of many experts is megabytes of JSON, so it is
taken apart tensor by tensor and never becomes Python values as a whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reblock.errors import CorruptArtifact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import BinaryIO

__all__ = ["WeightBytes", "read_weight_bytes", "sum_tensors"]

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
# The most that the safetensors library reads itself.
_MAX_HEADER_BYTES = 100 * 10**6
_MAX_ENTRY_BYTES = 4096
_MAX_SHOWN_BYTES = 60
_METADATA_KEY = b'"__metadata__"'
_OPENING = re.compile(rb"\s*+\{")
_EMPTY = re.compile(rb"\s*\{\s*\}\s*")
_MAX_DIMENSIONS = 64
_MAX_FILES = 4096
_END_BYTES = 64 * 2**10
_TOTAL = re.compile(rb'"metadata"\s*:\s*\{[^{}]*"total_size"\s*:\s*(\d{1,18})\s*[,}]')
_SHARD = re.compile(r"(.*)-\d+-of-(\d{1,6})\.\w+")
# A key with its object, which holds no other one, and what follows. Nothing in it is tried twice,
# so the time grows with the header alone.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_ENTRY = re.compile(
    rb"\s*+(" + _STRING + rb")\s*+:\s*+(\{(?:[^{}\"]++|" + _STRING + rb")*+\})\s*+([,}])", re.DOTALL
)
# Kept beside the sharded files by some publishers, with the same weights once more.
_OTHER_FORMS = ("consolidated", "original", "adapter_model", "training_args", "optimizer")
# Quantized weights are packed into these, several in an element.
_PACKED = ("I8", "U8", "I32", "U32")
_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}

# A type, a shape, and where the data begins and ends.
_Tensor = tuple[str, "Sequence[int]", "Sequence[int]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """The bytes of a checkpoint's weights as they are stored, and what said so.

    "bin" is the size of pickled files, which are a little larger than the weights in them.
    `num_elements` are those of all tensors, buffers that were stored among them. It is None where
    only sizes are known, and where a tensor is of an integer type that quantized weights are
    packed into: its elements are no parameters.
    """

    num_bytes: int
    num_elements: int | None
    source: Literal["index", "headers", "bin", "gguf"]

    @property
    def is_exact(self) -> bool:
        """Whether it is the weights alone."""
        return self.source != "bin"


def read_weight_bytes(directory: str) -> WeightBytes | None:
    """Return the bytes of the weights in a checkpoint's directory, None where there are none.

    Headers say more than an index, which is believed where not all files are there.

    Raises:
        CorruptArtifact: A file is not what it must be, or some of several are missing.
    """
    index = os.path.join(directory, _INDEX)
    names = _weight_files(directory, ".safetensors")
    if os.path.isfile(index) and not _are_all_shards(names):
        total = _read_index(index)
        if total is not None:
            return WeightBytes(num_bytes=total, num_elements=None, source="index")
    names = names or _weight_files(directory, ".bin")
    _refuse_missing(directory, names)
    if not names:
        return None
    paths = [os.path.join(directory, name) for name in names]
    if names[0].endswith(".bin"):
        return WeightBytes(num_bytes=sum(map(_size, paths)), num_elements=None, source="bin")
    return sum_tensors(tensor for path in paths for tensor in _read_header(path))


def sum_tensors(tensors: Iterable[_Tensor]) -> WeightBytes:
    """Return what tensors take, each given as its type, its shape and where its data lies."""
    num_bytes = num_elements = 0
    is_packed = False
    for dtype, shape, (start, end) in tensors:
        num_bytes += end - start
        num_elements += math.prod(shape)
        is_packed = is_packed or dtype in _PACKED
    return WeightBytes(
        num_bytes=num_bytes, num_elements=None if is_packed else num_elements, source="headers"
    )


def _weight_files(directory: str, ending: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=directory) from error
    found = [name for name in names if name.endswith(ending) and not name.startswith(_OTHER_FORMS)]
    # model.safetensors beside model-00001-of-00002.safetensors is another copy of the same.
    sharded = [name for name in found if _SHARD.fullmatch(name)]
    return (sharded or found)[:_MAX_FILES]


def _are_all_shards(names: list[str]) -> bool:
    return bool(names) and _SHARD.fullmatch(names[0]) is not None and not _missing_shards(names)


def _missing_shards(names: list[str]) -> int:
    """Return how many files are missing of those that the names of the others count."""
    matches = [match for match in map(_SHARD.fullmatch, names) if match]
    wholes = {(match[1], int(match[2])) for match in matches}
    return max(sum(count for _, count in wholes) - len(matches), 0)


def _refuse_missing(directory: str, names: list[str]) -> None:
    missing = _missing_shards(names)
    if missing:
        raise CorruptArtifact(
            f"has {len(names)} files of weights such as {names[0]}, and {missing} more are "
            "missing; finish the download, or leave only config.json to go by that alone",
            path=directory,
        )


def _size(path: str) -> int:
    with _open(path) as file:
        return os.fstat(file.fileno()).st_size


def _open(path: str) -> BinaryIO:
    try:
        # Opening a pipe would wait for somebody to write to it.
        if stat.S_ISREG(os.stat(path).st_mode):
            return open(path, "rb")
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error
    raise CorruptArtifact("is not a regular file", path=path)


def _read_index(path: str) -> int | None:
    """Return the total that an index states, None where it states none.

    An index names every tensor and can be of many megabytes, so only its ends are looked at: the
    total stands in front of the names, or behind them.
    """
    with _open(path) as file:
        ends = file.read(_END_BYTES)
        size = os.fstat(file.fileno()).st_size
        if size > _END_BYTES:
            file.seek(max(size - _END_BYTES, _END_BYTES))
            ends += file.read(_END_BYTES)
    found = _TOTAL.search(ends)
    return int(found[1]) if found else None


def _read_header(path: str) -> Iterator[_Tensor]:
    """Yield the tensors of a file; together they are all that lies behind its header."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
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
        header = file.read(length)
    left = size - _LENGTH_BYTES - length
    for tensor in _entries(header, path):
        yield tensor
        left -= tensor[2][1] - tensor[2][0]
    if left:
        raise CorruptArtifact(
            f"has {abs(left):,} bytes {'more' if left > 0 else 'less'} than its tensors: it is cut "
            "off, or no safetensors file",
            path=path,
        )


def _entries(header: bytes, path: str) -> Iterator[_Tensor]:
    if _EMPTY.fullmatch(header):
        return
    opening = _OPENING.match(header)
    position, follows = 0 if opening is None else opening.end(), b","
    while follows == b",":
        entry = _ENTRY.match(header, position) if position else None
        if entry is None:
            raise CorruptArtifact("has a header that is no list of tensors", path=path)
        position, follows = entry.end(), entry[3]
        # The first bytes of a key are all that is compared or shown.
        key = header[entry.start(1) : min(entry.end(1), entry.start(1) + _MAX_SHOWN_BYTES)]
        if key == _METADATA_KEY:
            continue
        tensor = _parse_tensor(header, *entry.span(2))
        if tensor is None:
            raise CorruptArtifact(f"has a tensor that makes no sense: {key!r}", path=path)
        yield tensor
    if header[position:].strip():
        raise CorruptArtifact("has a header with something behind its end", path=path)


def _parse_tensor(header: bytes, start: int, end: int) -> _Tensor | None:
    """Return a tensor's type, shape and place, None where they are not what they must be."""
    if end - start > _MAX_ENTRY_BYTES:
        return None
    try:
        values = json.loads(header[start:end])
    except (ValueError, RecursionError):
        return None
    dtype, shape, place = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(place)):
        return None
    if len(place) != 2 or place[0] > place[1] or len(shape) > _MAX_DIMENSIONS:
        return None
    bits = _DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (place[1] - place[0]) * 8:
        return None
    return dtype, shape, place


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )
