"""Changing one number in a JSON text and nothing else, so that whoever wrote it knows it again."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["replace_integer"]

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def replace_integer(text: str, keys: Sequence[str], value: int) -> str:
    """Return `text` with another number where `keys` lead, from the outer object inwards.

    Args:
        text: A valid JSON object in which no key stands twice.
        keys: The key of each object on the way; the last one leads to a number.
        value: The number to stand there.

    Raises:
        KeyError: One of the keys is not there.

    >>> replace_integer('{ "a": {"n":  40 }, "n": 7 }', ["a", "n"], 9)
    '{ "a": {"n":  9 }, "n": 7 }'
    """
    position = _skip(text, 0)
    for key in keys:
        position = _find_value(text, position, key)
    _, end = _DECODER.raw_decode(text, position)
    return f"{text[:position]}{value}{text[end:]}"


def _find_value(text: str, position: int, wanted: str) -> int:
    """Return where the value of a key begins, in the object that begins at `position`."""
    if text[position] == "{":
        position = _skip(text, position + 1)
        while text[position] != "}":
            key, position = _DECODER.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)  # past the colon
            if key == wanted:
                return position
            _, position = _DECODER.raw_decode(text, position)
            position = _skip(text, position)
            if text[position] == ",":
                position = _skip(text, position + 1)
    raise KeyError(wanted)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None  # it matches nothing, too
    return match.end()
