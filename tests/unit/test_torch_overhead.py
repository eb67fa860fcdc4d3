"""The estimate of what programs take besides weights and cache, and the compilations behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.model_spec import ModelSpec, parse_model_config
from reblock.planning.torch_overhead import Overhead, estimate_overhead
from reblock.units import MIB

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "vocab_size": 65_536,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "head_dim": 128,
    "vocab_size": 100_000,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "intermediate_size": 1536,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "vocab_size": 48_000,
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_064,
}
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "vocab_size": 49_152,
}
LONG = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 1000,
}
GEMMA2 = {"model_type": "gemma2", "sliding_window": 1024, "vocab_size": 48_000}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8}
MIXTRAL = {**EXPERTS, "intermediate_size": 1024}
GPT_OSS = {
    **EXPERTS,
    "model_type": "gpt_oss",
    "intermediate_size": 768,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size": 48_000,
}
WIDE_MIXTRAL = {
    **EXPERTS,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
}


def make_spec(**values: Any) -> ModelSpec:
    """Return a small Llama, changed by `values`."""
    return parse_model_config(json.dumps({**LLAMA, **values}), path="config.json")


def estimated(
    spec: ModelSpec,
    *,
    batch: int = 1,
    seq_len: int = 1024,
    chunk: int = 128,
    decoders: tuple[int, ...] = (),
    dtype: str = "float32",
) -> Overhead:
    overhead = estimate_overhead(
        spec,
        dtype=dtype,
        batch_size=batch,
        max_seq_len=seq_len,
        prefill_chunk_size=chunk,
        decoder_batch_sizes=decoders or (batch,),
    )
    assert overhead is not None
    return overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A real compilation: what it is of, and what was measured, in MiB.

    `counted` is weights and cache, without alignment, which a process does not touch. `runtime` is
    the artifact's own. `served` is how far above the two together the peak of a process was that
    served a full batch: the least and the most of its runs.
    """

    model: dict[str, Any]
    shape: dict[str, Any]
    counted: float
    runtime: float
    served: tuple[float, float]


CALIBRATION = {
    "llama, large batch": Seen(
        model={"num_key_value_heads": 8},
        shape={"batch": 8, "seq_len": 2048},
        counted=367.5,
        runtime=348.3,
        served=(5.3, 5.3),
    ),
    "llama, long chunk": Seen(
        model=WIDE,
        shape={"batch": 4, "chunk": 512},
        counted=324.0,
        runtime=362.6,
        served=(30.1, 30.1),
    ),
    "llama, four decoders": Seen(
        model={"num_hidden_layers": 8},
        shape={"batch": 8, "decoders": (8, 4, 2, 1)},
        counted=280.5,
        runtime=359.4,
        served=(5.2, 5.2),
    ),
    "llama, bfloat16": Seen(
        model={"num_hidden_layers": 2},
        shape={"batch": 4, "dtype": "bfloat16"},
        counted=50.5,
        runtime=350.4,
        served=(5.1, 5.1),
    ),
    "llama, tiny": Seen(
        model=TINY,
        shape={"batch": 4},
        counted=4.6,
        runtime=319.9,
        served=(5.0, 5.0),
    ),
    "gemma2": Seen(
        model=GEMMA2,
        shape={"batch": 4, "seq_len": 2048},
        counted=186.8,
        runtime=312.1,
        served=(5.2, 5.2),
    ),
    "qwen2": Seen(
        model=QWEN2,
        shape={"batch": 4},
        counted=179.4,
        runtime=392.1,
        served=(4.5, 4.5),
    ),
    "phi3": Seen(
        model=PHI3,
        shape={"batch": 16, "seq_len": 512},
        counted=394.0,
        runtime=297.9,
        served=(5.4, 5.4),
    ),
    "mixtral": Seen(
        model=MIXTRAL,
        shape={"batch": 4, "seq_len": 2048},
        counted=330.6,
        runtime=296.6,
        served=(17.1, 38.6),
    ),
    "mixtral, wide": Seen(
        model=WIDE_MIXTRAL,
        shape={"batch": 2, "seq_len": 4096},
        counted=613.9,
        runtime=296.6,
        served=(21.6, 21.6),
    ),
    "qwen3_moe": Seen(
        model=QWEN3_MOE,
        shape={"batch": 8, "seq_len": 512},
        counted=426.0,
        runtime=310.4,
        served=(20.7, 20.7),
    ),
    "gpt_oss": Seen(
        model=GPT_OSS,
        shape={"batch": 4},
        counted=268.1,
        runtime=312.0,
        served=(8.9, 8.9),
    ),
}


@pytest.mark.parametrize("name", CALIBRATION)
def test_terms_of_a_real_compilation_are_off_by_no_more_than_is_stated(name: str) -> None:
    seen = CALIBRATION[name]
    overhead = estimated(make_spec(**seen.model), **seen.shape)
    off = abs(overhead.runtime_bytes - seen.runtime * MIB)
    assert off <= overhead.runtime_error_bytes
    for served in seen.served:
        assert abs(overhead.workspace_bytes - served * MIB) <= overhead.workspace_error_bytes


@pytest.mark.parametrize("name", CALIBRATION)
def test_total_of_a_real_compilation_is_near_the_peak_of_serving_and_seldom_below(
    name: str,
) -> None:
    seen = CALIBRATION[name]
    overhead = estimated(make_spec(**seen.model), **seen.shape)
    total = seen.counted + (overhead.runtime_bytes + overhead.workspace_bytes) / MIB
    for served in seen.served:
        assert 0.98 <= total / (seen.counted + seen.runtime + served) <= 1.10


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size", "vocab_size"])
def test_estimate_without_a_width_is_none(width: str) -> None:
    spec = replace(make_spec(), **{width: None})
    overhead = estimate_overhead(
        spec,
        dtype="float32",
        batch_size=1,
        max_seq_len=1024,
        prefill_chunk_size=128,
        decoder_batch_sizes=(1,),
    )
    assert overhead is None


def test_workspace_of_a_larger_batch_grows_by_what_its_rows_hold() -> None:
    # Large enough that neither gaps nor what linear layers rearrange grow further.
    small, large = (estimated(make_spec(), batch=batch, seq_len=8192) for batch in (4096, 4097))
    stream = 3 * 512 * 4
    inner = 3 * 1408 * 4
    logits = 32_000 * 4
    partial_results = 8192 // 256 * 8 * (64 + 16) * 4
    row = stream + inner + logits + partial_results
    assert large.workspace_bytes - small.workspace_bytes == row


def test_workspace_of_a_long_sequence_has_no_more_partial_results_than_there_are_ranges() -> None:
    spec = make_spec()
    most = estimated(spec, batch=8, seq_len=64 * 256)
    assert estimated(spec, batch=8, seq_len=1 << 20) == most
    assert estimated(spec, batch=8, seq_len=63 * 256) != most


def test_workspace_in_bfloat16_is_less_than_in_float32() -> None:
    single = estimated(make_spec(), chunk=1024)
    half = estimated(make_spec(), chunk=1024, dtype="bfloat16")
    assert half.workspace_bytes < single.workspace_bytes
    assert half.runtime_bytes == single.runtime_bytes


def test_workspace_of_windows_does_not_grow_with_the_sequence() -> None:
    windows = ["sliding_attention"] * 6
    spec = make_spec(**{**GEMMA3, "layer_types": windows})
    assert estimated(spec, batch=4, seq_len=2048) == estimated(spec, batch=4, seq_len=8192)
    full = make_spec(**GEMMA3)
    shorter, longer = (estimated(full, batch=4, seq_len=length) for length in (2048, 8192))
    assert shorter.workspace_bytes < longer.workspace_bytes


def test_workspace_of_a_long_chunk_has_what_linear_layers_rearrange() -> None:
    # With gaps: half of what is live.
    shorter, longer = (estimated(make_spec(), chunk=chunk) for chunk in (128, 256))
    token = 3 * (512 + 1408) * 4
    rearranged = 1408 * 4 + 1408 // 8 * 4
    more = 128 * (token + token // 2 + rearranged)
    assert longer.workspace_bytes - shorter.workspace_bytes == pytest.approx(more, abs=64)


@pytest.mark.parametrize("is_tied", [True, False])
def test_workspace_of_a_model_without_experts_does_not_depend_on_its_parameters(
    is_tied: bool,
) -> None:
    spec = make_spec(tie_word_embeddings=is_tied)
    assert spec.num_parameters is not None
    assert estimated(spec, chunk=512) == estimated(replace(spec, num_parameters=None), chunk=512)


@pytest.mark.parametrize("is_tied", [True, False])
def test_workspace_of_experts_is_that_of_all_of_them(is_tied: bool) -> None:
    few, many = (
        estimated(
            make_spec(**{**MIXTRAL, "num_local_experts": count, "tie_word_embeddings": is_tied}),
            chunk=1024,
        )
        for count in (16, 32)
    )
    more = 16 * 1024 * 1024 * 3 * 4
    assert many.workspace_bytes - few.workspace_bytes == pytest.approx(more, rel=0.01)


def test_workspace_of_a_model_that_keeps_nothing_is_that_of_its_other_tensors() -> None:
    spec = make_spec()
    without = replace(spec, layers=())
    assert estimated(without, batch=8).workspace_bytes < estimated(spec, batch=8).workspace_bytes


def test_runtime_grows_with_programs_kinds_of_layers_and_vocabulary() -> None:
    spec = make_spec()
    runtime = estimated(spec, batch=4).runtime_bytes
    assert estimated(spec, batch=4, decoders=(4, 2)).runtime_bytes > runtime
    assert estimated(make_spec(vocab_size=128_000), batch=4).runtime_bytes > runtime + 60 * MIB
    two_kinds = replace(spec, layers=(*spec.layers, replace(spec.layers[0], window=512)))
    assert estimated(two_kinds, batch=4).runtime_bytes > runtime


def test_runtime_of_a_type_whose_configuration_imports_more_is_more() -> None:
    llama, qwen = (
        estimated(make_spec(model_type=name)).runtime_bytes for name in ("llama", "qwen2")
    )
    assert llama - qwen > 50 * MIB


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 512),
        "seq_len": st.integers(128, 1 << 20),
        "chunk": st.integers(1, 1024),
    }
)


@given(model=st.sampled_from([{}, GEMMA2, GEMMA3, MIXTRAL]), shape=shapes, more=st.integers(1, 99))
def test_estimate_of_larger_shapes_is_never_smaller(
    model: dict[str, Any], shape: dict[str, Any], more: int
) -> None:
    spec = make_spec(**model)
    small = estimated(spec, **shape)
    for name in shape:
        large = estimated(spec, **{**shape, name: shape[name] + more})
        assert large.workspace_bytes >= small.workspace_bytes
        assert large.runtime_bytes >= small.runtime_bytes
