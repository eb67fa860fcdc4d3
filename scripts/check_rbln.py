"""Checks reblock on real RBLN artifacts, on a machine that has their compiler, or an NPU too.

    python scripts/check_rbln.py DIRECTORY [--module NAME] [--keep DIR]

DIRECTORY is an artifact that optimum-rbln compiled; it is not changed. Everything happens on a
copy, which is removed at the end, or kept at --keep. One line is printed for every step, and the
exit code is 1 where one failed. What takes optimum-rbln or an NPU is skipped where that is not
there. docs/rbln.md shows what is expected.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reblock import apply_resize, open_artifact, parse_budget, plan_resize, read_num_blocks
from reblock.artifact.rebel import has_compiler
from reblock.errors import BudgetTooSmall, ReblockError
from reblock.sizing import smallest_budget
from reblock.units import format_gib

if TYPE_CHECKING:
    from collections.abc import Callable

    from reblock.artifact.reader import Artifact

PROMPT_IDS = [1, 2, 3, 4, 5, 6, 7, 8]
NEW_TOKENS = 16


class Skipped(Exception):  # noqa: N818  no error
    """A step that cannot be taken here; the message says why."""


class Failed(Exception):  # noqa: N818  no error of reblock
    """A step whose outcome is not what it should be."""


@dataclass
class Check:
    """One artifact under test: the source, a copy of it, and what was found so far."""

    source: str
    copy: str
    module: str | None
    answers: list[list[int]] = field(default_factory=list)

    def open(self) -> Artifact:
        """Return the copy, opened."""
        return open_artifact(self.copy, self.module)

    @property
    def place(self) -> str:
        """Where the module's own files are."""
        return os.path.join(self.copy, self.module or "")


def main() -> int:
    """Run all steps and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", metavar="DIRECTORY")
    parser.add_argument("--module", metavar="NAME")
    parser.add_argument("--keep", metavar="DIR", help="where to leave the copy")
    args = parser.parse_args()
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        check = Check(args.directory, os.path.join(place, "copy"), args.module)
        outcomes = []
        for name, step in STEPS.items():
            outcomes.append(run(name, step, check))
            if not outcomes[-1] and name in NEEDED:
                break
    num_failed = outcomes.count(False)
    print(f"{num_failed} of {len(outcomes)} steps failed" if num_failed else "all is as expected")
    return 1 if num_failed else 0


def run(name: str, step: Callable[[Check], str], check: Check) -> bool:
    """Take one step, print its outcome and return whether it did not fail."""
    try:
        outcome, detail = "ok", step(check)
    except Skipped as reason:
        outcome, detail = "skipped", str(reason)
    except (ReblockError, Failed, OSError) as error:
        outcome, detail = "FAILED", f"{type(error).__name__}: {error}"
    print(f"{outcome:7}  {name:28}  {detail}", flush=True)
    return outcome != "FAILED"


def find_compiler(_check: Check) -> str:
    """Import the compiler."""
    if not has_compiler():
        raise Failed("rebel-compiler cannot be imported")
    rebel = import_module("rebel")
    return f"rebel {getattr(rebel, '__version__', 'of unknown version')} from {rebel.__file__}"


def copy_artifact(check: Check) -> str:
    """Write a copy with the same count, which also opens and reads back every program."""
    artifact = open_artifact(check.source, check.module)
    count = artifact.config.kvcache_num_blocks
    apply_resize(artifact, plan_resize(artifact, count), check.copy)
    return f"{count} blocks, {len(artifact.programs)} programs"


def memory_of_the_compiler(check: Check) -> str:
    """Compare the plan with the compiler's own total of the KV cache."""
    artifact = check.open()
    plan = artifact.memory_plan()
    planned = plan.kv_bytes_at(plan.current_blocks)
    rebel = import_module("rebel")
    model = rebel.RBLNCompiledModel(artifact.programs[0].path)
    reported = model.get_alloc_per_chiplet_by_key().get("DramTensor")
    if reported is None:
        raise Skipped("the compiler reports no DramTensor")
    if [list(node) for node in planned] != [list(node) for node in reported]:
        raise Failed(f"planned {planned}, but the compiler reports {reported}")
    return f"{format_gib(max(map(sum, planned)))} of KV cache per device, as the compiler says"


def resize_there_and_back(check: Check) -> str:
    """Go to the fewest blocks and back, and compare what the files say of themselves."""
    artifact = check.open()
    count, fewest = artifact.config.kvcache_num_blocks, artifact.bounds.minimum
    other = fewest if fewest != count else count + 1
    before = [program.memory for program in artifact.programs]
    for target in (other, count):
        opened = check.open()
        apply_resize(opened, plan_resize(opened, target))
        if read_num_blocks(check.copy, check.module) != target:
            raise Failed(f"the count is not {target} after it was set")
    if [program.memory for program in check.open().programs] != before:
        raise Failed("the sizes are others than before")
    return f"{count} -> {other} -> {count}"


def same_configuration(check: Check) -> str:
    """Compare `rbln_config.json` byte for byte with that of the source."""
    name = os.path.join(check.module or "", "rbln_config.json")
    if digest(os.path.join(check.source, name)) != digest(os.path.join(check.copy, name)):
        raise Failed("it differs from that of the source")
    return "the same bytes as at the start"


def budgets(check: Check) -> str:
    """Resize to the smallest budget, and be refused one byte less for each chiplet."""
    artifact = check.open()
    plan, fewest = artifact.memory_plan(), artifact.bounds.minimum
    smallest = smallest_budget(plan, fewest)
    if plan_resize(artifact, parse_budget(smallest)).num_blocks_after < fewest:
        raise Failed(f"the smallest budget, {smallest}, gives fewer than {fewest} blocks")
    try:
        plan_resize(artifact, parse_budget(smallest - plan.num_chiplets))
    except BudgetTooSmall:
        return f"{fewest} blocks need {smallest:,} bytes of each device, and no byte less"
    raise Failed(f"{smallest - plan.num_chiplets} bytes should have been too little")


def read_by_optimum(check: Check) -> str:
    """Let optimum-rbln read the configuration of a resized copy."""
    if find_spec("optimum") is None or find_spec("optimum.rbln") is None:
        raise Skipped("optimum-rbln is not installed")
    config = import_module("optimum.rbln").RBLNAutoConfig.from_pretrained(check.place)
    return f"{type(config).__name__}, {config.kvcache_num_blocks} blocks"


def answer(check: Check) -> str:
    """Generate with optimum-rbln on the NPU, at two counts."""
    if find_spec("optimum") is None or find_spec("optimum.rbln") is None:
        raise Skipped("optimum-rbln is not installed")
    if not import_module("rebel").npu_is_available(0):
        raise Skipped("no NPU is attached")
    count = check.open().config.kvcache_num_blocks
    fewest = check.open().bounds.minimum
    for target in (count, fewest, count):
        opened = check.open()
        apply_resize(opened, plan_resize(opened, target))
        check.answers.append(generate(check.copy))
    if len(set(map(tuple, check.answers))) != 1:
        raise Failed(f"the answers differ: {check.answers}")
    return f"the same {NEW_TOKENS} tokens at {count} and at {fewest} blocks"


def generate(directory: str) -> list[int]:
    """Return the greedy answer of an artifact to a fixed prompt."""
    torch, optimum = import_module("torch"), import_module("optimum.rbln")
    model = optimum.RBLNAutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.tensor([PROMPT_IDS])
    output = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in output[0]]


def digest(path: str) -> str:
    """Return the digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


STEPS: dict[str, Callable[[Check], str]] = {
    "compiler": find_compiler,
    "copy": copy_artifact,
    "memory": memory_of_the_compiler,
    "resize there and back": resize_there_and_back,
    "rbln_config.json": same_configuration,
    "budgets": budgets,
    "read by optimum-rbln": read_by_optimum,
    "answers on the NPU": answer,
}
# Without these nothing else can be checked.
NEEDED = ("compiler", "copy")


if __name__ == "__main__":
    sys.exit(main())
