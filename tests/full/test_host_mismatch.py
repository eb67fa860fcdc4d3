"""An artifact that this machine cannot run, or that is damaged, is refused with exit code 4."""

from __future__ import annotations

import json
import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from installed import reblock, refused, snapshot

from reblock.artifact.checksum import program_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.full


def pretend(artifact: Path, **changes: Any) -> None:
    """Let the artifact say that it was compiled elsewhere."""
    path = artifact / "rbln_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["reblock"] |= changes
    path.write_text(json.dumps(config), encoding="utf-8")


def describe_again(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let the graph of every program be another, and be the one that was compiled."""
    digests = {}
    for path in sorted(artifact.glob("*.rbln")):
        with zipfile.ZipFile(path) as archive:
            entries = [(info, archive.read(info)) for info in archive.infolist()]
        with zipfile.ZipFile(path, "w") as archive:
            for info, content in entries:
                if info.filename.endswith("/extra/reblock.json"):
                    description = json.loads(content)
                    change(description["graph"])
                    content = json.dumps(description).encode()
                archive.writestr(info, content)
        digests[path.stem] = {"sha256": program_digest(str(path))}
    pretend(artifact, programs=digests)


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def answer(artifact: Path) -> Any:
    return reblock("generate", artifact, "--prompt", "x", "--max-new-tokens", 2)


def test_another_torch_is_refused_and_named(artifact: Path) -> None:
    pretend(artifact, torch_version="2.0.1+cpu")
    before = snapshot(artifact)
    refused(answer(artifact), 4, artifact, "torch 2.0.1+cpu", "install torch==2.0.1")
    # What needs no torch still works, whichever is installed.
    assert reblock("get", artifact).stdout == "64\n"
    assert snapshot(artifact) == before
    assert reblock("set", artifact, 20).returncode == 0
    assert reblock("get", artifact).stdout == "20\n"


def test_a_higher_instruction_set_is_refused_and_named(artifact: Path) -> None:
    pretend(artifact, isa="x86-64-v9")
    refused(answer(artifact), 4, artifact, "x86-64-v9")


def test_programs_that_do_not_say_how_many_tokens_they_know_are_refused(artifact: Path) -> None:
    describe_again(artifact, lambda graph: graph.pop("vocab_size"))
    refused(answer(artifact), 4, "compile the model again")


def test_a_number_of_tokens_that_is_none_is_damage(artifact: Path) -> None:
    describe_again(artifact, lambda graph: graph.update(vocab_size=0))
    refused(answer(artifact), 4, "its description of the compiled graph cannot be read")


def test_programs_that_know_different_tokens_are_refused(artifact: Path) -> None:
    describe_again(artifact, lambda graph: graph.update(vocab_size=300 + graph["batch"]))
    refused(answer(artifact), 4, artifact, "know different numbers of tokens, [301, 304]")


def test_a_token_beyond_the_table_of_embeddings_is_refused_before_anything_runs(
    artifact: Path,
) -> None:
    describe_again(artifact, lambda graph: graph.update(vocab_size=10))
    refused(answer(artifact), 2, "but the model knows those from 0 to 9")


def test_truncated_weights_are_refused(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    cut(path, 100)
    refused(answer(artifact), 4, path)


def test_missing_weights_are_refused_by_every_command_that_opens_the_artifact(
    artifact: Path,
) -> None:
    path = artifact / "weights.safetensors"
    path.unlink()
    for command in (("generate", artifact, "--prompt", "x"), ("set", artifact, 20)):
        refused(reblock(*command), 4, path)


@pytest.mark.parametrize("num_bytes", [1, 10_000, 1_000_000])
def test_a_truncated_program_is_refused_and_set_writes_nothing(
    num_bytes: int, artifact: Path
) -> None:
    path = artifact / "decoder_batch_4.rbln"
    cut(path, min(num_bytes, path.stat().st_size - 1))
    before = snapshot(artifact)
    for command in (("generate", artifact, "--prompt", "x"), ("set", artifact, 20)):
        refused(reblock(*command), 4, path)
    assert snapshot(artifact) == before


def test_a_program_of_another_count_is_refused_with_both(artifact: Path) -> None:
    copy = artifact.parent / "other"
    assert reblock("set", artifact, 20, "--output-dir", copy).returncode == 0
    (copy / "prefill.rbln").replace(artifact / "prefill.rbln")
    for command in (("generate", artifact, "--prompt", "x"), ("set", artifact, 20)):
        refused(reblock(*command), 4, artifact / "prefill.rbln", "20 blocks", "64")


def test_damage_inside_compiled_code_is_refused(artifact: Path) -> None:
    path = artifact / "prefill.rbln"
    content = bytearray(path.read_bytes())
    start = content.index(b"\x7fELF")
    content[start : start + 64] = bytes(64)
    path.write_bytes(content)
    refused(answer(artifact), 4, path)
