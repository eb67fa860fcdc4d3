"""Changing one number in a JSON text and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.json_edit import replace_integer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ('{"n": 1}', ["n"], '{"n": 9}'),
        ('{"n":1}', ["n"], '{"n":9}'),
        ('\t{ "n"\r\n:\n-12  ,"m":1}\n\n', ["n"], '\t{ "n"\r\n:\n9  ,"m":1}\n\n'),
        ('{"m": {"n": 1}, "n": 2}', ["n"], '{"m": {"n": 1}, "n": 9}'),
        ('{"m": {"n": 1}, "n": 2}', ["m", "n"], '{"m": {"n": 9}, "n": 2}'),
        ('{"a": "\\"n\\": 1", "n": 2}', ["n"], '{"a": "\\"n\\": 1", "n": 9}'),
        ('{"\\u006e": 1}', ["n"], '{"\\u006e": 9}'),
        ('{"a": [1, {"n": 1}], "n": 2}', ["n"], '{"a": [1, {"n": 1}], "n": 9}'),
    ],
)
def test_only_the_number_is_changed(text: str, keys: list[str], expected: str) -> None:
    assert replace_integer(text, keys, 9) == expected


@pytest.mark.parametrize(
    ("text", "keys"),
    [("{}", ["n"]), ('{"m": 1}', ["n"]), ('{"n": 1}', ["n", "n"]), ('{"m": {}}', ["m", "n"])],
)
def test_a_key_that_is_not_there_is_said(text: str, keys: list[str]) -> None:
    with pytest.raises(KeyError):
        replace_integer(text, keys, 9)


@given(
    before=st.dictionaries(st.text(), VALUES, max_size=4),
    after=st.dictionaries(st.text(), VALUES, max_size=4),
    key=st.text(),
    number=st.integers(),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    ensure_ascii=st.booleans(),
)
def test_the_object_is_the_same_but_for_the_number(
    before: dict[str, object],
    after: dict[str, object],
    key: str,
    number: int,
    indent: int | str | None,
    ensure_ascii: bool,
) -> None:
    value = {k: v for k, v in before.items() if k != key} | {key: number}
    value |= {k: v for k, v in after.items() if k != key}
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    changed = replace_integer(text, [key], 7)
    assert json.loads(changed) == value | {key: 7}
    assert replace_integer(changed, [key], number) == text
