"""A GGUF file: what its header says of the model and of the size of its weights.

    magic, version, number of tensors, number of keys | keys with values | tensor infos | data

The header alone is read, through a memory map, and long lists such as the tokens are passed over.
The package `gguf` needs numpy, which the core is installed without, and builds all of the lists.

Refused are the first version of the format and files of big endian machines, which nothing
writes any more, and a file that is one of several parts: the others have tensors besides, and
transformers cannot read it.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import open_regular
from reblock.errors import CorruptArtifact, UnsupportedModel
from reblock.model_spec.weights import WeightBytes
from reblock.planning.gguf_keys import model_config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GGUFModel", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Models have a hundred keys, some thousand tensors, and up to some hundred thousand tokens and
# merges of tokens.
_MAX_KEYS = 10_000
_MAX_TENSORS = 200_000
_MAX_NAME_BYTES = 1024
_MAX_DIMENSIONS = 8
_MAX_SKIPPED_TEXTS = 4 * 2**20
# Of lists and texts that are kept. A list has at most an entry for every layer.
_MAX_KEPT_ITEMS = 4096
_MAX_KEPT_BYTES = 255
_DEFAULT_ALIGNMENT = 32

_TEXT, _ARRAY, _BOOLEAN = 8, 9, 7
_SCALARS: Mapping[int, struct.Struct] = {
    kind: struct.Struct(f"<{letter}")
    for kind, letter in enumerate(("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"))
    if letter
}
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]

# Names of ggml's types, elements of a block and bytes of a block.
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """What the header of a GGUF file says.

    `config` has the keys of a Hugging Face `config.json`, as far as memory depends on them, and
    None under those that the file has nothing for.
    `weights` are the tensors as they are stored, quantized or not, without the space in between.
    """

    config: dict[str, object]
    weights: WeightBytes


def read_gguf(path: str) -> GGUFModel:
    """Return what the header of the GGUF file at `path` says.

    Raises:
        CorruptArtifact: It is no GGUF file, is cut off or contradicts itself, or has a tensor of
            a type that is not known.
        UnsupportedModel: It is of a version or a machine that is not read, is a part of a file,
            or holds no language model.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(_MAGIC):
            raise CorruptArtifact("is cut off: it is no GGUF file", path=path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(data, path).read()
            except struct.error as error:
                raise CorruptArtifact("is cut off within its header", path=path) from error


class _Header:
    """A walk through the header; every method moves on behind what it has read."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._path = path
        self._offset = 0
        self._skipped_texts = 0

    def read(self) -> GGUFModel:
        num_tensors, num_keys = self._start()
        keys, lengths = self._keys(num_keys)
        self._refuse_part(keys)
        names, weights = self._tensors(num_tensors, keys.get("general.alignment"))
        config = model_config(keys, lengths, names, path=self._path)
        return GGUFModel(config=config, weights=weights)

    def _start(self) -> tuple[int, int]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise self._corrupt("is no GGUF file")
        self._offset = len(_MAGIC)
        version = self._integer(_UINT32)
        # A small number whose bytes are swapped has nothing in its lower half.
        if version and version & 0xFFFF == 0:
            raise self._unsupported("is of a big endian machine; convert it with little endian")
        if version not in _VERSIONS:
            raise self._unsupported(
                f"is of version {version} of the GGUF format, and 2 and 3 are read; convert the "
                "model again"
            )
        num_tensors, num_keys = self._integer(_UINT64), self._integer(_UINT64)
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._corrupt(f"states {num_tensors:,} tensors and {num_keys:,} keys")
        return num_tensors, num_keys

    def _keys(self, count: int) -> tuple[dict[str, object], dict[str, int]]:
        """Return the values that are kept, and the lengths of all lists."""
        values: dict[str, object] = {}
        lengths: dict[str, int] = {}
        for _ in range(count):
            key = self._name()
            if key in values:
                raise self._corrupt(f"has the key {key!r} twice")
            kind = self._integer(_UINT32)
            if kind == _ARRAY:
                values[key], lengths[key] = self._array(key)
            else:
                values[key] = self._value(key, kind)
        return values, lengths

    def _value(self, key: str, kind: int) -> object:
        if kind == _TEXT:
            length = self._integer(_UINT64)
            if length <= _MAX_KEPT_BYTES:
                return self._text(length)
            self._skip(length)
            return None
        form = _SCALARS.get(kind)
        if form is None:
            raise self._corrupt(f"has a value of type {kind} under {key!r}, which is none")
        return self._unpack(form)

    def _array(self, key: str) -> tuple[object, int]:
        """Return a short list of numbers, None for others, and how many entries there are."""
        kind, count = self._integer(_UINT32), self._integer(_UINT64)
        if kind == _TEXT:
            self._skip_texts(key, count)
            return None, count
        form = _SCALARS.get(kind)
        if form is None:
            raise self._corrupt(f"has a list of type {kind} under {key!r}, which is none")
        if count > _MAX_KEPT_ITEMS:
            self._skip(count * form.size)
            return None, count
        return [self._unpack(form) for _ in range(count)], count

    def _skip_texts(self, key: str, count: int) -> None:
        self._skipped_texts += count
        if self._skipped_texts > _MAX_SKIPPED_TEXTS:
            raise self._corrupt(f"has a list of {count:,} texts under {key!r}")
        # There are some hundred thousand, so everything is at hand.
        data, offset, size = self._data, self._offset, len(self._data)
        unpack, width = _UINT64.unpack_from, _UINT64.size
        for _ in range(count):
            offset += width + unpack(data, offset)[0]
            if offset > size:
                break
        self._offset = offset
        self._skip(0)

    def _tensors(self, count: int, alignment: object) -> tuple[frozenset[str], WeightBytes]:
        names: set[str] = set()
        num_bytes = num_elements = end = 0
        for _ in range(count):
            name = self._name()
            if name in names:
                raise self._corrupt(f"has the tensor {name!r} twice")
            names.add(name)
            elements, length = self._sizes(name)
            end = max(end, self._integer(_UINT64) + length)
            num_elements += elements
            num_bytes += length
        if alignment is None:
            alignment = _DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"has general.alignment={alignment!r}, which is no power of two")
        start = -(-self._offset // alignment) * alignment
        if max(num_bytes, end) > max(len(self._data) - start, 0):
            raise self._corrupt(
                f"has {len(self._data):,} bytes, but its tensors end at {start + end:,}: it is cut "
                "off"
            )
        weights = WeightBytes(num_bytes=num_bytes, num_elements=num_elements, source="gguf")
        return frozenset(names), weights

    def _sizes(self, name: str) -> tuple[int, int]:
        """Return the elements and the bytes of a tensor."""
        num_dimensions = self._integer(_UINT32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._corrupt(f"has a tensor {name!r} of {num_dimensions:,} dimensions")
        elements = row = 1
        for index in range(num_dimensions):
            length = self._integer(_UINT64)
            elements *= length
            row = length if index == 0 else row
        number = self._integer(_UINT32)
        known = _TYPES.get(number)
        if known is None:
            raise self._corrupt(
                f"has the tensor {name!r} of ggml type {number}, which this version of reblock "
                "does not know"
            )
        type_name, block_elements, block_bytes = known
        if row % block_elements:
            raise self._corrupt(
                f"has rows of {row:,} elements in {name!r}, but {type_name} has blocks of "
                f"{block_elements}"
            )
        return elements, elements // block_elements * block_bytes

    def _refuse_part(self, keys: dict[str, object]) -> None:
        count = keys.get("split.count")
        if isinstance(count, int) and count > 1:
            raise self._unsupported(
                f"is one of {count} parts of a model; make one file of them with "
                "llama-gguf-split --merge"
            )

    def _name(self) -> str:
        length = self._integer(_UINT64)
        if length > _MAX_NAME_BYTES:
            raise self._corrupt(f"has a name of {length:,} bytes")
        name = self._text(length)
        if not name.isprintable():
            raise self._corrupt(f"has a name that cannot be printed: {name[:40]!r}")
        return name

    def _text(self, length: int) -> str:
        start = self._offset
        self._skip(length)
        try:
            return self._data[start : self._offset].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt("has a text that is not UTF-8") from error

    def _integer(self, form: struct.Struct) -> int:
        value = self._unpack(form)
        assert isinstance(value, int)
        return value

    def _unpack(self, form: struct.Struct) -> object:
        value: object = form.unpack_from(self._data, self._offset)[0]
        self._offset += form.size
        return value

    def _skip(self, length: int) -> None:
        self._offset += length
        if self._offset > len(self._data):
            raise self._corrupt("is cut off within its header")

    def _corrupt(self, fault: str) -> CorruptArtifact:
        return CorruptArtifact(fault, path=self._path)

    def _unsupported(self, fault: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path} {fault}", model=self._path)
