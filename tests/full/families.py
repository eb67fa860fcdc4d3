"""Small random models of every architecture that is checked against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FAMILIES", "VOCABULARY", "save_model"]

VOCABULARY = 160
MAX_SEQ_LEN = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_SEQ_LEN,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "num_hidden_layers": 3}
_EXPERTS = {"num_experts_per_tok": 2}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Configuration class and its arguments. Windows are shorter than the prompts, so they slide.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": None}),
    "mistral_sliding": ("MistralConfig", {**_GROUPED, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {**_GROUPED, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_SEQ_LEN,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "max_position_embeddings": MAX_SEQ_LEN,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "num_hidden_layers": 3}),
    "olmo2": ("Olmo2Config", _GROUPED),
    # Every fourth layer has no rotary embedding, so there are two kinds.
    "smollm3": ("SmolLM3Config", {**_GROUPED, "num_hidden_layers": 4}),
    "mixtral": ("MixtralConfig", {**_GROUPED, **_EXPERTS, "num_local_experts": 4}),
}


def save_model(family: str, directory: Path) -> Any:
    """Write a random model of `family` to `directory` and return it, ready to run."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**arguments, **_IDS})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _spread(model)
    model.save_pretrained(directory)
    return model


def _spread(model: Any) -> None:
    """Make the weights larger than they are at first, so that tokens differ and scores are apart.

    A fresh model of this size answers with nearly equal scores, and every answer is one token
    repeated: an attention that sees nothing would pass.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
