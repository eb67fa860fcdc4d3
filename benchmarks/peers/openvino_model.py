"""A Llama as OpenVINO's graph, made from the weights that transformers saved.

The exporter of OpenVINO's own project needs an older transformers than the one that reblock is
pinned to, so the graph is built here: the same operations in the same order, in float32, with the
keys and values as states, which OpenVINO GenAI turns into its paged attention.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from safetensors.numpy import load_file

__all__ = ["write_openvino_model"]

LAST = np.iinfo(np.int64).max


def write_openvino_model(source: str, directory: str) -> None:
    """Write the model in `source`, a directory of transformers, as OpenVINO GenAI reads it."""
    target = Path(directory)
    target.mkdir(parents=True)
    config = json.loads(Path(source, "config.json").read_text())
    model = _Llama(config, load_file(Path(source, "model.safetensors"))).build()
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(Path(source, name), target / name)


class _Llama:
    """The graph while it is built. Shapes: B rows, T tokens, H heads, K of keys, D wide."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Any]) -> None:
        self._config = config
        self._weights = weights
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_key_value_heads"]
        self._head_size = config.get("head_dim") or config["hidden_size"] // self._heads
        self._sinks: list[Any] = []
        self._variables: list[Any] = []

    def build(self) -> Any:
        """Return the model: token ids in, logits out."""
        tokens = _parameter("input_ids", ov.Type.i64, 2)
        mask = _parameter("attention_mask", ov.Type.i64, 2)
        positions = _parameter("position_ids", ov.Type.i64, 2)
        rows = _parameter("beam_idx", ov.Type.i32, 1)
        table = self._weight("model.embed_tokens")
        hidden = ops.gather(table, ops.convert(tokens, "i32"), _ints(0))
        turns = self._turns(positions)
        batch = ops.gather(ops.shape_of(tokens), _ints([0]), _ints(0))
        visible: Any = None
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            query, key, value = self._projections(normed, name, turns)
            key = self._cached(key, rows, batch, f"past_key_values.{layer}.key")
            value = self._cached(value, rows, batch, f"past_key_values.{layer}.value")
            if visible is None:
                visible = _visible(mask, tokens, key)
            mixed = self._attention(query, key, value, visible)
            hidden = ops.add(hidden, self._linear(mixed, f"{name}.self_attn.o_proj"))
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = ops.swish(self._linear(normed, f"{name}.mlp.gate_proj"))
            wide = ops.multiply(gate, self._linear(normed, f"{name}.mlp.up_proj"))
            hidden = ops.add(hidden, self._linear(wide, f"{name}.mlp.down_proj"))
        hidden = self._norm(hidden, "model.norm")
        is_tied = "lm_head.weight" not in self._weights
        head = table if is_tied else self._weight("lm_head")
        logits = ops.matmul(hidden, head, False, True)
        logits.output(0).set_names({"logits"})
        result = ops.result(logits)
        parameters = [tokens, mask, positions, rows]
        return ov.Model([result], self._sinks, parameters, self._variables)

    def _weight(self, name: str) -> Any:
        return ops.constant(self._weights[f"{name}.weight"], dtype=np.float32, name=name)

    def _linear(self, hidden: Any, name: str) -> Any:
        return ops.matmul(hidden, self._weight(name), False, True)

    def _norm(self, hidden: Any, name: str) -> Any:
        squares = ops.reduce_mean(ops.power(hidden, _floats(2)), _ints([-1]), True)
        root = ops.sqrt(ops.add(squares, _floats(self._config["rms_norm_eps"])))
        return ops.multiply(
            ops.multiply(hidden, ops.divide(_floats(1), root)),
            ops.constant(self._weights[f"{name}.weight"], dtype=np.float32),
        )

    def _turns(self, positions: Any) -> tuple[Any, Any]:
        """Return the cosines and sines [B, 1, T, D] of the rotary embedding."""
        steps = np.arange(0, self._head_size, 2, dtype=np.float32) / self._head_size
        frequencies = (1.0 / self._theta() ** steps).astype(np.float32)
        places = ops.unsqueeze(ops.convert(positions, "f32"), _ints(-1))
        angles = ops.matmul(places, ops.constant(frequencies[None, None, :]), False, False)
        both = ops.concat([angles, angles], -1)
        return tuple(ops.unsqueeze(turn(both), _ints(1)) for turn in (ops.cos, ops.sin))  # type: ignore[return-value]

    def _theta(self) -> float:
        config = self._config
        rope = config.get("rope_parameters") or {}
        return float(rope.get("rope_theta") or config["rope_theta"])

    def _projections(self, hidden: Any, name: str, turns: tuple[Any, Any]) -> list[Any]:
        shapes = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        made = []
        for kind, heads in shapes.items():
            flat = self._linear(hidden, f"{name}.self_attn.{kind}_proj")
            split = ops.reshape(flat, _ints([0, 0, heads, self._head_size]), True)
            by_head = ops.transpose(split, _ints([0, 2, 1, 3]))
            made.append(by_head if kind == "v" else self._turned(by_head, *turns))
        return made

    def _turned(self, by_head: Any, cosines: Any, sines: Any) -> Any:
        half = self._head_size // 2
        first = ops.slice(by_head, _ints([0]), _ints([half]), _ints([1]), _ints([3]))
        second = ops.slice(by_head, _ints([half]), _ints([LAST]), _ints([1]), _ints([3]))
        across = ops.concat([ops.multiply(second, _floats(-1)), first], -1)
        return ops.add(ops.multiply(by_head, cosines), ops.multiply(across, sines))

    def _cached(self, new: Any, rows: Any, batch: Any, name: str) -> Any:
        """Return what was kept before and `new` behind it, which is kept from now on."""
        shape = ov.PartialShape([-1, self._kv_heads, -1, self._head_size])
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, ov.Type.f32, name
        variable = ov.op.util.Variable(info)
        sizes = ops.concat([batch, _ints([self._kv_heads, 0, self._head_size])], 0)
        before = ops.read_value(ops.broadcast(_floats(0), sizes), variable)
        whole = ops.concat([ops.gather(before, rows, _ints(0)), new], 2)
        self._sinks.append(ops.assign(whole, variable))
        self._variables.append(variable)
        return whole

    def _attention(self, query: Any, key: Any, value: Any, visible: Any) -> Any:
        attended = ops.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), visible
        )
        by_token = ops.transpose(attended, _ints([0, 2, 1, 3]))
        return ops.reshape(by_token, _ints([0, 0, self._heads * self._head_size]), True)

    def _repeated(self, cache: Any) -> Any:
        """Return every head of keys or values once for each head that reads it."""
        groups = self._heads // self._kv_heads
        if groups == 1:
            return cache
        sizes = ops.shape_of(cache)
        batch, length = (ops.gather(sizes, _ints([axis]), _ints(0)) for axis in (0, 2))
        wide = [batch, _ints([self._kv_heads, groups]), length, _ints([self._head_size])]
        spread = ops.broadcast(
            ops.unsqueeze(cache, _ints(2)), ops.concat(wide, 0), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(spread, _ints([0, self._heads, -1, self._head_size]), True)


def _visible(mask: Any, tokens: Any, key: Any) -> Any:
    """Return what each token may look at, [B, 1, T, tokens so far]: 0, or much below it."""
    count = ops.gather(ops.shape_of(tokens), _ints(1), _ints(0))
    total = ops.gather(ops.shape_of(key), _ints(2), _ints(0))
    columns = ops.range(_ints(0), total, _ints(1), "i64")
    own = ops.range(ops.subtract(total, count), total, _ints(1), "i64")
    causal = ops.less_equal(ops.unsqueeze(columns, _ints(0)), ops.unsqueeze(own, _ints(1)))
    held = ops.not_equal(ops.unsqueeze(mask, _ints([1, 2])), _ints(0))
    return ops.select(ops.logical_and(causal, held), _floats(0), _floats(-65504.0))


def _parameter(name: str, kind: Any, rank: int) -> Any:
    parameter = ops.parameter([-1] * rank, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _ints(values: int | list[int]) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


def _floats(value: float) -> Any:
    return ops.constant(np.array(value, dtype=np.float32))


if __name__ == "__main__":
    write_openvino_model(*sys.argv[1:])
