"""Whole artifacts: opened, and refused where their files do not agree."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import (
    BYTES_PER_BLOCK,
    NUM_FULL_BLOCKS,
    NUM_MIN_BLOCKS,
    PROGRAMS,
    cache_metas,
    dram_of,
    make_artifact,
    read_config,
    write_config,
    write_program,
)
from reblock.artifact import reader
from reblock.artifact.reader import open_artifact
from reblock.errors import (
    ArtifactMismatch,
    BadArtifact,
    CorruptArtifact,
    MissingDependency,
    UnknownFormat,
)
from reblock.sizing import BlockBounds

if TYPE_CHECKING:
    from pathlib import Path

    from reblock.artifact.reader import Artifact

OPTIMUM_RBLN = os.path.join(os.path.dirname(__file__), "..", "data", "optimum_rbln_0_12")


def test_open_artifact_returns_its_programs_bounds_and_device(tmp_path: Path) -> None:
    artifact = open_artifact(str(make_artifact(tmp_path / "a")))
    assert [program.name for program in artifact.programs] == list(PROGRAMS)
    assert artifact.bounds == BlockBounds(minimum=NUM_MIN_BLOCKS, full=NUM_FULL_BLOCKS)
    assert artifact.device().name == "cpu"


def test_memory_plan_counts_weights_and_caches_once_for_all_programs(tmp_path: Path) -> None:
    plan = open_artifact(str(make_artifact(tmp_path / "a", weight_bytes=77))).memory_plan()
    assert plan.static == {"Weight": ((77,),), "Workspace": ((150_000,),)}
    assert plan.kv_unaligned_bytes_at(16) == ((4 * 16 * BYTES_PER_BLOCK,),)


def test_memory_plan_keeps_sliding_caches_as_they_are(tmp_path: Path) -> None:
    plan = open_artifact(str(make_artifact(tmp_path / "a", sliding_layers=(1,)))).memory_plan()
    window = plan.fixed_cache_bytes[0][0]
    assert plan.kv_unaligned_bytes_at(20) == ((2 * 20 * BYTES_PER_BLOCK + window,),)


def test_open_artifact_of_optimum_rbln_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rebel", None)  # as where it is not installed
    with pytest.raises(MissingDependency, match="Install rebel-compiler") as caught:
        open_artifact(os.path.join(OPTIMUM_RBLN, "qwen3_8b_cr13"))
    assert caught.value.package == "rebel-compiler"


@pytest.mark.parametrize("name", ["prefill.rbln", "decoder_batch_1.rbln", "weights.safetensors"])
def test_open_artifact_with_a_missing_file_names_it(tmp_path: Path, name: str) -> None:
    directory = make_artifact(tmp_path / "a")
    (directory / name).unlink()
    with pytest.raises(CorruptArtifact, match="missing") as caught:
        open_artifact(str(directory))
    assert caught.value.path == str(directory / name)


def test_open_artifact_with_another_count_in_a_program_names_both(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=16)
    metas = cache_metas(16, is_flash=True, sliding_layers=())
    path = write_program(directory, "decoder_batch_1", 20, dram_of(metas, 20))
    with pytest.raises(ArtifactMismatch, match=r"holds 20 blocks.* says 16") as caught:
        open_artifact(str(directory))
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("dram", "message"),
    [
        ({"past_key_values_0": [[1]]}, "holds 1 bytes"),
        ({"past_key_values_9": [[1]]}, "nothing of it"),
    ],
)
def test_open_artifact_with_sizes_that_contradict_the_shapes_is_refused(
    tmp_path: Path, dram: dict[str, Any], message: str
) -> None:
    directory = make_artifact(tmp_path / "a")
    write_program(directory, "prefill", 16, dram)
    with pytest.raises(ArtifactMismatch, match=message):
        open_artifact(str(directory))


def test_open_artifact_with_programs_under_each_others_names_is_refused(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    os.replace(directory / "prefill.rbln", directory / "decoder_batch_1.rbln")
    metas = cache_metas(16, is_flash=True, sliding_layers=())
    write_program(directory, "prefill", 16, dram_of(metas, 16))
    with pytest.raises(ArtifactMismatch, match="holds the program 'prefill'"):
        open_artifact(str(directory))


def test_open_artifact_with_unknown_keys_says_to_upgrade(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", extra_config={"kvcache_dtype": "int8"})
    with pytest.raises(UnknownFormat, match="kvcache_dtype"):
        open_artifact(str(directory))


def test_open_artifact_with_a_program_name_that_leads_out_is_refused(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    config = read_config(directory)
    config["_compile_cfgs"][0]["compiled_model_name"] = "../prefill"
    write_config(directory, config)
    with pytest.raises(BadArtifact):
        open_artifact(str(directory))


def test_device_that_is_not_known_is_a_fault_of_the_artifact(tmp_path: Path) -> None:
    artifact = open_artifact(str(make_artifact(tmp_path / "a", npu="RBLN-XX99")))
    with pytest.raises(CorruptArtifact, match="'RBLN-XX99' is not known") as caught:
        artifact.device()
    assert caught.value.path == str(tmp_path / "a" / "rbln_config.json")


@pytest.mark.parametrize("grid", [[[1, 1]], [[1], [1]]])
def test_open_artifact_for_the_cpu_with_more_than_one_chiplet_is_refused(
    tmp_path: Path, grid: list[list[int]]
) -> None:
    directory = make_artifact(tmp_path / "a")
    path = write_program(directory, "prefill", 16, {}, changes={"alloc": {"Weight": grid}})
    with pytest.raises(ArtifactMismatch, match="reports Weight for") as caught:
        open_artifact(str(directory))
    assert caught.value.path == str(path)


def test_open_artifact_reads_again_where_the_directory_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=16)
    make_artifact(tmp_path / "new", num_blocks=20)
    read = reader.load_programs

    def replace_meanwhile(directory: str, config: Any, *arguments: Any, **keywords: Any) -> Any:
        if config.kvcache_num_blocks == 16:
            os.rename(directory, tmp_path / "old")
            os.rename(tmp_path / "new", directory)
        return read(directory, config, *arguments, **keywords)

    monkeypatch.setattr(reader, "load_programs", replace_meanwhile)
    artifact = open_artifact(str(directory))
    assert artifact.config.kvcache_num_blocks == 20
    assert {program.kvcache_num_blocks for program in artifact.programs} == {20}


def test_open_artifact_that_never_comes_to_rest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_artifact(tmp_path / "a")
    opened: list[Artifact] = []
    read = reader.read_artifact

    def change_meanwhile(path: str, **keywords: Any) -> Artifact:
        os.utime(directory / "rbln_config.json", ns=(len(opened), len(opened)))
        opened.append(read(path, **keywords))
        return opened[-1]

    monkeypatch.setattr(reader, "read_artifact", change_meanwhile)
    monkeypatch.setattr(reader, "PATIENCE_S", 0.05)
    with pytest.raises(CorruptArtifact, match="being changed"):
        open_artifact(str(directory))
    assert len(opened) > 1


def test_open_artifact_reads_again_where_an_edit_is_being_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=16)
    committed = directory / ".reblock-edit" / "committed"
    committed.mkdir(parents=True)
    other = make_artifact(tmp_path / "b", num_blocks=20)
    for name in ("rbln_config.json", *(f"{program}.rbln" for program in PROGRAMS)):
        (other / name).rename(committed / name)
    monkeypatch.setattr(reader, "clean_up_if_possible", lambda directory: None)
    read = reader.load_programs

    def move_meanwhile(directory: str, *arguments: Any, **keywords: Any) -> Any:
        for name in os.listdir(committed):
            os.rename(committed / name, os.path.join(directory, name))
        return read(directory, *arguments, **keywords)

    def move_after_it_was_found(path: str) -> Any:
        if os.path.exists(path) and os.path.dirname(path) == str(committed):
            os.rename(path, directory / os.path.basename(path))
        return read_program(path)

    read_program = reader.read_program
    with monkeypatch.context() as patch:
        patch.setattr(reader, "load_programs", move_meanwhile)
        assert open_artifact(str(directory)).config.kvcache_num_blocks == 20
    for name in ("rbln_config.json", "prefill.rbln"):
        (directory / name).rename(committed / name)
    monkeypatch.setattr(reader, "read_program", move_after_it_was_found)
    assert open_artifact(str(directory)).config.kvcache_num_blocks == 20


def test_programs_that_report_more_sizes_than_are_kept_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_artifact(tmp_path / "a")
    # Three programs of four caches and two other terms.
    monkeypatch.setattr("reblock.artifact.reader._MAX_SIZES", 18)
    assert len(open_artifact(str(directory)).programs) == 3
    monkeypatch.setattr("reblock.artifact.reader._MAX_SIZES", 17)
    with pytest.raises(CorruptArtifact, match="report more than 17 sizes together"):
        open_artifact(str(directory))
