"""What `verify_artifact` finds: every fault in its own check, and the others told all the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from reference_plans import ALL, DATA

from artifacts import (
    cache_metas,
    dram_of,
    make_artifact,
    read_config,
    read_description,
    record_checksums,
    write_config,
    write_program,
)
from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from reblock.artifact.verify import Check, Outcome, Verification, verify_artifact
from reblock.errors import NotAnArtifact
from reblock.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = [
    "configuration",
    "programs",
    "memory plan",
    "program checksums",
    "weights size",
    "weights checksum",
    "previous count",
    "memory",
]
LOADED = Check(name="memory", outcome="passed", detail="as planned")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "a", num_blocks=16)


def load_nothing(directory: str) -> Check:
    raise AssertionError(f"{directory} was loaded")


def verify(
    directory: Path | str,
    *,
    is_quick: bool = False,
    check_memory: Callable[[str], Check] = lambda _directory: LOADED,
) -> Verification:
    return verify_artifact(
        str(directory), is_quick=is_quick, check_memory=check_memory, progress=SilentProgress()
    )


def outcomes(found: Verification) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in found.checks}


def failures(found: Verification) -> dict[str, str]:
    return {check.name: check.detail for check in found.checks if check.outcome == "failed"}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, entry: str, change: Callable[[bytes], bytes]) -> None:
    """Change one entry of an archive that stays whole, as somebody would who wants it unnoticed."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert sum(name.endswith(entry) for name in entries) == 1
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, change(content) if name.endswith(entry) else content)


def test_a_whole_artifact_passes_every_check_in_order(directory: Path) -> None:
    found = verify(directory)
    assert [check.name for check in found.checks] == NAMES
    assert set(outcomes(found).values()) == {"passed"}
    assert (found.is_ok, found.num_blocks, found.is_quick) == (True, 16, False)
    assert found.directory == str(directory)
    assert all(check.detail for check in found.checks)


def test_the_artifact_is_loaded_from_its_directory_when_all_else_passed(directory: Path) -> None:
    loaded: list[str] = []

    def fail(path: str) -> Check:
        loaded.append(path)
        return Check(name="memory", outcome="failed", detail="too much")

    found = verify(directory, check_memory=fail)
    assert loaded == [str(directory)]
    assert failures(found) == {"memory": "too much"}
    assert not found.is_ok


def test_a_resized_artifact_passes_with_the_checksums_of_its_compilation(directory: Path) -> None:
    before = read_config(directory)["reblock"]
    for num_blocks in (24, 9, 16):
        artifact = open_artifact(str(directory))
        apply_resize(artifact, plan_resize(artifact, num_blocks))
        found = verify(directory)
        assert failures(found) == {}
        assert found.num_blocks == num_blocks
    assert read_config(directory)["reblock"] == before


def test_a_flipped_bit_in_the_weights_is_found_and_nothing_is_loaded(directory: Path) -> None:
    path = directory / "weights.safetensors"
    flip(path, 5_000)
    found = verify(directory, check_memory=load_nothing)
    (fault,) = failures(found).values()
    assert outcomes(found)["weights checksum"] == "failed"
    assert fault.startswith(f"{path}: its content is not what was compiled")
    assert outcomes(found)["memory"] == "skipped"


def test_a_quick_check_does_not_read_the_weights_and_loads_nothing(directory: Path) -> None:
    flip(directory / "weights.safetensors", 5_000)
    found = verify(directory, is_quick=True, check_memory=load_nothing)
    assert found.is_ok
    skipped = [check.name for check in found.checks if check.outcome == "skipped"]
    assert skipped == ["weights checksum", "memory"]


def test_a_quick_check_still_finds_weights_of_another_size(directory: Path) -> None:
    path = directory / "weights.safetensors"
    os.truncate(path, 16_383)
    assert failures(verify(directory, is_quick=True)) == {
        "weights size": f"{path}: holds 16,383 bytes, not the 16,384 it should"
    }


def test_weights_of_another_size_are_not_read(directory: Path) -> None:
    os.truncate(directory / "weights.safetensors", 2**40)
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["weights size"]
    assert outcomes(found)["weights checksum"] == "skipped"


def test_missing_weights_are_one_fault_and_all_else_is_checked(directory: Path) -> None:
    (directory / "weights.safetensors").unlink()
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["weights size"]
    assert "the file of weights is missing" in failures(found)["weights size"]
    passed = [check.name for check in found.checks if check.outcome == "passed"]
    assert passed == [*NAMES[:4], "previous count"]


def test_weights_that_are_a_directory_are_a_fault(directory: Path) -> None:
    (directory / "weights.safetensors").unlink()
    (directory / "weights.safetensors").mkdir()
    assert "is not a regular file" in failures(verify(directory))["weights size"]


def test_a_flipped_bit_in_compiled_code_is_found(directory: Path) -> None:
    path = directory / "decoder_batch_4.rbln"
    flip(path, path.read_bytes().index(b"code.so") + 1_000)
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["program checksums"]
    assert str(path) in failures(found)["program checksums"]


def test_compiled_code_that_was_replaced_in_a_whole_archive_is_found(directory: Path) -> None:
    path = directory / "decoder_batch_4.rbln"
    rewrite(path, "code.so", lambda code: code[:-1] + b"!!")
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["program checksums"]
    assert f"{path}: its content is not what was compiled" in failures(found)["program checksums"]
    assert "prefill.rbln" not in failures(found)["program checksums"]


def test_a_graph_that_was_replaced_is_found(directory: Path) -> None:
    rewrite(directory / "prefill.rbln", "reblock.json", lambda text: text.replace(b"128", b"256"))
    assert read_description(directory / "prefill.rbln")["graph"]["inputs"][1] == {"shape": [1, 256]}
    assert list(failures(verify(directory))) == ["program checksums"]


def test_a_program_that_is_cut_off_is_found_and_the_others_are_checked(directory: Path) -> None:
    cut, replaced = directory / "prefill.rbln", directory / "decoder_batch_1.rbln"
    os.truncate(cut, 1_500)
    rewrite(replaced, "code.so", lambda _code: b"")
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["programs", "program checksums"]
    assert str(cut) in failures(found)["programs"]
    assert str(replaced) not in failures(found)["programs"]
    assert str(cut) in failures(found)["program checksums"]
    assert str(replaced) in failures(found)["program checksums"]
    assert outcomes(found)["memory plan"] == "skipped"
    assert outcomes(found)["weights checksum"] == "passed"


def test_missing_programs_are_all_named(directory: Path) -> None:
    for name in ("prefill", "decoder_batch_1"):
        (directory / f"{name}.rbln").unlink()
    fault = failures(verify(directory))["programs"]
    assert "prefill.rbln: is missing" in fault
    assert "decoder_batch_1.rbln: is missing" in fault
    assert "decoder_batch_4" not in fault


def test_a_program_of_another_count_is_named_and_its_checksum_is_still_right(
    directory: Path, tmp_path: Path
) -> None:
    artifact = open_artifact(str(directory))
    apply_resize(artifact, plan_resize(artifact, 24), str(tmp_path / "b"))
    shutil.copy(tmp_path / "b" / "prefill.rbln", directory)
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["programs"]
    assert "prefill.rbln: holds 24 blocks" in failures(found)["programs"]


def test_programs_that_do_not_go_together_have_no_memory_plan(directory: Path) -> None:
    metas = cache_metas(16, is_flash=True, sliding_layers=())
    dram = dict(list(dram_of(metas, 16).items())[:-1])
    for name in ("prefill", "decoder_batch_4", "decoder_batch_1"):
        write_program(directory, name, 16, dram)
    record_checksums(directory)
    found = verify(directory, check_memory=load_nothing)
    assert failures(found) == {
        "memory plan": f"{directory}: cache 'past_key_values_3' is named by rbln_config.json alone"
    }


def test_a_device_that_nobody_knows_is_a_fault_of_the_memory_plan(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", npu="RBLN-CA99")
    assert list(failures(verify(directory))) == ["memory plan"]


def test_a_configuration_that_cannot_be_read_leaves_nothing_to_compare(directory: Path) -> None:
    os.truncate(directory / "rbln_config.json", 300)
    found = verify(directory, check_memory=load_nothing)
    assert list(failures(found)) == ["configuration"]
    assert "rbln_config.json: is no valid JSON" in failures(found)["configuration"]
    assert found.num_blocks is None
    assert outcomes(found) == {
        **dict.fromkeys(NAMES, "skipped"),
        "configuration": "failed",
        "previous count": "passed",
    }


def test_a_checksum_that_was_changed_is_found(directory: Path) -> None:
    config = read_config(directory)
    config["reblock"]["programs"]["prefill"]["sha256"] = "0" * 64
    config["reblock"]["weights"]["weights.safetensors"]["sha256"] = "1" * 64
    write_config(directory, config)
    found = failures(verify(directory))
    assert list(found) == ["program checksums", "weights checksum"]
    assert f"should be {'0' * 64}" in found["program checksums"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is no valid JSON"),
        ("[]", "is no JSON object"),
        ('{"format_version": 1}', "previous_kvcache_num_blocks is missing"),
        ('{"format_version": 2, "previous_kvcache_num_blocks": 4}', "upgrade reblock"),
        ('{"format_version": 1, "previous_kvcache_num_blocks": 0}', "must be from 1"),
        ('{"format_version": 1, "previous_kvcache_num_blocks": true}', "must be a whole number"),
    ],
)
def test_a_previous_count_that_is_none_is_found(directory: Path, text: str, fault: str) -> None:
    (directory / ".reblock.json").write_text(text)
    found = failures(verify(directory))
    assert list(found) == ["previous count"]
    assert fault in found["previous count"]


def test_a_previous_count_is_told(directory: Path) -> None:
    content = {"format_version": 1, "previous_kvcache_num_blocks": 4_000}
    (directory / ".reblock.json").write_text(json.dumps(content))
    (check,) = [check for check in verify(directory).checks if check.name == "previous count"]
    assert (check.outcome, check.detail) == ("passed", "4,000 blocks")


@pytest.mark.parametrize("name", ALL)
def test_of_an_artifact_of_optimum_rbln_what_takes_its_compiler_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rebel", None)  # as where it is not installed
    found = verify(os.path.join(DATA, name), check_memory=load_nothing)
    assert found.is_ok
    assert found.num_blocks is not None
    assert outcomes(found) == {
        **dict.fromkeys(NAMES, "skipped"),
        "configuration": "passed",
        "previous count": "passed",
    }
    details = {check.name: check.detail for check in found.checks}
    assert "Install rebel-compiler" in details["programs"]
    assert "RBLN device" in details["memory"]


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAnArtifact, match="does not exist"):
        verify(tmp_path / "absent")
    with pytest.raises(NotAnArtifact, match="holds no"):
        verify(tmp_path)
