"""What cannot be compiled is refused from its configuration alone, with the reason.

None of these directories has weights: a refusal that came after reading them would fail here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import transformers
from families import FAMILIES

from reblock.backends.torch import compile_model
from reblock.errors import BudgetTooSmall, InvalidOption, UnsupportedModel
from reblock.options import CompileOptions
from reblock.progress import SilentProgress

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

REFUSED = {
    "recurrent state": (
        transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=160),
        "recurrent state",
    ),
    "encoder and decoder": (
        transformers.T5Config(d_model=64, num_layers=2, vocab_size=160),
        "decoder-only",
    ),
    "cross attention": (
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, add_cross_attention=True),
        "decoder-only",
    ),
    "latent attention": (transformers.DeepseekV3Config(**_SMALL), "latent attention"),
    "chunked attention": (transformers.Llama4TextConfig(**_SMALL), "chunked_attention"),
    "attention of its own": (
        transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=160),
        "attention",
    ),
    "linear attention": (
        transformers.Qwen3NextConfig(
            **_SMALL, layer_types=["linear_attention", "full_attention"], head_dim=16
        ),
        "linear_attention",
    ),
    "no language model": (
        transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "no causal language model",
    ),
    "quantized weights": (
        transformers.LlamaConfig(
            **_SMALL, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}
        ),
        "quantized",
    ),
    "looks ahead": (
        transformers.Gemma3TextConfig(**_SMALL, head_dim=16, use_bidirectional_attention=True),
        "ahead",
    ),
    "table that changes": (
        transformers.Phi3Config(
            **_SMALL,
            original_max_position_embeddings=128,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128,
            },
        ),
        "lower max_seq_len to 128",
    ),
}


def compile_config(config: Any, tmp_path: Path, **options: Any) -> None:
    config.save_pretrained(tmp_path / "model")
    compile_model(
        str(tmp_path / "model"), str(tmp_path / "out"), CompileOptions(**options), SilentProgress()
    )


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(
    case: str, tmp_path: Path
) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModel) as caught:
        compile_config(config, tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("./absent", "no such file or directory"),
        ("absent.gguf", "no such file or directory"),
        ("{tmp}/notes.txt", "only .gguf files"),
        ("{tmp}", "no config.json"),
    ],
)
def test_a_path_without_a_model_is_refused(model: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    name = model.format(tmp=tmp_path)
    output = str(tmp_path.parent / "never-written")
    with pytest.raises(UnsupportedModel, match=reason):
        compile_model(name, output, CompileOptions(), SilentProgress())


def _llama(**others: Any) -> Any:
    name, arguments = FAMILIES["llama"]
    return getattr(transformers, name)(**{**arguments, **others})


def test_a_budget_below_the_weights_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    from reblock.budget import parse_budget

    with pytest.raises(BudgetTooSmall, match="the weights take") as caught:
        compile_config(_llama(), tmp_path, memory_budget=parse_budget("100KB"))
    assert caught.value.needed_bytes > caught.value.budget_bytes == 100 * 1024


def test_a_block_count_for_a_model_of_windows_alone_is_refused(tmp_path: Path) -> None:
    name, arguments = FAMILIES["mistral_sliding"]
    config = getattr(transformers, name)(**arguments)
    with pytest.raises(InvalidOption, match="sliding window"):
        compile_config(config, tmp_path, kvcache_num_blocks=20, kvcache_block_size=16)


def test_a_longer_sequence_than_the_model_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="256 positions"):
        compile_config(_llama(), tmp_path, max_seq_len=512)


def test_a_model_that_brings_code_of_its_own_is_refused_and_its_code_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    # What somebody would answer who is asked.
    monkeypatch.setattr("builtins.input", lambda _text: "y")
    output = str(tmp_path.parent / "never-written")
    with pytest.raises(UnsupportedModel, match="custom code"):
        compile_model(str(tmp_path), output, CompileOptions(), SilentProgress())
    assert not (tmp_path / "ran").exists()
