"""How compile time grows with the depth of a model.

    python benchmarks/compile_time.py [--layers 2 4 8 16 32] [--rounds 1] [--json FILE]

Compiles random Llama models that differ in their number of layers only, with the installed
command. Layers that are alike are compiled once, so the time of a layer should fall as depth
grows. A round compiles every depth once, in turn; the table has medians of the rounds. `cpu` is
the time that all processes of a compilation have computed, which other work on the machine does
not stretch as it does the rest. This measures; it decides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from machine import describe_machine, machine_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_models import COMPILE_OPTIONS, write_model

STAGES = ("examine", "compile", "weights", "measure")
COLUMNS = (*STAGES, "all", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    seconds: dict[int, list[dict[str, float]]] = {depth: [] for depth in args.layers}
    for number in range(args.rounds):
        for depth in args.layers:
            seconds[depth].append(compile_once(depth))
            print(f"round {number + 1}, {depth} layers: {seconds[depth][-1]}", file=sys.stderr)
    medians = {
        depth: {stage: statistics.median(one[stage] for one in times) for stage in COLUMNS}
        for depth, times in seconds.items()
    }
    print(machine_line())
    print(f"options {' '.join(COMPILE_OPTIONS)}, rounds: {args.rounds}\n")
    print_table(medians)
    if args.json:
        result = {
            "machine": describe_machine(),
            "options": COMPILE_OPTIONS,
            "rounds": args.rounds,
            "seconds": seconds,
            "median_s": medians,
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def compile_once(num_layers: int) -> dict[str, float]:
    """Compile a model of that depth and return the seconds of every column."""
    environment = os.environ.copy()
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-") as directory:
        model = Path(directory, "model")
        write_model("llama", model, num_layers=num_layers)
        # AOTInductor keeps what it compiled, and must not find it again in the next round.
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(directory, "cache")
        command = os.path.join(sysconfig.get_path("scripts"), "reblock")
        line = [command, "compile", str(model), "--output-dir", os.path.join(directory, "artifact")]
        before = cpu_seconds()
        outcome = subprocess.run(
            [*line, *COMPILE_OPTIONS, "--json"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        cpu = cpu_seconds() - before
    seconds: dict[str, float] = json.loads(outcome.stdout)["seconds"]
    return {**seconds, "all": sum(seconds.values()), "cpu": cpu}


def cpu_seconds() -> float:
    """Return what the processes have computed that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_table(medians: dict[int, dict[str, float]]) -> None:
    print(f"| layers | {' | '.join(COLUMNS)} | all / layer | cpu / layer |")
    print("|---:" * (len(COLUMNS) + 3) + "|")
    for depth, seconds in medians.items():
        cells = [f"{seconds[column]:.1f} s" for column in COLUMNS]
        cells += [f"{seconds[column] / depth:.2f} s" for column in ("all", "cpu")]
        print(f"| {depth} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
