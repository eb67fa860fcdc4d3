"""Mutations of JSON that know its structure, and some of its bytes that do not.

A text is parsed into lists, `Pairs` and plain values. Unlike a dict, `Pairs` can hold a key twice;
`Raw` is written as it stands, whatever it is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random


class Raw(NamedTuple):
    """Text that is written as it is."""

    text: str


class Pairs(list[list[Any]]):
    """An object: a list of [key, value]."""


HOSTILE_VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    1.5,
    1e308,
    "",
    "0",
    "16",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\0b",
    "\x1b[31m",
    "\u202e",
    "\N{FULLWIDTH DIGIT ONE}",
    "\N{GRINNING FACE}",
    "n" * 300,
    "n" * 100_000,
    True,
    False,
    None,
    [],
    Pairs(),
    [[]],
    [[0]],
    [1] * 1000,
    Raw('"\\ud800"'),
    Raw('"\\udfff\\ud800"'),
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("1e400"),
    Raw("-0"),
    Raw("-0.0"),
    Raw("00"),
    Raw("+1"),
    Raw("1_0"),
    Raw("0x10"),
    Raw("1."),
    Raw("9" * 5000),
    Raw("1" * 60),
    Raw("0." + "1" * 100_000),
    Raw("[" * 20 + "]" * 20),
    Raw("[" * 60 + "]" * 60),
    Raw("[" * 900 + "]" * 900),
    Raw("[" * 100_000 + "]" * 100_000),
    Raw('{"a":' * 900 + "1" + "}" * 900),
    Raw('{"a":' * 50_000),
    Raw("undefined"),
    Raw(""),
    Raw("'16'"),
)

# Text that becomes much larger in memory than it is; the last two pass every limit on size.
FAT_VALUES: tuple[Callable[[], Raw], ...] = (
    lambda: Raw("[" + "[]," * 1_300_000 + "0]"),
    lambda: Raw("[" + '{"":0},' * 500_000 + "0]"),
    lambda: Raw('"' + "\N{GRINNING FACE}" + "a" * 3_900_000 + '"'),
    lambda: Raw("{" + ",".join(f'"{key:x}":0' for key in range(400_000)) + "}"),
    lambda: Raw("[" + "1e1," * 1_000_000 + "0]"),
    lambda: Raw('"' + "a" * 70_000_000 + '"'),
    lambda: Raw(
        '["\\ud83d\\ude00' + "a" * 3_200_000 + '",' + '{"":0},' * 60_000 + "0]",
    ),
    lambda: Raw("[" + "[[]]," * 60_000 + '"' + "\N{GRINNING FACE}" + "a" * 3_500_000 + '"]'),
)


def parse(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def write(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{write(key)}: {write(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write, value)) + "]"
    return json.dumps(value)


def encode(value: Any) -> bytes:
    return write(value).encode("utf-8", "surrogatepass")


def get(value: Any, key: str) -> Any:
    return next((item for name, item in value if name == key), None)


def _slots(value: Any) -> Iterator[tuple[list[Any], int]]:
    """Every place in which a value stands."""
    if isinstance(value, Pairs):
        for pair in value:
            yield pair, 1
            yield from _slots(pair[1])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value, index
            yield from _slots(item)


def _objects(value: Any) -> Iterator[Pairs]:
    if isinstance(value, Pairs):
        yield value
        for _, item in value:
            yield from _objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)


def _pick_object(rng: Random, tree: Any) -> Pairs:
    # As often the outermost as any other: that is where most keys are read.
    objects = [found for found in _objects(tree) if found]
    if not objects:
        return Pairs([["", 0]])
    return objects[0] if rng.random() < 0.4 else rng.choice(objects)


def _pick_slot(rng: Random, tree: Any) -> tuple[list[Any], int]:
    pair = rng.choice(_pick_object(rng, tree))
    below = list(_slots(pair[1]))
    return rng.choice(below) if below and rng.random() < 0.6 else (pair, 1)


def delete_key(rng: Random, tree: Any) -> None:
    found = _pick_object(rng, tree)
    del found[rng.randrange(len(found))]


def duplicate_key(rng: Random, tree: Any) -> None:
    found = _pick_object(rng, tree)
    found.insert(rng.randrange(len(found) + 1), list(rng.choice(found)))


def rename_key(rng: Random, tree: Any) -> None:
    pair = rng.choice(_pick_object(rng, tree))
    names = ("", "x", pair[0] + " ", pair[0].upper(), "a\0b", "\x1b[2J", "../x", "k" * 300)
    pair[0] = rng.choice([*names, Raw('"\\ud800"'), "k" * 100_000, "__class__"])


def swap_type(rng: Random, tree: Any) -> None:
    holder, index = _pick_slot(rng, tree)
    value = holder[index]
    swapped = [[value], Pairs([["x", value]]), bool(value), None]
    if isinstance(value, int):
        swapped += [str(value), float(value), Raw(f"{value}.0"), Raw(f"{value}e0")]
    holder[index] = rng.choice(swapped)


def hostile_value(rng: Random, tree: Any) -> None:
    holder, index = _pick_slot(rng, tree)
    holder[index] = rng.choice(HOSTILE_VALUES)


def nudge_number(rng: Random, tree: Any) -> None:
    numbers = [(h, i) for h, i in _slots(tree) if type(h[i]) is int]
    if numbers:
        holder, index = rng.choice(numbers)
        value = holder[index]
        choices = (value + 1, value - 1, -value, value * 2, value // 2, value << 20, value << 33)
        holder[index] = rng.choice(choices)


def shuffle(rng: Random, tree: Any) -> None:
    lists = [tree, *(h[i] for h, i in _slots(tree) if isinstance(h[i], list))]
    rng.shuffle(rng.choice(lists))


def splice(rng: Random, tree: Any) -> None:
    slots = list(_slots(tree))
    if slots:
        (holder, index), (other, place) = rng.choice(slots), rng.choice(slots)
        holder[index] = json_copy(other[place])


def repeat_item(rng: Random, tree: Any) -> None:
    lists = [h[i] for h, i in _slots(tree) if isinstance(h[i], list) and h[i]]
    if lists:
        found = rng.choice(lists)
        found += [json_copy(rng.choice(found)) for _ in range(rng.choice((1, 2, 100, 3000)))]


def json_copy(value: Any) -> Any:
    if isinstance(value, Pairs):
        return Pairs([key, json_copy(item)] for key, item in value)
    return [json_copy(item) for item in value] if type(value) is list else value


def fat_value(rng: Random, tree: Any) -> None:
    pair = rng.choice(_pick_object(rng, tree))
    # Where anything may stand, so that it is carried along.
    inputs = [p for found in _objects(tree) for p in found if p[0] in ("input_info", "graph")]
    if inputs and rng.random() < 0.7:
        pair = rng.choice(inputs)
    fat = rng.choice(FAT_VALUES)()
    pair[1] = Pairs([["x", fat]]) if pair[0] == "graph" else fat


TREE_MUTATORS = (
    delete_key,
    duplicate_key,
    rename_key,
    swap_type,
    hostile_value,
    hostile_value,
    hostile_value,
    nudge_number,
    nudge_number,
    shuffle,
    splice,
    repeat_item,
)


def flip_bytes(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert_bytes(rng: Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    hostile = (b"\0", b"\xff", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\xaf", b'"', b"}", b"[")
    return data[:place] + rng.choice(hostile) * rng.choice((1, 1, 3, 2000)) + data[place:]


def delete_bytes(rng: Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[place + rng.choice((1, 2, 10, 100)) :]


def repeat_bytes(rng: Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.choice((1, 10, 200))]
    return data[:start] + part * rng.choice((2, 3, 1000)) + data[start:]


def mark_byte_order(rng: Random, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    return rng.choice(
        (
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            text.encode("utf-32"),
            data + b"\0",
            b"\n" * 5000 + data,
        )
    )


BYTE_MUTATORS = (
    flip_bytes,
    truncate,
    insert_bytes,
    delete_bytes,
    repeat_bytes,
    mark_byte_order,
)


def mutate(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Return the name of what was done first, and the changed text."""
    if rng.random() < 0.2:
        bytes_mutator = rng.choice(BYTE_MUTATORS)
        return bytes_mutator.__name__, bytes_mutator(rng, data)
    tree = parse(data)
    mutators = [rng.choice(TREE_MUTATORS) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    for mutator in mutators:
        mutator(rng, tree)
    return mutators[0].__name__, encode(tree)


def mutate_fat(rng: Random, data: bytes) -> tuple[str, bytes]:
    tree = parse(data)
    fat_value(rng, tree)
    return "fat_value", encode(tree)
