"""What an edit costs beside copying the directory, for weights of 0.1, 1 and 10 GB.

    python benchmarks/edit_cost.py [--gigabytes 0.1 1 10] [--rounds 5] [--place DIR] [--json FILE]

The peer is what people do without an edit: `cp -a` of the directory, made to write every byte, and
the same followed by `sync`, because an edit too is on the disk when it is done. Beside it run,
with the installed command and in turn,

    in place         reblock set DIR N
    by journal       the same, on a directory that cannot be exchanged: a mount point
    --output-dir     reblock set DIR N --output-dir OUT, sharing the weights
    --copy           the same, sharing nothing

The weights are a sparse file of zeros, as no edit looks at them; the programs are as small as those
of the tests. `python -c pass` is the measure of the machine. `--place` is where to work, by default
the directory for temporary files; it must have room for two copies. This measures; it decides
nothing.
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

from artifacts import make_artifact, read_config, write_config

COMMAND = os.path.join(sysconfig.get_path("scripts"), "reblock")
BASE = "python -c pass"
COPY, COPY_SYNC = "cp -a", "cp -a, sync"
CP = 'cp -a --sparse=never --reflink=never "$0" "$1"'
COUNTS = (20, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", metavar="DIR")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-", dir=args.place) as place:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": os.path.join(place, "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ.clear()
        os.environ.update(environment)
        measure(Path(place), 1, 2)  # compiles the bytecode
        for size in args.gigabytes:
            seconds[f"{size:g} GB"] = measure(Path(place), round(size * 2**30), args.rounds)
    report(seconds, args.rounds)
    if args.json:
        content = {"machine": describe_machine(), "rounds": args.rounds, "seconds": seconds}
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n")


def measure(place: Path, weight_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each way took in each round."""
    directory = make_artifact(place / "artifact", num_blocks=COUNTS[1])
    os.truncate(directory / "weights.safetensors", weight_bytes)
    config = read_config(directory)
    config["reblock"]["weights"]["weights.safetensors"]["bytes"] = weight_bytes
    write_config(directory, config)
    out = str(place / "out")
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        count = str(COUNTS[number % 2])
        ways: dict[str, list[str]] = {
            BASE: [sys.executable, "-c", "pass"],
            "in place": [COMMAND, "set", str(directory), count],
            "by journal": mounted(directory, str(COUNTS[(number + 1) % 2])),
            "--output-dir": [COMMAND, "set", str(directory), "24", "--output-dir", out],
            "--copy": [COMMAND, "set", str(directory), "24", "--output-dir", out, "--copy"],
            COPY: ["sh", "-c", CP, str(directory), out],
            COPY_SYNC: ["sh", "-c", f'{CP} && find "$1" -exec sync {{}} +', str(directory), out],
        }
        for name, line in ways.items():
            seconds.setdefault(name, []).append(timed(line))
            shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(directory)
    return seconds


def mounted(directory: Path, count: str) -> list[str]:
    """Return a command that makes the directory a mount point, prints its own time and ends."""
    script = (
        'mount --bind "$1" "$1" && '
        'exec "$0" -c "import subprocess, sys, time; start = time.perf_counter(); '
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        'print(time.perf_counter() - start)" "$2" set "$1" "$3"'
    )
    return ["unshare", "-rm", "sh", "-c", script, sys.executable, str(directory), COMMAND, count]


def timed(line: list[str]) -> float:
    """Return the seconds that a command takes, or those that it prints."""
    start = time.perf_counter()
    result = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    elapsed = time.perf_counter() - start
    return float(result.stdout) if line[0] == "unshare" else elapsed


def report(seconds: dict[str, dict[str, list[float]]], rounds: int) -> None:
    print(machine_line())
    print(f"{rounds} rounds in turn, medians\n")
    sizes = list(seconds)
    print("| | " + " | ".join(sizes) + " |")
    print("|---|" + "---:|" * len(sizes))
    for name in seconds[sizes[0]]:
        medians = [statistics.median(seconds[size][name]) for size in sizes]
        print(f"| {name} | " + " | ".join(map(shown, medians)) + " |")
    print("\nTimes as fast as `cp -a, sync`:\n")
    print("| | " + " | ".join(sizes) + " |")
    print("|---|" + "---:|" * len(sizes))
    for name in ("in place", "by journal", "--output-dir", "--copy"):
        ratios = [
            statistics.median(seconds[size][COPY_SYNC]) / statistics.median(seconds[size][name])
            for size in sizes
        ]
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def shown(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


if __name__ == "__main__":
    main()
