"""The keys of a GGUF file in the words of a Hugging Face `config.json`.

llama.cpp has one set of keys for all architectures. A key that is missing means that there is no
such thing, or follows from others: as many KV heads as heads, heads that share the hidden size.
A `config.json` has defaults of its model type instead. So what follows is written out here, and
what is missing is written as null, which keeps these defaults away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.errors import CorruptArtifact, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["model_config"]

_MAX_NUMBER = 2**31 - 1
_MAX_LAYERS = 4096
_GEMMA2_WINDOW = 4096

# Architectures whose model type has another name. Any other is its own model type.
_MODEL_TYPES: Mapping[str, str] = {
    "bert": "bert",
    "command-r": "cohere",
    "ernie4_5-moe": "ernie4_5_moe",
    "falcon-h1": "falcon_h1",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glm-dsa": "glm_moe_dsa",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "granitehybrid": "granitemoehybrid",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "kimi-linear": "kimi_linear",
    "lfm2moe": "lfm2_moe",
    "llama4": "llama4_text",
    "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2",
    "mistral3": "ministral3",
    "modern-bert": "modernbert",
    "nemotron_h_moe": "nemotron_h",
    "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
    "starcoder": "gpt_bigcode",
    "t5encoder": "t5",
}

# Keys that mean the same in both, whatever the model.
_SAME: Mapping[str, str] = {
    "attention.indexer.key_length": "index_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "leading_dense_block_count": "first_k_dense_replace",
    "shortconv.l_cache": "conv_L_cache",
}
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
# Every layer of these has both attention and a state.
_ALL_HYBRID = ("falcon_h1",)
# Where it is said whether there is a bias on queries, keys and values.
_BIAS_KEYS: Mapping[str, str] = {
    "qwen2_moe": "qkv_bias",
    "stablelm": "use_qkv_bias",
    "starcoder2": "use_bias",
}
# These share the embeddings with the output layer, and their files have them twice.
_ALWAYS_TIED = ("bloom", "falcon")


def model_config(
    keys: Mapping[str, object],
    lengths: Mapping[str, int],
    tensors: frozenset[str],
    *,
    path: str,
) -> dict[str, object]:
    """Return the configuration of the model of a GGUF file, with null where it has nothing.

    Args:
        keys: The values of the file's keys; None where one was passed over.
        lengths: How many entries its lists have.
        tensors: The names of its tensors.
        path: Named in errors.

    Raises:
        CorruptArtifact: A value is not what it must be.
        UnsupportedModel: It holds no language model that writes token by token.
    """
    model = _Model(keys, path)
    _refuse_others(model)
    model_type = _model_type(model, tensors)
    # 0 stands for none: no window, no experts, no feed-forward part.
    config: dict[str, object] = {name: model.largest(key) or None for key, name in _SAME.items()}
    config["model_type"] = model_type
    config["num_hidden_layers"] = _num_layers(model)
    config["vocab_size"] = model.largest("vocab_size") or lengths.get("tokenizer.ggml.tokens")
    config |= _attention(model, model_type)
    config |= _layer_types(model, model_type)
    config |= _state(model, model_type)
    config |= _tensor_flags(tensors, model_type)
    if model_type == "gemma2" and config["sliding_window"] is None:
        # Files of its first days do not say it.
        config["sliding_window"] = _GEMMA2_WINDOW
    if model_type == "llama4_text":
        config["intermediate_size_mlp"] = config["intermediate_size"]
        config["intermediate_size"] = config.pop("moe_intermediate_size")
    if model_type.startswith("granitemoe"):
        config["shared_intermediate_size"] = config.pop("shared_expert_intermediate_size")
    return config


class _Model:
    """The keys of one architecture, whose values are handed out checked."""

    def __init__(self, keys: Mapping[str, object], path: str) -> None:
        self.keys = keys
        self.path = path
        name = keys.get("general.architecture")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise CorruptArtifact("does not say its general.architecture", path=path)
        self.architecture = name

    def integers(self, key: str) -> list[int]:
        """Return a number or a list of them as a list, empty where there is none."""
        whole = f"{self.architecture}.{key}"
        value = self.keys.get(whole)
        if value is None:
            return []
        numbers: list[int] = []
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_NUMBER:
                raise CorruptArtifact(
                    f"{whole} must be from 0 to {_MAX_NUMBER:,}, not {item!r}", path=self.path
                )
            numbers.append(item)
        return numbers

    def integer(self, key: str) -> int | None:
        """Return a single number that is not 0, or None."""
        values = self.integers(key)
        return values[0] or None if len(values) == 1 else None

    def largest(self, key: str) -> int | None:
        """Return a number, the largest where every layer has its own."""
        return max(self.integers(key), default=None)

    def flags(self, key: str) -> list[bool] | None:
        """Return a list of true and false, or None."""
        value = self.keys.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return None
        return [bool(item) for item in value]

    def unsupported(self, fault: str) -> UnsupportedModel:
        """Return the error for a file that holds no language model."""
        return UnsupportedModel(f"{self.path} {fault}", model=self.path)


def _refuse_others(model: _Model) -> None:
    kind = model.keys.get("general.type")
    if kind == "adapter":
        base = model.keys.get("general.base_model.0.name")
        known = f", {base}," if isinstance(base, str) and base.isprintable() else ""
        raise model.unsupported(f"is an adapter; give the model{known} that it is for")
    if kind not in (None, "model") or model.architecture == "clip":
        raise model.unsupported("holds no language model, but something that goes with one")
    if model.keys.get(f"{model.architecture}.attention.causal") is False:
        raise model.unsupported(
            f"holds a {model.architecture} model whose attention looks ahead; only models that "
            "write token by token have a KV cache of blocks"
        )


def _model_type(model: _Model, tensors: frozenset[str]) -> str:
    name = model.architecture
    if name == "llama" and model.largest("expert_count"):
        return "mixtral"
    if name == "deepseek2":
        # The third generation corrects its router, or scores experts with a sigmoid (2).
        is_third = model.integer("expert_gating_func") == 2 or any(
            ".exp_probs_b" in tensor for tensor in tensors
        )
        return "deepseek_v3" if is_third else "deepseek_v2"
    return _MODEL_TYPES.get(name, name)


def _num_layers(model: _Model) -> int | None:
    """Return the layers without those that only draft tokens."""
    count = model.integer("block_count")
    drafting = model.integer("nextn_predict_layers") or 0
    if count is not None and not drafting < count <= _MAX_LAYERS:
        raise CorruptArtifact(
            f"has block_count={count:,} and nextn_predict_layers={drafting:,}", path=model.path
        )
    return None if count is None else count - drafting


def _attention(model: _Model, model_type: str) -> dict[str, object]:
    heads = model.largest("attention.head_count")
    if not heads:
        return {}
    kv_heads = model.integers("attention.head_count_kv") or [heads]
    used = sorted({count for count in kv_heads if count})
    varies = len(used) > 1
    config: dict[str, object] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if varies else (used or [heads])[0],
    }
    hidden = model.integer("embedding_length") or 0
    key_width = model.integer("attention.key_length") or hidden // heads
    if model.integer("attention.kv_lora_rank"):
        return config | _latent(model, key_width)
    value_width = model.integer("attention.value_length") or key_width
    config["head_dim"] = key_width or None
    config["v_head_dim"] = value_width if value_width != key_width else None
    if model_type in ("falcon", "gpt_bigcode"):
        config["multi_query"] = used == [1]
    if model_type == "falcon":
        config["new_decoder_architecture"] = not varies and used not in ([1], [heads])
    return config | _window_widths(model, model_type, key_width)


def _latent(model: _Model, key_width: int) -> dict[str, object]:
    """Return the widths of latent attention, whose file may state those of its latent beside."""
    rotary = model.integer("rope.dimension_count") or 0
    whole = model.integer("attention.key_length_mla") or key_width
    values = model.integer("attention.value_length_mla") or model.integer("attention.value_length")
    return {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": whole - rotary if whole > rotary else None,
        "v_head_dim": values,
    }


def _window_widths(model: _Model, model_type: str, key_width: int) -> dict[str, object]:
    """Return the widths of heads in layers with a window, where they are others."""
    keys = model.integer("attention.key_length_swa")
    if keys is None:
        return {}
    if model_type == "gemma4_text":
        return {"head_dim": keys, "v_head_dim": None, "global_head_dim": key_width}
    return {"swa_head_dim": keys, "swa_v_head_dim": model.integer("attention.value_length_swa")}


def _layer_types(model: _Model, model_type: str) -> dict[str, object]:
    count = _num_layers(model) or 0
    window = model.largest("attention.sliding_window")
    pattern = model.flags("attention.sliding_window_pattern")
    if pattern is not None and window:
        names = ["sliding_attention" if flag else "full_attention" for flag in pattern]
        return {"layer_types": names[:count]}
    kv_heads = model.integers("attention.head_count_kv")
    if len(kv_heads) > 1 and 0 in kv_heads and model_type not in _ALL_HYBRID:
        widths = model.integers("feed_forward_length")
        other = "conv" if model_type in _SHORT_CONVOLUTIONS else "mamba"
        names = []
        for index, heads in enumerate(kv_heads[:count]):
            # These have a feed-forward part in place of attention, not behind it.
            is_alone = model.largest("ssm.inner_size") is None or (
                model_type == "nemotron_h" and index < len(widths) and widths[index] > 0
            )
            is_alone = is_alone and other == "mamba" and not model.largest("kda.head_dim")
            names.append("full_attention" if heads else "mlp" if is_alone else other)
        return {"layer_types": names}
    period = model.keys.get(f"{model.architecture}.attention.sliding_window_pattern")
    if window and isinstance(period, int) and not isinstance(period, bool):
        return {"sliding_window_pattern": model.integer("attention.sliding_window_pattern")}
    return {}


def _state(model: _Model, model_type: str) -> dict[str, object]:
    """Return what the size of recurrent states depends on."""
    kernel, inner = model.largest("ssm.conv_kernel"), model.largest("ssm.inner_size")
    rank, groups = model.largest("ssm.time_step_rank"), model.largest("ssm.group_count")
    state = model.largest("ssm.state_size")
    if width := model.largest("kda.head_dim"):
        heads = model.largest("attention.head_count")
        linear = {"num_heads": heads, "head_dim": width, "short_conv_kernel_size": kernel}
        return {"linear_attn_config": linear}
    if not inner or not rank:
        return {}
    if model_type in _DELTA_NETS:
        return {
            "linear_conv_kernel_dim": kernel,
            "linear_key_head_dim": state,
            "linear_num_key_heads": groups,
            "linear_num_value_heads": rank,
            "linear_value_head_dim": inner // rank or None,
        }
    config: dict[str, object] = {
        "mamba_d_conv": kernel,
        "mamba_d_ssm": inner,
        "mamba_d_state": state,
        # It is none of attention, and where there is none the file says 0.
        "intermediate_size": model.largest("feed_forward_length") or inner,
    }
    if groups is None:
        return config | {"mamba_dt_rank": rank}
    # The second generation has heads, and their number in place of a rank.
    config |= {"mamba_n_heads": rank, "mamba_d_head": inner // rank or None}
    return config | {"mamba_n_groups": groups}


def _tensor_flags(tensors: frozenset[str], model_type: str) -> dict[str, object]:
    """Return what no key says, but the tensors show."""

    def has(*endings: str) -> bool:
        return any(name.endswith(endings) for name in tensors)

    flags: dict[str, object] = {
        "tie_word_embeddings": "output.weight" not in tensors or model_type in _ALWAYS_TIED,
        _BIAS_KEYS.get(model_type, "attention_bias"): has("attn_q.bias", "attn_qkv.bias"),
        "mlp_bias": has("ffn_up.bias"),
        "use_qk_norm": has("attn_q_norm.weight"),
    }
    if model_type == "falcon":
        flags["num_ln_in_parallel_attn"] = 2 if has("attn_norm_2.weight") else 1
    return flags
