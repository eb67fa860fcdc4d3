from __future__ import annotations

import json
import tracemalloc

import pytest

from reblock import json_fields
from reblock.errors import CorruptArtifact, UnknownFormat
from reblock.json_fields import JsonFields, parse_json_object


def fields(**values: object) -> JsonFields:
    return JsonFields(values, path="/a.json")


@pytest.mark.parametrize("text", ['{"a": 1}', b'{"a": 1}', ' {"a": 1}\n'])
def test_object_is_read_from_text_and_from_bytes(text: str | bytes) -> None:
    assert parse_json_object(text, path="/a.json") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is no valid JSON"),
        ('{"a": 1', "is no valid JSON"),
        ('{"a": 1} {}', "is no valid JSON"),
        ("[1]", "is no JSON object"),
        ("null", "is no JSON object"),
        ('{"a": 1, "a": 2}', "the key 'a' stands there twice"),
        ('{"b": {"a": 1, "a": 1}}', "the key 'a' stands there twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a": 1e999}', "1e999 is too large a number"),
        ('{"a": [-1e999]}', "-1e999 is too large a number"),
        ('{"\\u001b[31m": 1}', r"the key '\\x1b\[31m' is not printable"),
        ('{"a": ' + "9" * 5000 + "}", r"9{40}\.\.\. is too large a number"),
        ('{"a": -' + "9" * 64 + "}", "is too large a number"),
        ('{"a":' * 100_000, "nested too deep"),
        ('{"a": ' + "[" * 32 + "]" * 32 + "}", "nested too deep, more than 32 values"),
        ('{"a": ' + '{"a":' * 900 + "1" + "}" * 901, "nested too deep"),
        ('{"' + "k" * 256 + '": 1}', r"the key 'k{40}'\.\.\. is longer than 255 characters"),
        ('{"\\ud800": 1}', r"the key '\\ud800' is not printable"),
        (b'{"a": "\xff"}', "is no valid JSON"),
        ('\N{BYTE ORDER MARK}{"a": 1}', "is no valid JSON"),
    ],
)
def test_text_that_is_no_plain_object_is_refused(text: str | bytes, fault: str) -> None:
    with pytest.raises(CorruptArtifact, match=fault) as caught:
        parse_json_object(text, path="/a.json")
    assert caught.value.path == "/a.json"
    assert str(caught.value).startswith("/a.json: ")


def test_text_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_fields, "MAX_JSON_BYTES", 8)
    assert parse_json_object('{"a": 1}', path="/a.json") == {"a": 1}
    with pytest.raises(CorruptArtifact, match="is larger than 8 bytes"):
        parse_json_object('{"a": 12}', path="/a.json")


def test_text_of_more_values_than_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_fields, "_MAX_JSON_VALUES", 6)
    assert parse_json_object('{"a": [[], {}]}', path="/a.json") == {"a": [[], {}]}
    with pytest.raises(CorruptArtifact, match="it has more than 6 values"):
        parse_json_object('{"a": [[], {}, 1]}', path="/a.json")


def test_what_is_just_within_the_bounds_is_read() -> None:
    deep = "[" * 31 + "]" * 31
    text = f'{{"a": {deep}, "b": {"9" * 64}, "{"k" * 255}": -0, "c": "\\ud800"}}'
    read = parse_json_object(text, path="/a.json")
    assert read["b"] == int("9" * 64)
    assert read["k" * 255] == 0
    assert read["c"] == "\ud800"


def test_a_description_that_names_many_weights_is_read() -> None:
    names = [f"model.layers.{i // 512}.mlp.experts.{i % 512}.gate.weight" for i in range(50_000)]
    text = json.dumps({"graph": {"weights": names}}, indent=1)
    read = parse_json_object(text, path="/a.json")
    assert read == {"graph": {"weights": names}}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [' + "[]," * 99_000 + "0]}",
        '{"a": [' + '{"":0},' * 66_000 + "0]}",
        "{" + ",".join(f'"{key:x}":0' for key in range(99_000)) + "}",
        '{"a": ["\N{GRINNING FACE}' + "a" * 3_500_000 + '",' + "[[0]]," * 66_000 + "0]}",
    ],
    ids=["lists", "objects", "keys", "text"],
)
def test_the_most_that_is_read_takes_less_than_64_mib(text: str) -> None:
    tracemalloc.start()
    try:
        parse_json_object(text, path="/a.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


def test_values_of_the_right_type_are_handed_out() -> None:
    read = fields(
        text="a",
        texts=["a", "b"],
        flag=True,
        one=1,
        zero=0,
        half=0.5,
        nothing=None,
        numbers=[1, 2],
        nested={"x": 1},
        nested_list=[{"x": 2}],
    )
    assert read.text("text") == "a"
    assert read.texts("texts") == ("a", "b")
    assert read.boolean("flag") is True
    assert read.integer("one") == 1
    assert read.integer("zero", minimum=0) == 0
    assert read.optional_integer("nothing") is None
    assert read.optional_integer("one") == 1
    assert read.integers("numbers") == (1, 2)
    assert [read.number(key, maximum=1) for key in ("zero", "half", "one")] == [0.0, 0.5, 1.0]
    assert read.nested("nested").integer("x") == 1
    assert [item.integer("x") for item in read.nested_list("nested_list")] == [2]


@pytest.mark.parametrize(
    ("method", "value", "fault"),
    [
        ("text", 1, "k must be text, not 1"),
        ("texts", "a", 'k must be a list, not "a"'),
        ("texts", ["a", None], "k must be text, not null"),
        ("boolean", 1, "k must be true or false, not 1"),
        ("integer", "1", 'k must be a whole number, not "1"'),
        ("integer", 1.0, r"k must be a whole number, not 1\.0"),
        ("integer", True, "k must be a whole number, not true"),
        ("integer", None, "k must be a whole number, not null"),
        ("integer", 0, "k must be from 1 to 2,147,483,647, not 0"),
        ("integer", 2**31, "k must be from 1 to 2,147,483,647, not 2147483648"),
        ("optional_integer", 0, "k must be from 1"),
        ("integers", [1, -1], "k must be from 1"),
        ("integers", {}, r"k must be a list, not \{\}"),
        ("nested", [], r"k must be an object, not \[\]"),
        ("nested_list", [{}, 1], r"k\[1\] must be an object, not 1"),
        ("text", list(range(100)), r"not \[0, 1.{35}\.\.\.$"),
        ("text", "n" * 256, r'k must be text of up to 255 characters, not "n{39}\.\.\.$'),
        ("texts", ["n" * 256], "k must be text of up to 255 characters"),
    ],
)
def test_value_of_another_type_is_refused_by_name(method: str, value: object, fault: str) -> None:
    with pytest.raises(CorruptArtifact, match=fault):
        getattr(fields(k=value), method)("k")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("1", 'k must be a number, not "1"'),
        (True, "k must be a number, not true"),
        (None, "k must be a number, not null"),
        (-0.5, r"k must be from 0 to 1,000, not -0\.5"),
        (1000.5, r"k must be from 0 to 1,000, not 1000\.5"),
        (float("nan"), "k must be from 0 to 1,000, not NaN"),
    ],
)
def test_number_out_of_range_or_of_another_type_is_refused(value: object, fault: str) -> None:
    with pytest.raises(CorruptArtifact, match=fault):
        fields(k=value).number("k", maximum=1000)


@pytest.mark.parametrize(
    "method",
    [
        "text",
        "texts",
        "boolean",
        "integer",
        "optional_integer",
        "integers",
        "nested",
        "nested_list",
    ],
)
def test_missing_key_is_an_error_and_never_a_default(method: str) -> None:
    with pytest.raises(CorruptArtifact, match="k is missing"):
        getattr(fields(), method)("k")


def test_fault_within_a_nested_object_names_the_whole_way() -> None:
    with pytest.raises(CorruptArtifact, match=r"caches\[0\]\.size is missing"):
        fields(caches=[{}]).nested_list("caches")[0].integer("size")


def test_unknown_key_is_refused_as_a_newer_format() -> None:
    fields(a=1).refuse_unknown(("a", "b"))
    with pytest.raises(UnknownFormat, match=r"the key 'x\.c', which this version"):
        fields(x={"c": 1}).nested("x").refuse_unknown(("a", "b"))


def test_duplicate_name_is_refused() -> None:
    fields().refuse_duplicates("k", ["a", "b"])
    with pytest.raises(CorruptArtifact, match="k has 'a' twice"):
        fields().refuse_duplicates("k", ["a", "b", "a"])


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "a\0", "\u202e", "\udc80"])
def test_text_that_a_terminal_would_not_show_as_it_is_is_refused(text: str) -> None:
    with pytest.raises(CorruptArtifact, match="a must be printable text") as caught:
        fields(a=text).text("a")
    with pytest.raises(CorruptArtifact, match="a must be printable text"):
        fields(a=["b", text]).texts("a")
    assert str(caught.value).isprintable()
