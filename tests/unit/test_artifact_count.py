"""The block count, read from the JSON alone."""

from __future__ import annotations

import json
import os
from io import FileIO
from typing import TYPE_CHECKING

import pytest

from artifacts import make_artifact, read_config, write_config
from reblock import config as full_config
from reblock.artifact.count import read_num_blocks
from reblock.errors import BadArtifact, CorruptArtifact, NotAnArtifact, UnknownFormat

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

OPTIMUM_RBLN = os.path.join(os.path.dirname(__file__), "..", "data", "optimum_rbln_0_12")


def test_read_num_blocks_of_an_artifact_returns_its_count(tmp_path: Path) -> None:
    assert read_num_blocks(str(make_artifact(tmp_path / "a", num_blocks=21))) == 21


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [("qwen3_8b_ca25x4", 40), ("qwen3_8b_cr13", 107), ("llama2_7b_flash_ca22", 24)],
)
def test_read_num_blocks_of_an_artifact_of_optimum_rbln_returns_its_count(
    name: str, num_blocks: int
) -> None:
    assert read_num_blocks(os.path.join(OPTIMUM_RBLN, name)) == num_blocks


def test_read_num_blocks_follows_a_link_to_the_artifact(tmp_path: Path) -> None:
    make_artifact(tmp_path / "a", num_blocks=9)
    (tmp_path / "link").symlink_to("a")
    assert read_num_blocks(str(tmp_path / "link")) == 9


def test_read_num_blocks_of_no_directory_names_the_path(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    with pytest.raises(NotAnArtifact, match="file: is not a directory"):
        read_num_blocks(str(file))
    with pytest.raises(NotAnArtifact, match="absent: does not exist"):
        read_num_blocks(str(tmp_path / "absent"))


def test_read_num_blocks_without_a_config_says_that_it_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(NotAnArtifact, match=r"holds no rbln_config\.json"):
        read_num_blocks(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no valid JSON"),
        (b'{"kvcache_num_blocks": 16', "no valid JSON"),
        (b"[16]", "no JSON object"),
        (b"\xff\xfe", "no valid JSON"),
        (b'{"kvcache_num_blocks": NaN}', "NaN"),
        (b'{"kvcache_num_blocks": 4, "kvcache_num_blocks": 5}', "twice"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"{}", "kvcache_num_blocks is missing"),
        (b'{"kvcache_num_blocks": null}', "whole number"),
        (b'{"kvcache_num_blocks": true}', "whole number"),
        (b'{"kvcache_num_blocks": 16.0}', "whole number"),
        (b'{"kvcache_num_blocks": "16"}', "whole number"),
        (b'{"kvcache_num_blocks": 0}', "from 1"),
        (b'{"kvcache_num_blocks": -1}', "from 1"),
        (b'{"kvcache_num_blocks": 2147483648}', "2,147,483,647"),
        (b'{"reblock": 1, "kvcache_num_blocks": 4}', "reblock must be an object"),
        (b'{"reblock": {}, "kvcache_num_blocks": 4}', "format_version is missing"),
    ],
)
def test_read_num_blocks_of_a_bad_config_is_refused_with_its_path(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "rbln_config.json"
    path.write_bytes(content)
    with pytest.raises(CorruptArtifact, match=message) as caught:
        read_num_blocks(str(tmp_path))
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(str(path))


def test_read_num_blocks_of_a_newer_format_says_to_upgrade(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    config = read_config(directory)
    config["reblock"]["format_version"] = 2
    write_config(directory, config)
    with pytest.raises(UnknownFormat, match="upgrade reblock"):
        read_num_blocks(str(directory))


def test_read_num_blocks_of_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rbln_config.json")
    with pytest.raises(BadArtifact, match="not a regular file"):
        read_num_blocks(str(tmp_path))


def test_read_num_blocks_of_a_huge_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "rbln_config.json", "wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(CorruptArtifact, match="larger than"):
        read_num_blocks(str(tmp_path))


def test_read_num_blocks_of_a_file_that_may_not_be_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_artifact(tmp_path / "a")

    def refuse(path: str, mode: str, **keywords: object) -> BinaryIO:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CorruptArtifact, match="cannot be read: Permission denied"):
        read_num_blocks(str(directory))


def test_read_num_blocks_of_a_file_on_a_failing_disk_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingFile(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    directory = make_artifact(tmp_path / "a")
    monkeypatch.setattr("builtins.open", lambda path, mode, **keywords: FailingFile(path))
    with pytest.raises(CorruptArtifact, match="cannot be read: Input/output error"):
        read_num_blocks(str(directory))


def test_the_light_reader_agrees_with_the_full_one(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "a", num_blocks=13) / "rbln_config.json"
    config = full_config.parse_config(path.read_bytes(), path=str(path))
    assert config.kvcache_num_blocks == read_num_blocks(str(path.parent)) == 13
    assert json.loads(config.text) == json.loads(path.read_text())
