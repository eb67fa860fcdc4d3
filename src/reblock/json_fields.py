"""JSON objects read from an artifact: nothing in them is trusted before it was checked.

What Python makes of JSON takes more memory than the JSON itself, up to 29 times as measured. So
two things are bounded before a text is parsed: its bytes, each of which can cost 9 (as read, and
decoded twice into text of four bytes a character), and its characters , : [ {, one of which
stands before every value and can cost 120 bytes. Both bounds together are 60 MiB at most. A model
of 100 layers has a configuration of 200 KB with 10,000 of these characters, and a program whose
graph names 50,000 weights has a description of 3 MB with 50,000 of them.

Imports next to nothing, so that the command that only reads the block count can start fast.
"""

from __future__ import annotations

import json

from reblock.errors import CorruptArtifact, UnknownFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["MAX_JSON_BYTES", "JsonFields", "parse_json_object"]

# Of the artifacts that reblock writes, in every object that has a `format_version`.
FORMAT_VERSION = 1

MAX_JSON_BYTES = 4 * 2**20
_MAX_JSON_VALUES = 200_000
# Of values within each other. Python's own limit leaves no room for what works on the values.
_MAX_DEPTH = 32
_MAX_DIGITS = 64
# Of keys and of texts that are shown to people. Nothing longer has a name for a file.
_MAX_TEXT_LENGTH = 255

# Everything that is counted in an artifact fits 32 bits.
_MAX_INTEGER = 2**31 - 1


def parse_json_object(
    text: str | bytes, *, path: str, has_constants: bool = False
) -> dict[str, object]:
    """Return the one JSON object in `text`; `path` is named in errors.

    With `has_constants` NaN and Infinity, which JSON does not know, are numbers: transformers
    writes them into `config.json`.

    Raises:
        CorruptArtifact: It is too large, not UTF-8, cut off or no JSON object, has a key twice
            or one that is too long or cannot be printed, or a number that JSON does not know or
            that is too large, or is nested too deep.
    """
    if len(text) > MAX_JSON_BYTES:
        raise CorruptArtifact(f"is larger than {MAX_JSON_BYTES:,} bytes", path=path)
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        if sum(map(decoded.count, ",:[{")) > _MAX_JSON_VALUES:
            raise ValueError(f"it has more than {_MAX_JSON_VALUES:,} values")
        value = json.loads(
            decoded,
            object_pairs_hook=_check_keys,
            parse_constant=float if has_constants else _refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
        _check_depth(value)
    except RecursionError as error:
        raise CorruptArtifact("is no valid JSON: it is nested too deep", path=path) from error
    except ValueError as error:
        raise CorruptArtifact(f"is no valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CorruptArtifact("is no JSON object", path=path)
    return value


class JsonFields:
    """One JSON object whose values are handed out checked; errors name the key and the path.

    Every method that reads a key raises `CorruptArtifact` where the key is missing or its value
    is not what the method returns.
    """

    def __init__(self, values: dict[str, object], *, path: str, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self._prefix = prefix

    def text(self, key: str) -> str:
        """Return a string that can be shown on a terminal as it is."""
        return self._check_text(key, self._get(key))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(self._check_text(key, item) for item in self._list(key))

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.corrupt(key, f"must be true or false, not {_shown(value)}")
        return value

    def integer(self, key: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """Return a whole number from `minimum` to `maximum`, by default one of 31 bits."""
        return self._check_integer(key, self._get(key), minimum, maximum)

    def number(self, key: str, *, maximum: float) -> float:
        """Return a number from 0 to `maximum`, whole or not."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.corrupt(key, f"must be a number, not {_shown(value)}")
        if not 0 <= value <= maximum:  # nor NaN, where constants are read
            raise self.corrupt(key, f"must be from 0 to {maximum:,}, not {_shown(value)}")
        return float(value)

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number from 1 up, or None where the value is null."""
        value = self._get(key)
        return None if value is None else self._check_integer(key, value, 1)

    def integers(self, key: str, *, minimum: int = 1) -> tuple[int, ...]:
        """Return a list of whole numbers, each `minimum` or more."""
        return tuple(self._check_integer(key, item, minimum) for item in self._list(key))

    def nested(self, key: str) -> JsonFields:
        """Return an object within this one."""
        return self._check_object(key, self._get(key))

    def nested_list(self, key: str) -> list[JsonFields]:
        """Return a list of objects."""
        return [
            self._check_object(f"{key}[{index}]", item)
            for index, item in enumerate(self._list(key))
        ]

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse keys that are not among the `known` ones.

        Raises:
            UnknownFormat: There is such a key, so a newer version wrote the file.
        """
        for key in self.values:
            if key not in known:
                raise UnknownFormat(
                    f"has the key {self._prefix + key!r}, which this version of reblock does not "
                    "know; upgrade reblock",
                    path=self.path,
                )

    def refuse_duplicates(self, key: str, names: Iterable[str]) -> None:
        """Refuse a list under `key` in which one of the `names` stands twice."""
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self.corrupt(key, f"has {name!r} twice")
            seen.add(name)

    def corrupt(self, key: str, fault: str) -> CorruptArtifact:
        """Return the error for a `fault` of the value under `key`."""
        return CorruptArtifact(f"{self._prefix}{key} {fault}", path=self.path)

    def _get(self, key: str) -> object:
        if key not in self.values:
            raise self.corrupt(key, "is missing")
        return self.values[key]

    def _list(self, key: str) -> list[object]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self.corrupt(key, f"must be a list, not {_shown(value)}")
        return value

    def _check_text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.corrupt(key, f"must be text, not {_shown(value)}")
        if len(value) > _MAX_TEXT_LENGTH:
            fault = f"must be text of up to {_MAX_TEXT_LENGTH} characters, not {_shown(value)}"
            raise self.corrupt(key, fault)
        # Control characters would reach the terminal of whoever inspects the artifact.
        if not value.isprintable():
            raise self.corrupt(key, f"must be printable text, not {_shown(value)}")
        return value

    def _check_integer(
        self, key: str, value: object, minimum: int, maximum: int = _MAX_INTEGER
    ) -> int:
        # True is an int to Python, but not to JSON.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.corrupt(key, f"must be a whole number, not {_shown(value)}")
        if not minimum <= value <= maximum:
            raise self.corrupt(key, f"must be from {minimum} to {maximum:,}, not {_shown(value)}")
        return value

    def _check_object(self, key: str, value: object) -> JsonFields:
        if not isinstance(value, dict):
            raise self.corrupt(key, f"must be an object, not {_shown(value)}")
        return JsonFields(value, path=self.path, prefix=f"{self._prefix}{key}.")


def check_format_version(fields: JsonFields) -> None:
    """Check the `format_version` of an object that reblock wrote.

    Raises:
        CorruptArtifact: There is none, or it is no number.
        UnknownFormat: It is one that this version does not know.
    """
    version = fields.integer("format_version")
    if version > FORMAT_VERSION:
        raise UnknownFormat(
            f"is of format_version {version}, and this version of reblock reads up to "
            f"{FORMAT_VERSION}; upgrade reblock",
            path=fields.path,
        )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if len(key) > _MAX_TEXT_LENGTH:
            raise ValueError(
                f"the key {key[:40]!r}... is longer than {_MAX_TEXT_LENGTH} characters"
            )
        if key in values:
            raise ValueError(f"the key {key!r} stands there twice")
        if not key.isprintable():
            raise ValueError(f"the key {key!r} is not printable")
        values[key] = value
    return values


def _check_depth(value: object) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    if level:
        raise ValueError(f"it is nested too deep, more than {_MAX_DEPTH} values in each other")


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is no number")


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"{text[:40]}... is too large a number")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    # JSON has no way to write it back.
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return value
