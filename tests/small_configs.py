"""Small configurations of many model types, and how many parameters their models have.

The counts are those of the models that transformers builds, which tests/full checks again; the
unit tests hold the count from `config.json` against them, without transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SMALL_CONFIGS", "SmallConfig"]


@dataclass(frozen=True)
class SmallConfig:
    """A configuration of a model type, said in full or as far as it differs from its defaults."""

    model_type: str
    values: dict[str, Any]
    parameters: int

    def __str__(self) -> str:
        return f"{self.model_type}-{self.parameters}"


BARE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BASE = BARE | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
EXPERTS = BASE | {"num_experts": 4, "moe_intermediate_size": 32}
ROUTED = BASE | {"n_routed_experts": 4, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
INDEX = {"index_n_heads": 2, "index_head_dim": 8}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 4}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
NEMOTRON = ROUTED | {
    "moe_shared_expert_intermediate_size": 40,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "n_groups": 2,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
RECURRENCES = {"layer_types": ["linear_attention", "full_attention"] * 2}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
TOKEN_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50}

ROWS: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("afmoe", EXPERTS, {"attention_bias": True}, 210_124),
    ("apertus", BASE, {}, 111_816),
    ("arcee", BASE, {"mlp_bias": True}, 112_320),
    ("bamba", BASE | MAMBA_2, {"attn_layer_indices": [1]}, 178_688),
    ("biogpt", BARE, {"intermediate_size": 96}, 132_224),
    ("bitnet", BASE, {}, 136_896),
    ("codegen", BARE, {}, 211_428),
    ("cwm", BASE, {"mlp_bias": True}, 137_280),
    (
        "dbrx",
        BARE,
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "d_model": 64,
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4},
        },
        211_008,
    ),
    ("deepseek_v32", ROUTED | LATENT | INDEX, {"first_k_dense_replace": 1}, 142_800),
    ("dots1", ROUTED, {"n_shared_experts": 2, "first_k_dense_replace": 1}, 192_448),
    ("ernie4_5", BASE, {"use_bias": True}, 131_648),
    (
        "ernie4_5_moe",
        BASE | {"moe_num_experts": 4, "moe_intermediate_size": 32},
        {"use_bias": True, "moe_layer_interval": 2, "moe_layer_end_index": 2},
        150_376,
    ),
    ("exaone_moe", EXPERTS, {}, 174_016),
    ("falcon", BARE, {"bias": True, "num_kv_heads": 2, "new_decoder_architecture": True}, 189_824),
    ("falcon_h1", BASE | MAMBA_2, {"mamba_d_head": 8, "mamba_d_ssm": 64}, 191_040),
    (
        "falcon_h1",
        BASE | MAMBA_2 | {"mamba_d_head": 8, "mamba_d_ssm": 64},
        {"mamba_proj_bias": True, "projectors_bias": True, "mamba_rms_norm": True},
        192_128,
    ),
    ("falcon_mamba", BARE, {"state_size": 4, "time_step_rank": 5}, 119_872),
    ("flex_olmo", BASE, {"num_experts": 4}, 358_848),
    (
        "gemma3n_text",
        BASE | TOKEN_INPUTS,
        {
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 3,
            "intermediate_size": [96, 96, 128, 128],
            "laurel_rank": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 1,
        },
        166_792,
    ),
    (
        "gemma4_text",
        BASE | TOKEN_INPUTS | WINDOWS,
        {
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
        },
        167_208,
    ),
    (
        "gemma4_text",
        EXPERTS | WINDOWS,
        {
            "enable_moe_block": True,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "top_k_experts": 2,
        },
        255_504,
    ),
    ("gemma4_unified_text", BASE, {"global_head_dim": 32}, 142_816),
    (
        "glm4_moe_lite",
        BARE | LATENT,
        {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4},
        139_408,
    ),
    ("glm_moe_dsa", ROUTED | LATENT | INDEX, {"indexer_types": ["full", "shared"] * 2}, 116_016),
    ("gpt_neo", BARE, {"attention_types": [[["global", "local"], 2]]}, 213_888),
    ("granitemoe", BASE, {"num_local_experts": 4}, 358_464),
    ("granitemoeshared", BASE, {"num_local_experts": 4, "shared_intermediate_size": 24}, 376_896),
    ("hunyuan_v1_moe", EXPERTS, {"moe_intermediate_size": [32] * 4, "moe_topk": 2}, 432_320),
    ("jais2", BASE, {}, 113_664),
    (
        "kimi_linear",
        EXPERTS | LATENT | RECURRENCES,
        {"linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None},
        155_496,
    ),
    ("lara_mini", EXPERTS | DELTA | RECURRENCES, {"shared_expert_intermediate_size": 24}, 164_188),
    ("lfm2", BASE | CONVOLUTIONS, {"block_multiple_of": 16, "conv_bias": True}, 114_560),
    ("lfm2", BASE | CONVOLUTIONS, {"block_auto_adjust_ff_dim": False}, 138_496),
    ("lfm2", BASE | CONVOLUTIONS, {"block_ff_dim": 600, "block_ffn_dim_multiplier": 1.3}, 654_592),
    ("lfm2_moe", EXPERTS | CONVOLUTIONS, {}, 151_296),
    ("mimo_v2_flash", ROUTED | WINDOWS, {"attention_bias": True, "v_head_dim": 8}, 149_864),
    ("minicpm3", BASE | LATENT, {"v_head_dim": None}, 108_048),
    ("minimax", BASE, {"num_local_experts": 4}, 374_976),
    ("mpt", BARE, {}, 203_584),
    ("nanochat", BASE, {}, 111_104),
    ("nemotron", BASE, {"mlp_bias": True}, 112_896),
    (
        "nemotron_h",
        NEMOTRON,
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "mlp_bias": True,
            "moe_latent_size": 24,
            "use_bias": True,
        },
        67_168,
    ),
    ("nemotron_h", NEMOTRON, {"hybrid_override_pattern": "ME*E"}, 83_240),
    ("olmo", BASE, {}, 135_680),
    ("olmo_hybrid", BASE | DELTA | RECURRENCES, {}, 126_684),
    (
        "phimoe",
        BASE,
        {"attention_bias": True, "lm_head_bias": True, "num_local_experts": 4},
        359_908,
    ),
    ("recurrent_gemma", BASE, {"attention_bias": True, "lru_width": 32}, 78_080),
    ("solar_open", ROUTED, {}, 186_432),
    ("vaultgemma", BASE, {}, 129_856),
    (
        "zamba",
        BARE,
        {
            "attn_layer_offset": 4,
            "attn_layer_period": 6,
            "intermediate_size": 96,
            "mamba_d_state": 4,
            "mamba_dt_rank": 3,
            "n_mamba_heads": 2,
            "num_hidden_layers": 9,
        },
        439_488,
    ),
    (
        "zamba2",
        BARE,
        {
            "intermediate_size": 96,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "use_shared_attention_adapter": False,
        },
        261_072,
    ),
    (
        "zamba2",
        BARE,
        {
            "adapter_rank": 3,
            "add_bias_linear": True,
            "intermediate_size": 96,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "num_hidden_layers": 5,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
        },
        313_216,
    ),
]

SMALL_CONFIGS = tuple(
    SmallConfig(model_type, base | values, parameters)
    for model_type, base, values, parameters in ROWS
)
