"""What the sources may not contain: ways in which a file that is read could become code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reblock

SOURCES = sorted(Path(reblock.__file__).parent.rglob("*.py"))

FORBIDDEN_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
FORBIDDEN_CALLS = {"__import__", "compile", "eval", "exec"}
FORBIDDEN_METHODS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("os", "system")}


def faults_in(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if is_forbidden(name.name)]
            case ast.ImportFrom(module=str(module)) if is_forbidden(module):
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner,
                name,
            ) in FORBIDDEN_METHODS:
                found.append(f"{owner}.{name}")
            case ast.keyword(arg="trust_remote_code" | "shell" | "allow_pickle" as name, value=v):
                if not (isinstance(v, ast.Constant) and v.value is False):
                    found.append(name)
            case ast.keyword(arg="weights_only", value=ast.Constant(value=False)):
                found.append("weights_only")
    return found


def is_forbidden(module: str) -> bool:
    return module.split(".")[0] in FORBIDDEN_MODULES


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "load = torch.load",
        "eval(text)",
        "exec(text)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=setting)",
        "subprocess.run(text, shell=True)",
        "f(weights_only=False)",
    ],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert len(faults_in(text)) == 1


@pytest.mark.parametrize("text", ["model.eval()", "f(trust_remote_code=False)", "json.load(file)"])
def test_what_is_harmless_is_not_found(text: str) -> None:
    assert faults_in(text) == []


def test_no_source_unpickles_evaluates_or_trusts_code_of_others() -> None:
    assert len(SOURCES) > 50
    faults = {path.name: faults_in(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: found for name, found in faults.items() if found} == {}
