"""Weights are measured by what their files say, and files that say nonsense are refused."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest

from reblock.errors import CorruptArtifact
from reblock.model_spec import WeightBytes, read_weight_bytes
from reblock.model_spec.weights import sum_tensors

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_raw(path: Path, header: bytes, num_bytes: int) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


def write(path: Path, num_bytes: int, **tensors: dict[str, Any]) -> None:
    write_raw(path, json.dumps(tensors).encode(), num_bytes)


def write_halves(path: Path, count: int) -> None:
    """Write a file with one tensor of `count` elements of two bytes."""
    write(path, 2 * count, w=tensor("BF16", [count], 0, 2 * count))


def write_index(directory: Path, total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": {"a": "b"}}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def read(directory: Path) -> WeightBytes | None:
    return read_weight_bytes(str(directory))


def headers(num_bytes: int, num_elements: int | None) -> WeightBytes:
    return WeightBytes(num_bytes=num_bytes, num_elements=num_elements, source="headers")


def test_weights_that_are_not_there_are_what_the_index_states(tmp_path: Path) -> None:
    write_index(tmp_path, 16_060_522_496)
    expected = WeightBytes(num_bytes=16_060_522_496, num_elements=None, source="index")
    assert read(tmp_path) == expected


def test_total_behind_a_long_list_of_weights_is_found(tmp_path: Path) -> None:
    names = {f"model.layers.{i}.weight": "model-00001-of-00002.safetensors" for i in range(9_000)}
    index = {"weight_map": names, "metadata": {"total_parameters": 3, "total_size": 12}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert read(tmp_path) == WeightBytes(num_bytes=12, num_elements=None, source="index")


def test_headers_count_more_than_the_index_where_all_files_are_there(tmp_path: Path) -> None:
    write_index(tmp_path, 999)
    write_halves(tmp_path / "model-00001-of-00002.safetensors", 500)
    write_halves(tmp_path / "model-00002-of-00002.safetensors", 12)
    assert read(tmp_path) == headers(1_024, 512)


def test_index_is_believed_while_a_file_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path, 1_024)
    write_halves(tmp_path / "model-00001-of-00002.safetensors", 500)
    assert read(tmp_path) == WeightBytes(num_bytes=1_024, num_elements=None, source="index")


def test_missing_file_is_refused_where_no_index_says_the_total(tmp_path: Path) -> None:
    write_halves(tmp_path / "model-00001-of-00003.safetensors", 500)
    with pytest.raises(CorruptArtifact, match="2 more are missing; finish the download"):
        read(tmp_path)


def test_copies_of_the_same_weights_are_not_counted(tmp_path: Path) -> None:
    write_halves(tmp_path / "model-00001-of-00002.safetensors", 500)
    write_halves(tmp_path / "model-00002-of-00002.safetensors", 12)
    # In one file, and in the publisher's own format.
    write_halves(tmp_path / "model.safetensors", 512)
    write_halves(tmp_path / "consolidated.safetensors", 512)
    assert read(tmp_path) == headers(1_024, 512)


def test_index_without_a_total_leaves_it_to_the_headers(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    write_halves(tmp_path / "model.safetensors", 7)
    assert read(tmp_path) == headers(14, 7)


def test_elements_are_summed_over_shapes_and_a_scalar_is_one(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors",
        28,
        __metadata__={"format": 'a "}" in a text', "other": "\\"},
        a=tensor("F32", [2, 3], 0, 24),
        b=tensor("F32", [], 24, 28),
    )
    assert read(tmp_path) == headers(28, 7)


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "U32"])
def test_elements_of_packed_weights_are_not_counted(tmp_path: Path, dtype: str) -> None:
    size = 4 if dtype.endswith("32") else 1
    packed = tensor(dtype, [3], 8, 8 + 3 * size)
    write(tmp_path / "model.safetensors", 8 + 3 * size, a=tensor("F32", [2], 0, 8), b=packed)
    assert read(tmp_path) == headers(8 + 3 * size, None)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4_of_the_future"])
def test_elements_of_narrow_floats_are_counted(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "model.safetensors", 6, a=tensor(dtype, [6], 0, 6))
    assert read(tmp_path) == headers(6, 6)


def test_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    # More values than a JSON file of an artifact may have.
    tensors = {f"experts.{i}.weight": tensor("F16", [1], 2 * i, 2 * i + 2) for i in range(25_000)}
    write(tmp_path / "model.safetensors", 50_000, **tensors)
    assert read(tmp_path) == headers(50_000, 25_000)


def test_header_may_have_space_around_it_and_no_tensors(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", b"{ }   ", 0)
    assert read(tmp_path) == headers(0, 0)
    text = json.dumps({"a": tensor("F16", [1], 0, 2)}, indent=1).encode()
    write_raw(tmp_path / "model.safetensors", b" " + text + b"   ", 2)
    assert read(tmp_path) == headers(2, 1)


def test_pickled_weights_are_the_size_of_their_files_and_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    (tmp_path / "training_args.bin").write_bytes(bytes(100))
    weights = read(tmp_path)
    assert weights == WeightBytes(num_bytes=100, num_elements=None, source="bin")
    assert not weights.is_exact


def test_directory_without_weights_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert read(tmp_path / "absent") is None


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 2**40) + b"{}"])
def test_file_that_is_cut_off_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptArtifact, match="safetensors file"):
        read(tmp_path)


@pytest.mark.parametrize(("num_bytes", "what"), [(9, "less"), (11, "more")])
def test_file_of_another_size_than_its_tensors_is_refused(
    tmp_path: Path, num_bytes: int, what: str
) -> None:
    write(tmp_path / "model.safetensors", num_bytes, a=tensor("F16", [5], 0, 10))
    with pytest.raises(CorruptArtifact, match=f"has 1 bytes {what} than its tensors"):
        read(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "F16", "shape": [1]},
        {"dtype": 16, "shape": [1], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": 1, "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [1], "data_offsets": [2]},
        {"dtype": "F16", "shape": [1], "data_offsets": [2, 0]},
        {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [1.0], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [True], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [2**63], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [7], "data_offsets": [0, 2]},
        {"dtype": "F9", "shape": [1] * 65, "data_offsets": [0, 2]},
        {"dtype": "F16" * 2_000, "shape": [1], "data_offsets": [0, 2]},
    ],
)
def test_tensor_that_makes_no_sense_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    write(tmp_path / "model.safetensors", 2, a=values)
    with pytest.raises(CorruptArtifact, match="a tensor that makes no sense"):
        read(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'x{"a":{}}',
        b'{"a"',
        b'{"a":{}',
        b'{"a":{"b":{}}}',
        b'{"a":1}',
        b'{"__metadata__":{}}}',
        b'{"a":{"shape":' + b"[" * 3_000 + b"}}",
        b'{"a":{"\xff":1}}',
    ],
)
def test_header_that_is_no_list_of_tensors_is_refused(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header, 0)
    with pytest.raises(CorruptArtifact, match=r"a header|makes no sense"):
        read(tmp_path)


def test_pipe_and_broken_link_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(CorruptArtifact, match="is not a regular file"):
        read(tmp_path)
    path.unlink()
    path.symlink_to("absent")
    with pytest.raises(CorruptArtifact, match="cannot be read: No such file"):
        read(tmp_path)


def test_link_to_the_weights_is_followed(tmp_path: Path) -> None:
    write_halves(tmp_path / "blob", 3)
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert read(tmp_path) == headers(6, 3)


def test_sum_of_no_tensors_is_nothing() -> None:
    assert sum_tensors([]) == headers(0, 0)
