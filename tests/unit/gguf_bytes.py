"""GGUF files written byte by byte, right ones and wrong ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, F16, Q8_0 = 0, 1, 8
_LETTERS = {0: "B", 1: "b", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q"}


@dataclass(frozen=True)
class Typed:
    """A value of a type that its Python type does not tell."""

    kind: int
    value: object


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value: object) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, list):
        return Typed(ARRAY, value)
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    return Typed(kinds[type(value)], value)


def payload(value: Typed) -> bytes:
    if value.kind == STRING:
        assert isinstance(value.value, str | bytes)
        return text(value.value)
    if value.kind == ARRAY:
        assert isinstance(value.value, list)
        items = [typed(item) for item in value.value]
        kind = items[0].kind if items else UINT32
        return struct.pack("<IQ", kind, len(items)) + b"".join(map(payload, items))
    return struct.pack("<" + _LETTERS[value.kind], value.value)


def keys_bytes(keys: dict[str, object]) -> bytes:
    values = ((key, typed(value)) for key, value in keys.items())
    return b"".join(text(key) + struct.pack("<I", v.kind) + payload(v) for key, v in values)


def tensor_bytes(name: str, dimensions: list[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def start(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def gguf(
    keys: dict[str, object],
    tensors: tuple[tuple[str, list[int], int, int], ...] = (),
    *,
    num_data_bytes: int = 0,
    version: int = 3,
) -> bytes:
    """Return a file with these keys, these tensors and so many bytes of data."""
    header = start(len(tensors), len(keys), version) + keys_bytes(keys)
    header += b"".join(tensor_bytes(*tensor) for tensor in tensors)
    alignment = keys.get("general.alignment", 32)
    assert isinstance(alignment, int)
    return header + bytes(-len(header) % max(alignment, 1)) + bytes(num_data_bytes)


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "b", "cd"],
    "tokenizer.ggml.scores": [0.0, 1.0, 2.0],
}
