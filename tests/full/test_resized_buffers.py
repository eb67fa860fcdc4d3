"""After a resize the cache has another size, on disk and in the process that serves it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from installed import generate, reblock

from process_memory import resident_at
from reblock.artifact.reader import open_artifact
from reblock.memory import align

if TYPE_CHECKING:
    from pathlib import Path

    from installed import Compiled

pytestmark = pytest.mark.full

PROMPTS = (
    "The cache",
    "holds the keys and the values of every token that was read, in blocks. " * 4,
    "of every token",
)
_FLOAT_BYTES = 4
# Loads an artifact as `reblock generate` does and says where its KV cache lies.
_SERVE = """
import json, sys
from reblock.artifact.reader import open_artifact
from reblock.backends.torch import load_runner
runner = load_runner(open_artifact(sys.argv[1]))
cache = runner.cache
sizes = [tensor.numel() * tensor.element_size() for tensor in cache.tensors.values()]
places = [(t.data_ptr(), size) for t, size in zip(cache.tensors.values(), sizes)]
print(json.dumps({"stated": cache.num_bytes, "places": places}), flush=True)
sys.stdin.read()
"""


def resized(source: Path, num_blocks: int, destination: Path) -> Path:
    result = reblock("set", source, num_blocks, "--output-dir", destination)
    assert result.returncode == 0, result.stderr
    return destination


@pytest.mark.parametrize("num_blocks", [17, 18, 33, 63, 65, 128])
def test_every_resizable_buffer_holds_its_bytes_per_block_times_the_count(
    num_blocks: int, compiled: Compiled, tmp_path: Path
) -> None:
    artifact = open_artifact(str(resized(compiled.artifact, num_blocks, tmp_path / "resized")))
    metas = {meta.name: meta for meta in artifact.config.cache_metas}
    assert {meta.is_resizable for meta in metas.values()} == {True, False}
    original = open_artifact(str(compiled.artifact))
    for program, before in zip(artifact.programs, original.programs, strict=True):
        assert program.kvcache_num_blocks == num_blocks
        assert program.memory.caches.keys() == metas.keys()
        for name, grid in program.memory.caches.items():
            if metas[name].is_resizable:
                per_block = math.prod(metas[name].shape[1:]) * _FLOAT_BYTES
                assert grid == ((per_block * num_blocks,),)
            else:
                assert grid == before.memory.caches[name]
        assert program.memory.alloc == before.memory.alloc


def kv_memory(directory: Path) -> tuple[int, int]:
    """Return the resident and the stated bytes of the KV cache of a process."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["stated"] == sum(size for _, size in answer["places"])
        # Up to where the next one could begin, so that nothing taken behind the end is missed.
        resident = sum(resident_at(process.pid, start, align(n)) for start, n in answer["places"])
        process.communicate("")
    return resident, answer["stated"]


def test_the_serving_process_holds_exactly_the_memory_of_its_count(
    compiled: Compiled, tmp_path: Path
) -> None:
    stated_bytes = []
    for num_blocks in (17, 64):
        directory = resized(compiled.artifact, num_blocks, tmp_path / f"blocks_{num_blocks}")
        resident, stated = kv_memory(directory)
        opened = open_artifact(str(directory))
        plan = opened.memory_plan()
        assert stated == plan.kv_unaligned_bytes_at(num_blocks)[0][0]
        # All of it before the first token, and no more than the plan says, alignment included.
        assert stated <= resident <= plan.kv_bytes_at(num_blocks)[0][0]
        stated_bytes.append(stated)
    per_block = opened.memory_plan().bytes_per_block[0][0]
    assert stated_bytes[1] - stated_bytes[0] == per_block * (64 - 17)


def test_answers_are_the_same_before_and_after_resizing(compiled: Compiled, tmp_path: Path) -> None:
    def answers(directory: Path) -> list[Any]:
        report = generate(directory, PROMPTS, "--max-new-tokens", 40)
        assert (
            report["kvcache_num_blocks"] == open_artifact(str(directory)).config.kvcache_num_blocks
        )
        assert report["most_running"] == len(PROMPTS)
        return [result["token_ids"] for result in report["results"]]

    directory = shutil.copytree(compiled.artifact, tmp_path / "artifact")
    before = answers(directory)
    assert [len(set(tokens)) > 5 for tokens in before] == [True] * len(PROMPTS)
    for num_blocks in (17, 128):
        assert reblock("set", directory, num_blocks).returncode == 0
        assert answers(directory) == before
