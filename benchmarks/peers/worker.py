"""Runs one engine for the benchmark, which asks by lines of JSON.

    python -m peers.worker MODULE ATTRIBUTE

A question is {"method": m, "arguments": {...}}, an answer {"result": r} or {"error": e}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from peers.serving import Request, Served


def main() -> None:
    """Answer until there are no more questions."""
    module, attribute = sys.argv[1:]
    # What libraries print goes to standard error, which is a log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        try:
            if engine is None:
                engine = getattr(importlib.import_module(f"peers.{module}"), attribute)()
            answer = {"result": ask(engine, json.loads(line))}
        except Exception as error:  # noqa: BLE001  it is told, and the engine may go on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # threads of an engine may still run


def ask(engine: Any, question: dict[str, Any]) -> Any:
    arguments = question["arguments"]
    if "requests" in arguments:
        arguments["requests"] = [Request(**fields) for fields in arguments["requests"]]
    result = getattr(engine, question["method"])(**arguments)
    return result.to_json() if isinstance(result, Served) else result


if __name__ == "__main__":
    main()
