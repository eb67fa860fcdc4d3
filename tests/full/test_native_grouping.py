"""Linear layers of one input become one call, which answers to the bit as they did."""

from __future__ import annotations

import json
import operator
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from reblock.backends.torch.native import group_linears, ops
from reblock.backends.torch.native.pack import pack

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("native_operators")]


class Attention(nn.Module):
    """Three of one input, then one of its own; `x + 1` is computed but not used."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        ops.linear(x + 1, q, None, None, 32)
        query = ops.linear(x, q, None, None, 32)
        key = ops.linear(x, k, None, None, 32)
        mixed = query * key.relu()
        # Stands behind what was made of the first two.
        mixed = mixed + ops.linear(x, v, None, None, 32)
        y: Tensor = ops.linear(mixed, o, None, None, 16)
        return y


class Mixed(nn.Module):
    """Weights of two types, and one that is computed."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y: Tensor = ops.linear(x, a, None, None, 32) + ops.linear(x, b, None, None, 32)
        return y + ops.linear(x, c * 2, None, None, 32)


class Storing(nn.Module):
    """A layer whose output is not wanted, but what it writes is."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, cache: Tensor) -> Tensor:
        ops.linear(x, a, None, None, 32)
        cache.copy_(ops.linear(x, b, None, None, 32))
        return x + 1


def export(module: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(module, inputs, strict=False).module()


def targets(graph: Any) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return pack(torch.randn(outputs, inputs).to(dtype))


def test_linears_of_one_input_become_one_call() -> None:
    inputs = (torch.randn(3, 48), *(weight(32, 48) for _ in range(3)), weight(16, 32))
    graph = export(Attention(), *inputs)
    expected = graph(*inputs)
    group_linears(graph)
    assert targets(graph).count(ops.linears) == 1
    assert targets(graph).count(ops.linear) == 1
    assert targets(graph).count(operator.getitem) == 3
    assert torch.equal(graph(*inputs), expected)


def test_linears_whose_weights_are_of_two_types_or_computed_stay_apart() -> None:
    inputs = torch.randn(3, 48), weight(32, 48), weight(32, 48, torch.bfloat16), weight(32, 48)
    graph = export(Mixed(), *inputs)
    expected = graph(*inputs)
    group_linears(graph)
    assert targets(graph).count(ops.linear) == 3
    assert ops.linears not in targets(graph)
    assert torch.equal(graph(*inputs), expected)


def test_what_is_written_is_kept_and_what_nobody_uses_is_not_computed() -> None:
    inputs = torch.randn(3, 48), weight(32, 48), weight(32, 48), torch.zeros(3, 32)
    graph = export(Storing(), *inputs)
    group_linears(graph)
    assert targets(graph).count(ops.linear) == 1
    graph(*inputs)
    assert torch.equal(inputs[3], ops.linear(inputs[0], inputs[2], None, None, 32))


def test_a_compiled_layer_calls_its_linears_in_groups(artifact: Path) -> None:
    with zipfile.ZipFile(artifact / "decoder_batch_1.rbln") as archive:
        (name,) = (n for n in archive.namelist() if "/layer_0/" in n and n.endswith("wrapper.json"))
        calls = [node["node"]["target"] for node in json.loads(archive.read(name))["nodes"]]
    # Queries, keys and values; the output of attention; the halves of the MLP; what follows them.
    assert [call for call in calls if "linear" in call] == [
        "reblock::linears",
        "reblock::linear",
        "reblock::linears",
        "reblock::linear",
    ]
