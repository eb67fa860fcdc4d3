"""The `.rbln` file of the torch backend."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import cache_metas, dram_of, read_description, write_program
from reblock.artifact.program import read_program, write_resized
from reblock.errors import CorruptArtifact, UnknownFormat

if TYPE_CHECKING:
    from pathlib import Path

METAS = cache_metas(16, is_flash=True, sliding_layers=())
DRAM = dram_of(METAS, 16)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path, "prefill", 16, DRAM, weight=77)


def test_read_program_returns_the_memory_that_the_file_reports(program: Path) -> None:
    read = read_program(str(program))
    assert (read.name, read.kvcache_num_blocks) == ("prefill", 16)
    assert read.memory.alloc == {"Weight": ((77,),), "Workspace": ((50_000,),)}
    assert read.memory.caches["past_key_values_0"] == ((16 * 2**20,),)
    assert read.num_sizes == 2 + len(DRAM)


def test_read_program_finds_the_entry_at_the_top_of_the_archive_too(program: Path) -> None:
    description = read_description(program)
    with zipfile.ZipFile(program, "w") as archive:
        archive.writestr("reblock.json", json.dumps(description))
    assert read_program(str(program)).kvcache_num_blocks == 16


def test_write_resized_changes_the_entry_and_copies_all_others(
    program: Path, tmp_path: Path
) -> None:
    resized = tmp_path / "resized.rbln"
    grids = dict.fromkeys(DRAM, ((1, 2), (3, 4)))
    write_resized(str(program), str(resized), dram=grids, num_blocks=5)

    before, after = read_description(program), read_description(resized)
    assert after == before | {
        "kvcache_num_blocks": 5,
        "dram": {name: [[1, 2], [3, 4]] for name in DRAM},
    }
    assert list(after) == list(before)
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(resized) as new:
        assert old.namelist() == new.namelist()
        for name in old.namelist():
            if not name.endswith("reblock.json"):
                assert old.read(name) == new.read(name)
            assert old.getinfo(name).date_time == new.getinfo(name).date_time
            assert new.getinfo(name).compress_type == zipfile.ZIP_STORED


def test_write_resized_leaves_the_source_as_it_is(program: Path, tmp_path: Path) -> None:
    before = program.read_bytes()
    write_resized(str(program), str(tmp_path / "b"), dram={}, num_blocks=5)
    assert program.read_bytes() == before


def test_write_resized_writes_over_nothing(program: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError):
        write_resized(str(program), str(tmp_path / "there"), dram={}, num_blocks=5)
    assert (tmp_path / "there").read_text() == "mine"


def test_write_resized_finds_damage_in_an_entry_it_only_copies(
    program: Path, tmp_path: Path
) -> None:
    data = bytearray(program.read_bytes())
    with zipfile.ZipFile(program) as archive:
        offset = archive.infolist()[-1].header_offset
    data[offset + 500] ^= 1
    program.write_bytes(data)
    with pytest.raises(CorruptArtifact, match="damaged or cut off"):
        write_resized(str(program), str(tmp_path / "b"), dram={}, num_blocks=5)


@pytest.mark.parametrize("kept", [0, 1, 100, 1_000])
def test_read_program_of_a_cut_off_file_is_refused(program: Path, kept: int) -> None:
    program.write_bytes(program.read_bytes()[:kept])
    with pytest.raises(CorruptArtifact, match="damaged or cut off"):
        read_program(str(program))


def test_read_program_of_an_archive_that_lost_its_beginning_is_refused(program: Path) -> None:
    program.write_bytes(program.read_bytes()[100:])
    with pytest.raises(CorruptArtifact):
        read_program(str(program))


def test_read_program_of_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match=r"absent\.rbln: is missing"):
        read_program(str(tmp_path / "absent.rbln"))


def test_read_program_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="not a regular file"):
        read_program(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 5}, "name must be text"),
        ({"kvcache_num_blocks": 0}, "kvcache_num_blocks must be from 1"),
        ({"kvcache_num_blocks": "16"}, "whole number"),
        ({"alloc": []}, "alloc must be an object"),
        ({"graph": None}, "graph must be an object"),
        ({"dram": {"a": []}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [[]]}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [5]}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [[-1]]}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [[True]]}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [[1.5]]}}, r"dram\.a must be a list of lists"),
        ({"dram": {"a": [[2**63]]}}, r"dram\.a must be a list of lists"),
        ({"format_version": None}, "format_version must be a whole number"),
    ],
)
def test_read_program_with_a_bad_value_names_the_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_program(tmp_path, "prefill", 16, DRAM, changes=changes)
    with pytest.raises(CorruptArtifact, match=message):
        read_program(str(path))


@pytest.mark.parametrize("changes", [{"format_version": 2}, {"compression": "none"}])
def test_read_program_of_a_newer_format_says_to_upgrade(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_program(tmp_path, "prefill", 16, DRAM, changes=changes)
    with pytest.raises(UnknownFormat, match="upgrade reblock"):
        read_program(str(path))


@pytest.mark.parametrize("key", ["format_version", "name", "alloc", "dram", "graph"])
def test_read_program_without_a_key_names_it(program: Path, key: str) -> None:
    description = read_description(program)
    del description[key]
    with zipfile.ZipFile(program, "w") as archive:
        archive.writestr("reblock.json", json.dumps(description))
    with pytest.raises(CorruptArtifact, match=f"{key} is missing"):
        read_program(str(program))


def test_read_program_with_a_compressed_entry_is_refused(program: Path) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("bomb", b"0" * 10_000, compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptArtifact, match="compressed"):
        read_program(str(program))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_read_program_with_one_name_twice_is_refused(program: Path) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("prefill/archive_format", "pt2")
    with pytest.raises(CorruptArtifact, match="the entry 'prefill/archive_format' twice"):
        read_program(str(program))


@pytest.mark.parametrize("names", [(), ("reblock.json", "x/extra/reblock.json")])
def test_read_program_must_hold_one_description(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = tmp_path / "prefill.rbln"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", "")
        for name in names:
            archive.writestr(name, "{}")
    with pytest.raises(CorruptArtifact, match=f"holds {len(names)}"):
        read_program(str(path))


@pytest.mark.parametrize("offset", [2**31, 2**62, 2**63 + 5, 2**64 - 1])
def test_an_entry_that_claims_to_lie_outside_of_the_file_is_damage(
    program: Path, offset: int
) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("more", b"more")  # makes the directory of the archive be written again
        archive.infolist()[0].header_offset = offset
    with pytest.raises(CorruptArtifact, match="damaged or cut off"):
        read_program(str(program))
