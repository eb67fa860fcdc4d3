"""What is made before anything is measured, and kept for the next run in the same directory."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import reblock
from peers.serving import MAX_BATCH, MAX_RUNNING

__all__ = ["BLOCK_TOKENS", "CACHE_CONTEXT", "POOL_BLOCKS", "Shop", "UnavailableError"]

BENCHMARKS = Path(__file__).resolve().parent.parent
MAX_SEQ_LEN = 1024
BLOCK_TOKENS = 32  # small, as a quarter of the pool has to have more blocks than MAX_RUNNING
POOL_BLOCKS = 144
CACHE_CONTEXT = 8192
PREFILL_CHUNK = 512


class UnavailableError(Exception):
    """Something could not be made; the message is what it said."""


class Shop:
    """Makes models and artifacts of one model, each once."""

    def __init__(self, directory: Path, model: str, python_of: dict[str, str]) -> None:
        self._directory = directory / "models"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._model = model
        self._python_of = python_of
        self._failed: dict[str, str] = {}

    def transformers(self) -> Path:
        """The model as transformers saves it."""
        return self._make(self._model, "peers.models", "model", self._model)

    def openvino(self) -> Path:
        python = self._python_of.get("openvino", sys.executable)
        source = str(self.transformers())
        name = f"{self._model}-openvino"
        return self._make(name, "peers.openvino_model", source, python=python)

    def gguf(self) -> Path:
        source = str(self.transformers())
        return self._make(f"{self._model}-f32.gguf", "peers.models", "gguf", source)

    def artifact(self, kind: str) -> Path:
        """The model compiled for short sequences.

        `kind` is the type of everything, as in "bfloat16", or of the weights alone where all else
        is float32, as in "int8-weights".
        """
        of_weights, _, rest = kind.partition("-")
        options = [
            *("--max-seq-len", str(MAX_SEQ_LEN), "--decoder-batch-sizes", "32,24,16,8,4,2,1"),
            *("--batch-size", str(MAX_RUNNING)),
            *("--kvcache-num-blocks", str(POOL_BLOCKS)),
            *("--kvcache-block-size", str(BLOCK_TOKENS)),
            *(("--weight-dtype", of_weights) if rest else ()),
        ]
        return self._compile(kind, "float32" if rest else kind, options)

    def cache_artifact(self, dtype: str) -> Path:
        """The model compiled for sequences of `CACHE_CONTEXT`, with blocks for a full batch."""
        blocks = MAX_BATCH * CACHE_CONTEXT // 128
        options = [
            *("--max-seq-len", str(CACHE_CONTEXT), "--kvcache-block-size", "128"),
            *("--kvcache-num-blocks", str(blocks), "--batch-size", str(MAX_BATCH)),
        ]
        return self._compile(f"cache-{dtype}", dtype, options)

    def resized(self, artifact: Path, num_blocks: int) -> Path:
        """A copy of an artifact that `reblock set` gave other blocks."""
        target = artifact.with_name(f"{artifact.name}-{num_blocks}")
        arguments = ["set", str(artifact), str(num_blocks), "--output-dir", str(target)]
        return self._run(target, [sys.executable, "-m", "reblock", *arguments])

    def weights(self) -> tuple[int, int]:
        """Return how many weights there are, and how many of them a token reads.

        Of an embedding that is not the last layer, too, a token reads one row.
        """
        config = json.loads((self.transformers() / "config.json").read_text())
        with (self.transformers() / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        sizes: dict[str, int] = {}
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            sizes[name] = (end - begin) // 4
        total = sum(sizes.values())
        rows = 0 if config["tie_word_embeddings"] else sizes["model.embed_tokens.weight"]
        return total, total - rows

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.transformers() / "config.json").read_text())
        return found

    def _compile(self, kind: str, dtype: str, options: list[str]) -> Path:
        options += ["--dtype", dtype, "--prefill-chunk-size", str(PREFILL_CHUNK)]
        target = self._directory / f"{self._model}-{kind}-{compiler_digest(options)}"
        arguments = ["compile", str(self.transformers()), "--output-dir", str(target), *options]
        return self._run(target, [sys.executable, "-m", "reblock", *arguments])

    def _make(self, name: str, module: str, *arguments: str, python: str = sys.executable) -> Path:
        target = self._directory / name
        partial = self._directory / f"{name}.partial"
        if not target.exists():
            if partial.is_dir():
                shutil.rmtree(partial)
            self._run(target, [python, "-W", "ignore", "-m", module, *arguments, str(partial)])
            partial.rename(target)
        return target

    def _run(self, target: Path, line: list[str]) -> Path:
        """Run a command that makes `target`, unless it is there; what failed is not tried again."""
        name = target.name
        if not target.exists() and name not in self._failed:
            print(f"making {name} ...", file=sys.stderr, flush=True)
            done = subprocess.run(line, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                self._failed[name] = next((line for line in lines if "error" in line), lines[-1])
        if name in self._failed:
            raise UnavailableError(self._failed[name])
        return target


def compiler_digest(options: list[str]) -> str:
    """Return what changes when the options do, or the sources that compile a model."""
    package = Path(reblock.__file__).parent / "backends"
    digest = hashlib.sha256(" ".join(options).encode())
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
