"""Digests of files and programs: what they cover, and what they leave out."""

from __future__ import annotations

import hashlib
import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import cache_metas, dram_of, read_description, write_program
from reblock.artifact.checksum import check_digest, copy_digested, file_digest, program_digest
from reblock.artifact.program import write_resized
from reblock.errors import CorruptArtifact

if TYPE_CHECKING:
    from pathlib import Path

METAS = cache_metas(16, is_flash=True, sliding_layers=())
DRAM = dram_of(METAS, 16)
DESCRIPTION: dict[str, Any] = {
    "format_version": 1,
    "name": "prefill",
    "kvcache_num_blocks": 1,
    "alloc": {"Weight": [[7]]},
    "dram": {"kv": [[4]]},
    "graph": {"layers": [{"piece": "layer_0"}]},
}
ENTRIES = {"p/archive_format": "pt2", "p/data/aotinductor/layer_0/code.so": "\x7fELF"}


def write_archive(
    path: Path, entries: dict[str, str] = ENTRIES, description: dict[str, Any] = DESCRIPTION
) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr("p/extra/reblock.json", json.dumps(description))
    return str(path)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path, "prefill", 16, DRAM, weight=77)


def test_the_digest_of_a_program_is_what_its_description_says(tmp_path: Path) -> None:
    expected = b""
    for name, content in ENTRIES.items():
        expected += len(name).to_bytes(8, "big") + name.encode()
        expected += len(content).to_bytes(8, "big") + content.encode()
    described = (
        b'{"alloc":{"Weight":[[7]]},"format_version":1,'
        b'"graph":{"layers":[{"piece":"layer_0"}]},"name":"prefill"}'
    )
    expected += bytes(8) + len(described).to_bytes(8, "big") + described
    found = program_digest(write_archive(tmp_path / "p.rbln"))
    assert found == hashlib.sha256(expected).hexdigest()


def test_the_digest_of_a_program_is_the_same_at_every_block_count(
    program: Path, tmp_path: Path
) -> None:
    before = program_digest(str(program))
    write_resized(
        str(program), str(tmp_path / "b"), dram=dict.fromkeys(DRAM, ((5,),)), num_blocks=5
    )
    write_resized(str(tmp_path / "b"), str(tmp_path / "c"), dram={}, num_blocks=2**31 - 1)
    assert read_description(tmp_path / "b") != read_description(program)
    assert program_digest(str(tmp_path / "b")) == before
    assert program_digest(str(tmp_path / "c")) == before


def test_where_the_description_stands_and_how_it_is_laid_out_does_not_matter(
    tmp_path: Path,
) -> None:
    first = program_digest(write_archive(tmp_path / "a.rbln"))
    path = tmp_path / "b.rbln"
    with zipfile.ZipFile(path, "w") as archive:
        reordered = dict(reversed(DESCRIPTION.items()))
        archive.writestr("p/extra/reblock.json", json.dumps(reordered, indent=4))
        for name, content in ENTRIES.items():
            archive.writestr(name, content)
    assert program_digest(str(path)) == first


@pytest.mark.parametrize(
    "entries",
    [
        {**ENTRIES, "p/archive_format": "pt3"},
        {**ENTRIES, "p/data/aotinductor/layer_0/code.so": "\x7fELG"},
        {**ENTRIES, "p/more": ""},
        {"p/archive_format": "pt2"},
        dict(reversed(ENTRIES.items())),
        {"p/archive_formatpt2": "", "p/data/aotinductor/layer_0/code.so": "\x7fELF"},
        {"p/archive_format": "pt", "2p/data/aotinductor/layer_0/code.so": "\x7fELF"},
    ],
)
def test_every_entry_counts_with_its_name_its_content_and_its_place(
    tmp_path: Path, entries: dict[str, str]
) -> None:
    whole = program_digest(write_archive(tmp_path / "a.rbln"))
    assert program_digest(write_archive(tmp_path / "b.rbln", entries)) != whole


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "decoder_batch_4"},
        {"alloc": {"Weight": [[8]]}},
        {"graph": {"layers": [{"piece": "layer_1"}]}},
        {"graph": {"layers": []}},
    ],
)
def test_the_description_counts_but_for_what_a_resize_changes(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = program_digest(write_archive(tmp_path / "a.rbln"))
    changed = write_archive(tmp_path / "b.rbln", description=DESCRIPTION | changes)
    assert program_digest(changed) != whole


def test_what_is_copied_is_what_was_digested(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.rbln")
    seen = []

    def place(name: str) -> str | None:
        seen.append(name)
        return str(tmp_path / "copy") if name.endswith(".so") else None

    digested = copy_digested(path, place)
    assert digested.sha256 == program_digest(path)
    assert digested.graph == DESCRIPTION["graph"]
    assert seen == list(ENTRIES)
    assert (tmp_path / "copy").read_text() == "\x7fELF"


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.rbln")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError):
        copy_digested(path, lambda _name: str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "mine"


def test_damage_in_any_entry_is_found(program: Path) -> None:
    data = bytearray(program.read_bytes())
    data[data.index(b"code.so") + 200] ^= 1
    program.write_bytes(data)
    with pytest.raises(CorruptArtifact, match="damaged or cut off"):
        program_digest(str(program))


@pytest.mark.parametrize("kept", [0, 100, 2_000])
def test_a_program_that_is_cut_off_has_no_digest(program: Path, kept: int) -> None:
    program.write_bytes(program.read_bytes()[:kept])
    with pytest.raises(CorruptArtifact, match="damaged or cut off"):
        program_digest(str(program))


def test_a_compressed_entry_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.rbln"
    write_archive(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("p/bomb", b"0" * 1_000_000, compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptArtifact, match="compressed"):
        program_digest(str(path))


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 1, 3 * 2**20 + 17])
def test_the_digest_of_a_file_is_its_sha256_and_all_bytes_are_told(
    tmp_path: Path, num_bytes: int
) -> None:
    content = bytes(index % 251 for index in range(1000)) * (num_bytes // 1000 + 1)
    path = tmp_path / "weights"
    path.write_bytes(content[:num_bytes])
    told: list[int] = []
    assert file_digest(str(path), told.append) == hashlib.sha256(content[:num_bytes]).hexdigest()
    assert sum(told) == num_bytes
    assert file_digest(str(path)) == file_digest(str(path), told.append)


def test_only_a_regular_file_has_a_digest(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="is missing"):
        file_digest(str(tmp_path / "absent"))
    with pytest.raises(CorruptArtifact, match="not a regular file"):
        file_digest(str(tmp_path))


def test_a_digest_that_differs_is_named_with_the_one_it_should_be() -> None:
    check_digest("aa", "aa", path="/a/prefill.rbln")
    with pytest.raises(CorruptArtifact) as caught:
        check_digest("aa", "bb", path="/a/prefill.rbln")
    assert str(caught.value) == (
        "/a/prefill.rbln: its content is not what was compiled: its sha256 is aa and should be bb; "
        "restore the file, or compile the model again"
    )
