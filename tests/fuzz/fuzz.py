"""Mutates artifacts and gives them to the commands, in processes of their own that may crash.

    python tests/fuzz/fuzz.py --cases 10000
    python tests/fuzz/fuzz.py --seconds 3600 --seed 7
    python tests/fuzz/fuzz.py --seed 7 --only 1234        one case again, as a failure names it

Everything follows from the seed and the number of a case. Exits with 1 where anything was found.
"""

from __future__ import annotations

import argparse
import gc
import gettext
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

_HERE = os.path.dirname(os.path.abspath(__file__))
# Far above the alarm within the process: only what never comes back to Python meets it.
_MAX_SILENCE_S = 300.0


@dataclass(slots=True)
class Report:
    """What a run has found: `counts` by mutator and exit code of `inspect`."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)
    peak_bytes: int = 0
    slowest_s: float = 0.0
    num_cases: int = 0

    def add(self, answer: dict[str, object]) -> None:
        """Count one case."""
        self.num_cases += 1
        self.counts[str(answer["mutator"]), str(answer["outcome"])] += 1
        self.peak_bytes = max(self.peak_bytes, int(str(answer["peak"])))
        self.slowest_s = max(self.slowest_s, float(str(answer["seconds"])))
        findings = answer["findings"]
        assert isinstance(findings, list)
        for finding in findings:
            self.findings.append((int(str(answer["index"])), str(answer["mutator"]), finding))

    def table(self) -> str:
        """Return the counts as lines of text."""
        outcomes = sorted({outcome for _, outcome in self.counts})
        mutators = sorted({mutator for mutator, _ in self.counts})
        lines = [f"{'mutator':32}" + "".join(f"{outcome:>8}" for outcome in outcomes)]
        for mutator in mutators:
            numbers = [self.counts[mutator, outcome] for outcome in outcomes]
            lines.append(f"{mutator:32}" + "".join(f"{number:8,}" for number in numbers))
        totals = [sum(self.counts[m, outcome] for m in mutators) for outcome in outcomes]
        lines.append(f"{'all':32}" + "".join(f"{total:8,}" for total in totals))
        lines.append(
            f"{self.num_cases:,} cases, exit codes of inspect; at most "
            f"{self.peak_bytes / 2**20:.0f} MiB and {self.slowest_s:.1f} s of computing for a case"
        )
        return "\n".join(lines)


class Worker:
    """A process that works on every `step`-th case, started again behind one that ends it."""

    def __init__(self, seed: int, first: int, step: int, stop: int, root: str) -> None:
        self.seed, self.next, self.step, self.stop, self.root = seed, first, step, stop, root
        self.answers: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.process: subprocess.Popen[str] | None = None
        self.num_silent = 0

    def serve(self, report: Report, deadline: float) -> None:
        """Run until all cases are done or the deadline has passed."""
        while self.next < self.stop and self.num_silent < 3 and time.monotonic() < deadline:
            folder = tempfile.mkdtemp(dir=self.root)
            command = [sys.executable, os.path.abspath(__file__), "--worker", folder]
            command += ["--seed", str(self.seed), "--first", str(self.next)]
            command += ["--step", str(self.step), "--stop", str(self.stop)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.answers = queue.Queue()
            listener = threading.Thread(target=_listen, args=(self.process, self.answers))
            listener.start()
            self._take_answers(report, deadline)
            self.process.kill()
            self.process.wait()
            listener.join()
            shutil.rmtree(folder, ignore_errors=True)

    def _take_answers(self, report: Report, deadline: float) -> None:
        assert self.process is not None
        while time.monotonic() < deadline:
            try:
                answer = self.answers.get(timeout=_MAX_SILENCE_S)
            except queue.Empty:
                self._blame(report, f"no answer for {_MAX_SILENCE_S:.0f} seconds")
                return
            if answer is None:
                if self.next < self.stop:
                    self._blame(report, f"the process ended with {self.process.wait()}")
                return
            report.add(answer)
            self.num_silent = 0
            self.next += self.step

    def _blame(self, report: Report, finding: str) -> None:
        report.findings.append((self.next, "?", finding))
        self.num_silent += 1
        self.next += self.step


def _listen(process: subprocess.Popen[str], answers: queue.Queue[dict[str, object] | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            # One that was killed may have said half a line.
            if line.endswith("\n"):
                answers.put(json.loads(line))
    answers.put(None)


def run(
    *,
    seed: int,
    cases: int = 2**62,
    seconds: float = 1e9,
    workers: int | None = None,
    first: int = 0,
) -> Report:
    """Run cases until so many are done, or so many seconds are over."""
    report, number = Report(), workers or os.cpu_count() or 1
    # In memory where possible: forcing every edit to a disk is not what is tested.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as root:
        threads = []
        for place in range(number):
            worker = Worker(seed, first + place, number, first + cases, root)
            threads.append(threading.Thread(target=worker.serve, args=(report, deadline)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return report


def work(folder: str, seed: int, indices: range) -> None:
    """Work on cases in this process, and print an answer for each."""
    answers = os.fdopen(os.dup(1), "w")
    sys.path[:0] = [_HERE, os.path.dirname(_HERE)]
    import probe
    from cases import Case, Maker

    # Looking for translations of argparse's words would be a quarter of the time.
    gettext.find = lambda *_args, **_keywords: None
    maker = Maker(folder)
    probe.prepare()
    warm_up = Case(mutator="none", directory=maker.ours, may_be_finished=False)
    first = probe.Probe(warm_up, Random(0))
    first.run()
    findings = [f"the artifact before any mutation: {text}" for text in first.findings]
    shutil.rmtree(maker.ours)
    shutil.rmtree(maker.victim)
    maker = Maker(folder)
    kept = probe._content(maker.ours), probe._content(maker.victim)
    for index in indices:
        answer = _work_on(maker, seed, index, os.path.join(folder, "case"))
        if (probe._content(maker.ours), probe._content(maker.victim)) != kept:
            findings.append("a file outside of the artifact was changed")
            shutil.rmtree(maker.ours)
            shutil.rmtree(maker.victim)
            maker = Maker(folder)
            kept = probe._content(maker.ours), probe._content(maker.victim)
        answer["findings"] = [*findings, *answer["findings"]]  # type: ignore[misc]
        findings = []
        print(json.dumps(answer), file=answers, flush=True)


def _work_on(maker: object, seed: int, index: int, parent: str) -> dict[str, object]:
    import probe
    from cases import Maker

    assert isinstance(maker, Maker)
    case = maker.make(seed, index, parent)
    if index % 64 == 0:
        gc.collect()
    probe.reset_peak()
    probe.limit_memory(True)
    started = time.process_time()
    probed = probe.Probe(case, Random(f"{seed}/{index}/commands"))
    probed.run()
    seconds = time.process_time() - started
    probe.limit_memory(False)
    peak = probe.peak_bytes()
    if peak > probe.MAX_BYTES:
        probed.findings.append(f"took {peak / 2**20:.0f} MiB of memory")
    shutil.rmtree(parent)
    return {
        "index": index,
        "mutator": case.mutator,
        "outcome": probed.outcome,
        "findings": probed.findings,
        "peak": peak,
        "seconds": seconds,
    }


def show(report: Report, seed: int) -> None:
    """Print what was found, and how to see each finding again."""
    print(report.table())
    for index, mutator, finding in report.findings[:50]:
        print(f"\ncase {index}, {mutator}: {finding}")
        print(f"    again: python tests/fuzz/fuzz.py --seed {seed} --only {index}")
    print(f"{len(report.findings)} findings")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the reading of artifacts.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2**62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--only", type=int, help="run one case")
    parser.add_argument("--keep", metavar="DIR", help="with --only: write its artifact there")
    for name in ("--first", "--step", "--stop"):
        parser.add_argument(name, type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args.seed, range(args.first, args.stop, args.step))
        return 0
    if args.keep is not None:
        sys.path[:0] = [_HERE, os.path.dirname(_HERE)]
        from cases import Maker

        os.mkdir(args.keep)
        Maker(args.keep).make(args.seed, args.only, os.path.join(args.keep, "case"))
    if args.only is not None:
        report = run(seed=args.seed, first=args.only, cases=1, workers=1)
    else:
        report = run(seed=args.seed, cases=args.cases, seconds=args.seconds, workers=args.workers)
    show(report, args.seed)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
