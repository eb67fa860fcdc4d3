"""One small model, compiled once through the installed command; every test has its own copy.

The model has layers with full attention and one with a sliding window, so that caches that are
resizable and one that is not lie side by side.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from installed import Compiled, optimum

from tiny_models import write_model

if TYPE_CHECKING:
    from pathlib import Path

COMPILE_OPTIONS = (
    "--batch-size",
    "4",
    "--max-seq-len=2048",
    "--kvcache-partition-len",
    "128",
    "--decoder_batch_sizes=4,1",
    "--memory-budget",
    "80%",
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A model with a tokenizer and a chat template, compiled for 4 sequences of 2,048 tokens."""
    if find_spec("torch") is None:
        pytest.skip("needs the torch extra")
    directory = tmp_path_factory.mktemp("compiled")
    model, artifact = directory / "model", directory / "artifact"
    write_model("gemma3", model)
    result = optimum("--model-id", model, "--output-dir", artifact, *COMPILE_OPTIONS)
    assert result.returncode == 0, result.stderr
    return Compiled(model=model, artifact=artifact, stdout=result.stdout, stderr=result.stderr)


@pytest.fixture
def artifact(compiled: Compiled, tmp_path: Path) -> Path:
    """A copy of the artifact that a test may do anything with."""
    return shutil.copytree(compiled.artifact, tmp_path / "artifact")


@pytest.fixture(scope="session")
def native_operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The native operators of this machine, built and loaded."""
    pytest.importorskip("torch")
    from reblock.backends.torch import native
    from reblock.backends.torch.host import host_isa

    native.load(native.build(str(tmp_path_factory.mktemp("native")), host_isa()))
