"""A compiled artifact is verified in full, and code that was altered is never loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from installed import reblock, refused

from reblock.artifact.checksum import program_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from installed import Compiled

pytestmark = pytest.mark.full


def verify(directory: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code of `reblock verify --json` and every check by its name."""
    result = reblock("verify", directory, "--json", *options)
    assert result.stdout, result.stderr
    return result.returncode, {
        check["name"]: check for check in json.loads(result.stdout)["checks"]
    }


def rewrite(path: Path, is_wanted: Callable[[str], bool], change: Callable[[bytes], bytes]) -> None:
    """Change entries of an archive, which stays whole."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert any(map(is_wanted, entries))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, change(content) if is_wanted(name) else content)


def pretend(artifact: Path, **changes: Any) -> None:
    """Let the artifact say something else about its compilation."""
    path = artifact / "rbln_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["reblock"] |= changes
    path.write_text(json.dumps(config), encoding="utf-8")


def record_programs(artifact: Path) -> None:
    """Let the artifact say that its programs are as they were compiled."""
    digests = {path.stem: {"sha256": program_digest(str(path))} for path in artifact.glob("*.rbln")}
    pretend(artifact, programs=digests)


def library(path: Path, action: str) -> bytes:
    """Return a shared library that does something when it is loaded."""
    path.with_suffix(".cpp").write_text(
        "#include <cstdlib>\n#include <cstdio>\n"
        f"__attribute__((constructor)) static void start() {{ {action} }}\n"
    )
    command = ["g++", "-shared", "-fPIC", "-o", str(path), str(path.with_suffix(".cpp"))]
    subprocess.run(command, check=True)
    return path.read_bytes()


def test_what_was_compiled_takes_exactly_the_memory_of_its_plan(compiled: Compiled) -> None:
    code, checks = verify(compiled.artifact)
    assert {name: check["outcome"] for name, check in checks.items()} == dict.fromkeys(
        (
            "configuration",
            "programs",
            "memory plan",
            "program checksums",
            "weights size",
            "weights checksum",
            "previous count",
            "memory",
        ),
        "passed",
    )
    assert code == 0
    assert "KV cache" in checks["memory"]["detail"]


@pytest.mark.parametrize("num_blocks", [17, 128])
def test_what_was_resized_takes_the_memory_of_its_new_plan(num_blocks: int, artifact: Path) -> None:
    assert reblock("set", artifact, num_blocks).returncode == 0
    code, checks = verify(artifact)
    assert {check["outcome"] for check in checks.values()} == {"passed"}, checks
    assert code == 0
    assert checks["previous count"]["detail"] == "64 blocks"


def test_a_bit_of_the_weights_that_changed_is_found_where_they_are_read(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1_000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert verify(artifact, "--quick")[0] == 0
    code, checks = verify(artifact)
    assert code == 4
    assert str(path) in checks["weights checksum"]["detail"]
    assert checks["memory"]["outcome"] == "skipped"


def test_altered_code_is_refused_before_any_of_it_runs(artifact: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    altered = library(tmp_path / "altered.so", f'fclose(fopen("{ran}", "w"));')
    rewrite(artifact / "decoder_batch_4.rbln", lambda name: name.endswith(".so"), lambda _: altered)
    answer = reblock("generate", artifact, "--prompt", "x", "--max-new-tokens", 2)
    path = artifact / "decoder_batch_4.rbln"
    refused(answer, 4, path, "its content is not what was compiled", "sha256")
    assert verify(artifact)[0] == 4
    assert not ran.exists()
    # It would have run, had it been loaded.
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "altered.so"], check=True)
    assert ran.exists()


def test_an_altered_graph_is_refused(artifact: Path) -> None:
    def swap_keys_and_values(text: bytes) -> bytes:
        description = json.loads(text)
        description["graph"]["layers"][0]["caches"].reverse()
        return json.dumps(description).encode()

    path = artifact / "prefill.rbln"
    rewrite(path, lambda name: name.endswith("reblock.json"), swap_keys_and_values)
    answer = reblock("generate", artifact, "--prompt", "x", "--max-new-tokens", 2)
    refused(answer, 4, path, "its content is not what was compiled")


def test_a_plan_that_does_not_say_what_the_weights_take_is_found(artifact: Path) -> None:
    def say_more(text: bytes) -> bytes:
        description = json.loads(text)
        description["alloc"]["Weight"][0][0] += 4096
        return json.dumps(description).encode()

    rewrite(artifact / "prefill.rbln", lambda name: name.endswith("reblock.json"), say_more)
    record_programs(artifact)
    code, checks = verify(artifact)
    assert code == 4
    assert [name for name, check in checks.items() if check["outcome"] == "failed"] == ["memory"]
    assert checks["memory"]["detail"].startswith("the weights: ")


def test_code_that_crashes_fails_its_check_and_not_the_command(
    artifact: Path, tmp_path: Path
) -> None:
    crashing = library(tmp_path / "crashing.so", "abort();")
    rewrite(artifact / "prefill.rbln", lambda name: name.endswith(".so"), lambda _: crashing)
    record_programs(artifact)
    code, checks = verify(artifact)
    assert code == 4
    assert checks["memory"]["outcome"] == "failed"
    assert "SIGABRT" in checks["memory"]["detail"]


def test_what_was_compiled_for_another_machine_is_checked_but_not_loaded(artifact: Path) -> None:
    pretend(artifact, isa="x86-64-v9")
    code, checks = verify(artifact)
    assert code == 0
    assert checks["memory"]["outcome"] == "skipped"
    assert "x86-64-v9" in checks["memory"]["detail"]
    assert checks["weights checksum"]["outcome"] == "passed"


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["layer_0/.bashrc"], "a piece of the unusable name '.bashrc'"),
        ([".ssh/x.so"], "a piece of the unusable name '.ssh'"),
        ([f"layer_0/{'x' * 201}"], "a piece of the unusable name 'xxx"),
        (["layer_0/x y.so"], "a piece of the unusable name 'x y.so'"),
        (["../x.so"], "no plain path"),
        (["layer_0/x.so", "more/aotinductor/layer_0/x.so"], "the file 'x.so' of 'layer_0' twice"),
    ],
)
def test_names_in_an_archive_lead_to_no_other_file(
    names: list[str], fault: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from reblock.backends.torch.program import _extract
    from reblock.errors import CorruptArtifact

    path, place = tmp_path / "p.rbln", tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"p/data/aotinductor/{name}", "\x7fELF")
        archive.writestr("p/extra/reblock.json", '{"format_version": 1, "graph": {}}')
    with pytest.raises(CorruptArtifact, match=fault):
        _extract(str(path), str(place), sha256="")
    assert set(tmp_path.iterdir()) == {path, place}
