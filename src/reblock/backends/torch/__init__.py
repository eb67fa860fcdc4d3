"""The open backend: Hugging Face model -> torch.export -> AOTInductor, on any CPU.

compile     the whole way from a model to an artifact
source      where a model comes from, and what cannot be compiled
structure   a model as pieces: in front of, in and behind its layers
attention   paged and sliding caches in place of a model's own attention
experts     mixture-of-experts layers that export
pieces      the pieces as modules to export
build       pieces compiled side by side, packaged as `.rbln`
worker      the process that compiles a piece
describe    rbln_config.json and the graph of a program
weights     one file of weights, mapped once
profile     the process that measures and checks new programs
loaded      the process that compares the memory of an artifact with its plan
host        instruction sets and torch versions
kv_cache    the memory of a running cache
program     a compiled program in memory
process     how its threads wait and what memory it keeps
runner      all programs of an artifact: what the engine runs
"""

from __future__ import annotations

from reblock.backends.torch.process import set_waiting

set_waiting()  # before torch is loaded

from reblock.backends.torch.compile import CompileReport, compile_model  # noqa: E402
from reblock.backends.torch.runner import TorchRunner, load_runner  # noqa: E402

__all__ = ["CompileReport", "TorchRunner", "compile_model", "load_runner"]
