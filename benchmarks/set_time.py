"""How long `reblock set` takes, for few layers and for ten times as many.

    python benchmarks/set_time.py [--layers 3 30] [--rounds 30] [--json FILE]
    python benchmarks/set_time.py DIRECTORY DIRECTORY [--rounds 30]

Compiles random Llama models that differ in their number of layers only, or takes copies of
artifacts that are there. A resize rewrites the programs, whose size does not depend on the
weights, and links the weights, so its time should hardly grow. Every round resizes every artifact
once, in turn, with the installed command; `python -c pass` runs with them as the measure of the
machine. This measures; it decides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from machine import describe_machine, machine_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_models import compile_llama

COUNTS = (40, 20)
COMMAND = os.path.join(sysconfig.get_path("scripts"), "reblock")
BASE = "python -c pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("artifacts", metavar="DIRECTORY", nargs="*")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 30])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-") as directory:
        if args.artifacts:
            artifacts = copies(args.artifacts, directory)
        else:
            artifacts = {
                f"{depth} layers": compile_llama(Path(directory), num_layers=depth)
                for depth in args.layers
            }
        environment = os.environ | {"PYTHONPYCACHEPREFIX": os.path.join(directory, "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # Twice: the first rounds compile the bytecode and bring the files into memory.
        measure(artifacts, 2, environment)
        seconds = measure(artifacts, args.rounds, environment)
        sizes = {name: sum_sizes(path) for name, path in artifacts.items()}
    report(seconds, sizes, args.rounds, args.json)


def copies(sources: list[str], directory: str) -> dict[str, Path]:
    """Return copies of artifacts, by their names."""
    return {
        source: shutil.copytree(source, Path(directory, str(number)))
        for number, source in enumerate(sources)
    }


def sum_sizes(directory: Path) -> tuple[int, int]:
    """Return the bytes of the programs and of everything else."""
    programs = sum(path.stat().st_size for path in directory.glob("*.rbln"))
    return programs, sum(path.stat().st_size for path in directory.iterdir()) - programs


def measure(
    artifacts: dict[str, Path], rounds: int, environment: dict[str, str]
) -> dict[str, list[float]]:
    """Return the seconds of every resize, each a change, and of the bare interpreter."""
    seconds: dict[str, list[float]] = {name: [] for name in (BASE, *artifacts)}
    for number in range(rounds):
        lines: dict[str, list[str]] = {
            name: [COMMAND, "set", str(path), str(COUNTS[number % 2])]
            for name, path in artifacts.items()
        }
        for name, line in {BASE: [sys.executable, "-c", "pass"], **lines}.items():
            start = time.perf_counter()
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=environment)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(
    seconds: dict[str, list[float]],
    sizes: dict[str, tuple[int, int]],
    rounds: int,
    json_path: str | None,
) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(sizes))
    print(machine_line())
    print(f"{rounds} rounds, medians\n")
    print("| | programs | weights and other files | median | lower and upper quarter | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, times in seconds.items():
        low, _, high = statistics.quantiles(times, n=4)
        programs, others = (f"{size / 2**20:.1f} MiB" for size in sizes.get(name, (0, 0)))
        ratio = "" if name == BASE else f"{medians[name] / medians[first]:.2f}"
        print(
            f"| {name} | {programs} | {others} | {medians[name] * 1000:.0f} ms "
            f"| {low * 1000:.0f} to {high * 1000:.0f} ms | {ratio} |"
        )
    if json_path:
        result = {
            "machine": describe_machine(),
            "rounds": rounds,
            "bytes_of_programs_and_others": sizes,
            "seconds": seconds,
            "median_s": medians,
        }
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
