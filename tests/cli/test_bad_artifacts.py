"""Every way in which an artifact can be bad: a clear error, the exit code, and nothing changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, reblock, reblock_here

from artifacts import (
    cache_metas,
    dram_of,
    fingerprint,
    make_artifact,
    read_config,
    write_config,
    write_program,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def no_config(directory: Path) -> None:
    (directory / "rbln_config.json").unlink()


def config_cut_off(directory: Path) -> None:
    path = directory / "rbln_config.json"
    path.write_bytes(path.read_bytes()[:-50])


def config_of_a_newer_format(directory: Path) -> None:
    config = read_config(directory)
    config["reblock"]["format_version"] = 2
    write_config(directory, config)


def config_with_unknown_keys(directory: Path) -> None:
    write_config(directory, read_config(directory) | {"kvcache_layout": "nhd"})


def config_with_a_count_of_text(directory: Path) -> None:
    write_config(directory, read_config(directory) | {"kvcache_num_blocks": "16"})


def config_with_another_count(directory: Path) -> None:
    write_config(directory, read_config(directory) | {"kvcache_num_blocks": 20})


def program_missing(directory: Path) -> None:
    (directory / "decoder_batch_4.rbln").unlink()


def program_cut_off(directory: Path) -> None:
    path = directory / "decoder_batch_4.rbln"
    path.write_bytes(path.read_bytes()[:-30])


def program_empty(directory: Path) -> None:
    (directory / "decoder_batch_4.rbln").write_bytes(b"")


def program_with_another_count(directory: Path) -> None:
    metas = cache_metas(20, is_flash=True, sliding_layers=())
    write_program(directory, "decoder_batch_4", 20, dram_of(metas, 20))


def program_with_other_sizes(directory: Path) -> None:
    metas = cache_metas(20, is_flash=True, sliding_layers=())
    write_program(directory, "decoder_batch_4", 16, dram_of(metas, 20))


def program_is_a_pipe(directory: Path) -> None:
    program_missing(directory)
    os.mkfifo(directory / "decoder_batch_4.rbln")


def weights_missing(directory: Path) -> None:
    (directory / "weights.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (no_config, ["holds no rbln_config.json"]),
        (config_cut_off, ["rbln_config.json: ", "no valid JSON"]),
        (config_of_a_newer_format, ["rbln_config.json: ", "format_version 2", "upgrade reblock"]),
        (config_with_unknown_keys, ["rbln_config.json: ", "'kvcache_layout'"]),
        (config_with_a_count_of_text, ["rbln_config.json: ", "kvcache_num_blocks"]),
        (config_with_another_count, ["prefill.rbln: ", "holds 16 blocks", "says 20"]),
        (program_missing, ["decoder_batch_4.rbln: ", "missing"]),
        (program_cut_off, ["decoder_batch_4.rbln: ", "damaged or cut off"]),
        (program_empty, ["decoder_batch_4.rbln: ", "damaged or cut off"]),
        (program_with_another_count, ["decoder_batch_4.rbln: ", "holds 20 blocks", "says 16"]),
        (program_with_other_sizes, ["decoder_batch_4.rbln: ", "20,971,520", "16,777,216"]),
        (program_is_a_pipe, ["decoder_batch_4.rbln: ", "not a regular file"]),
        (weights_missing, ["weights.safetensors: ", "missing"]),
    ],
)
def test_set_of_a_bad_artifact_exits_with_4_and_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], fragments: list[str]
) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=16)
    damage(directory)
    before = fingerprint_of_files(tmp_path)
    for target in (["24"], ["--memory-budget", "50%"], ["24", "--output-dir", tmp_path / "out"]):
        assert_refused(reblock_here("set", directory, *target), 4, *fragments)
    assert_refused(reblock_here("inspect", directory), 4, *fragments)
    assert fingerprint_of_files(tmp_path) == before


def fingerprint_of_files(directory: Path) -> dict[str, object]:
    """Return the fingerprint of a directory that may hold a pipe, which cannot be read."""
    pipes = [path for path in directory.rglob("*") if path.is_fifo()]
    for path in pipes:
        path.unlink()
    found: dict[str, object] = dict(fingerprint(directory))
    for path in pipes:
        os.mkfifo(path)
        found[str(path)] = "pipe"
    return found


def test_set_of_no_directory_exits_with_4(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    assert_refused(reblock("set", tmp_path / "file", "20"), 4, "is not a directory")
    assert_refused(reblock("set", tmp_path / "absent", "20"), 4, "does not exist")
    assert (tmp_path / "file").read_text() == "{}"
