"""How long the commands that only read, plan or edit take to start, beside Python itself.

    python benchmarks/startup.py [--rounds 40] [--json FILE]

Every round runs every command once, in turn, so that a machine that becomes slower or faster
meanwhile does so for all of them. All run with their bytecode compiled, as that of an installed
package is; a first round that is not counted sees to it. The medians are compared with that of
`python -c pass`. This measures; it decides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from machine import cpu_name

from artifacts import make_artifact

MODEL = str(Path(__file__).parents[1] / "tests" / "data" / "model_configs" / "DeepSeek-V3.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = commands(str(make_artifact(Path(directory, "artifact"))))
        environment = os.environ | {"PYTHONPYCACHEPREFIX": os.path.join(directory, "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        measure(lines, 1, environment)
        seconds = measure(lines, args.rounds, environment)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    base = medians["python -c pass"]
    print(f"{platform.platform()}, {cpu_name()}, {os.cpu_count()} cores")
    print(f"Python {platform.python_version()}, {args.rounds} rounds, medians")
    for name, median in medians.items():
        print(f"{name:42} {median * 1000:7.1f} ms  {median / base:5.2f} x")
    if args.json:
        result = {
            "platform": platform.platform(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "rounds": args.rounds,
            "median_s": medians,
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def commands(artifact: str) -> dict[str, list[list[str]]]:
    """Return the command lines by name; where there are several, the rounds take turns."""
    scripts = sysconfig.get_path("scripts")
    reblock, optimum = os.path.join(scripts, "reblock"), os.path.join(scripts, "optimum-rbln-cli")
    return {
        "python -c pass": [[sys.executable, "-c", "pass"]],
        "python -c 'import argparse, json'": [[sys.executable, "-c", "import argparse, json"]],
        "reblock get": [[reblock, "get", artifact]],
        "optimum-rbln-cli --get-kvcache-num-blocks": [
            [optimum, "--get-kvcache-num-blocks", "--model-id", artifact]
        ],
        "reblock set (in place, each a change)": [
            [reblock, "set", artifact, "20"],
            [reblock, "set", artifact, "16"],
        ],
        "reblock inspect": [[reblock, "inspect", artifact]],
        "reblock plan (61 layers, 80%)": [
            [reblock, "plan", MODEL, "--npu", "RBLN-CR13x16", "--memory-budget", "80%"]
        ],
    }


def measure(
    lines: dict[str, list[list[str]]], rounds: int, environment: dict[str, str]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    for number in range(rounds):
        for name, variants in lines.items():
            start = time.perf_counter()
            line = variants[number % len(variants)]
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=environment)
            seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
