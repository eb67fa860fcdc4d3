"""A process that compiles pieces: `python -m reblock.backends.torch.worker`.

Reads a `PieceTask` as one line of JSON from standard input, answers with one line
{"files": [...], "seconds": s} or {"error": "..."}, and ends when the input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from functools import cache
from typing import Any


@cache
def _shape_model(config_dir: str, dtype: Any, weight_dtype: Any, max_seq_len: int) -> Any:
    from transformers import AutoConfig

    from reblock.backends.torch.source import shape_model
    from reblock.backends.torch.structure import study

    config = AutoConfig.from_pretrained(config_dir, local_files_only=True)
    model = shape_model(config, dtype, weight_dtype)
    return model, study(model, config.num_hidden_layers, max_seq_len)


def _compile(task: dict[str, Any]) -> list[str]:
    import torch

    from reblock.backends.torch import native, pieces
    from reblock.backends.torch.host import compiler_march

    shapes = pieces.PieceShapes(**task["shapes"])
    model, structure = _shape_model(
        task["config_dir"], task["dtype"], task["weight_dtype"], shapes.max_seq_len
    )
    match task["piece"].split("_"):
        case ["prologue"]:
            piece = pieces.prologue(model, structure, shapes)
        case ["epilogue"]:
            piece = pieces.epilogue(model, structure, shapes)
        case ["layer", index]:
            piece = pieces.layer(model, structure, shapes, int(index))
        case ["last", index]:
            piece = pieces.last_layer(model, structure, shapes, int(index))
        case _:
            raise ValueError(f"unknown piece {task['piece']!r}")
    graph: Any = pieces.export_piece(piece).module()
    native.group_linears(graph)
    options = {
        "aot_inductor.package": True,
        # Building the shared headers takes longer than they save on a handful of pieces.
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
        # Most of the time goes into code that only calls the kernels, and optimising that gains
        # microseconds a call. The kernels themselves are always optimised.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        # Half of a library would be its line numbers.
        "aot_inductor.enable_line_tables": False,
        "cpp.march": compiler_march(task["isa"]),
        # Loops are split for many threads; how many there are is settled when the program runs.
        "cpp.dynamic_threads": True,
        "cpp.threads": max(2, os.cpu_count() or 2),
    }
    files: Any = torch._inductor.aot_compile(graph, piece.inputs, options=options)
    # The C++ sources that come with them are not needed to run a program.
    return [str(file) for file in files if not str(file).endswith((".cpp", ".hpp"))]


def main() -> None:
    """Serve tasks until the input ends."""
    # Libraries that print would break the protocol: their output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for line in sys.stdin:
        started = time.monotonic()
        try:
            answer = {"files": _compile(json.loads(line)), "seconds": time.monotonic() - started}
        except Exception as error:  # noqa: BLE001  told to the parent, which stops everything
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
