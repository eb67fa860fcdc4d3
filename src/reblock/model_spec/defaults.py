"""What transformers assumes of a model type where `config.json` leaves a key out.

transformers writes only what differs from a class's defaults, above all within the configuration
of a part of a model: gemma-3-4b's file does not say how many heads it has. Listed is what memory
depends on, under the names of `model_spec.fields`, for the model types of public checkpoints.
Tests hold the table against the installed transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ALIASES", "DEFAULTS", "ENCODERS", "ENCODER_DECODERS"]

# Model types, and parts of models, that are read like another one.
ALIASES: Mapping[str, str] = {
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "granite_docling": "granite_docling_text",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}

# Model types without a cache of tokens, unless their file says that they decode.
ENCODERS = frozenset(
    word
    for line in (
        "albert align altclip bert big_bird bridgetower camembert canine chinese_clip clap clip",
        "convbert convnext data2vec-text deberta deberta-v2 detr dinov2 distilbert electra ernie",
        "esm flaubert flava fnet funnel groupvit hubert ibert layoutlm layoutlmv3 longformer luke",
        "megatron-bert mobilebert modernbert mpnet mra nezha nomic_bert nystromformer owlvit",
        "rembert resnet roberta roberta-prelayernorm roc_bert roformer sam siglip siglip2",
        "squeezebert swin tapas vilt vit wav2vec2 xlm xlm-roberta xlm-roberta-xl xmod yoso",
    )
    for word in line.split()
)
ENCODER_DECODERS = frozenset(
    word
    for line in (
        "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5",
        "m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet",
        "speech_to_text switch_transformers t5 t5gemma umt5 whisper",
    )
    for word in line.split()
)

# A model type, and what it has where its file does not say; lines that are indented go on.
_TABLE = """
afmoe: head_dim=128 sliding_window=1024 global_attn_every_n_layers=4 num_local_experts=64
    moe_intermediate_size=1408 num_dense_layers=1 num_shared_experts=2
apertus:
apertus1p5_text: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32
    intermediate_size=14336 vocab_size=266752 max_position_embeddings=65536
arcee:
bamba: num_key_value_heads=8 mamba_state=256 mamba_kernel=4 mamba_groups=1 mamba_expand=2
biogpt: tie_word_embeddings=yes
bitnet: num_key_value_heads=5
bloom: tie_word_embeddings=yes
codegen:
cohere: tie_word_embeddings=yes
cohere2: num_hidden_layers=40 hidden_size=8192 num_attention_heads=64 intermediate_size=22528
    vocab_size=256000 max_position_embeddings=8192 sliding_window=4096 tie_word_embeddings=yes
cwm: num_key_value_heads=8 head_dim=128 sliding_window=8192
dbrx:
deepseek_v2: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 intermediate_size=11008
    vocab_size=102400 max_position_embeddings=2048 kv_lora_rank=512 q_lora_rank=1536
    qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128 num_local_experts=64
    moe_intermediate_size=1407 n_shared_experts=2 first_k_dense_replace=0
deepseek_v3: num_hidden_layers=61 hidden_size=7168 num_attention_heads=128 num_key_value_heads=128
    intermediate_size=18432 vocab_size=129280 max_position_embeddings=4096 kv_lora_rank=512
    q_lora_rank=1536 qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128 num_local_experts=256
    moe_intermediate_size=2048 n_shared_experts=1 first_k_dense_replace=3
deepseek_v32: num_key_value_heads=128 head_dim=64 kv_lora_rank=512 q_lora_rank=1536
    qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128 index_head_dim=128 num_local_experts=256
    moe_intermediate_size=2048 n_shared_experts=1 first_k_dense_replace=3 index_n_heads=64
deepseek_v4: num_key_value_heads=1 head_dim=512 sliding_window=128 q_lora_rank=1024
    index_head_dim=128 num_local_experts=256 moe_intermediate_size=2048 n_shared_experts=1
diffllama:
dots1: num_key_value_heads=32 sliding_window=4096 max_window_layers=62 moe_intermediate_size=1408
    first_k_dense_replace=0
ernie4_5: num_key_value_heads=2 head_dim=128 tie_word_embeddings=yes
ernie4_5_moe: num_key_value_heads=4 tie_word_embeddings=yes num_local_experts=64
    moe_intermediate_size=1536 moe_num_shared_experts=2 moe_layer_start_index=1
exaone: num_key_value_heads=8
exaone4: num_key_value_heads=32 sliding_window=4096
exaone_moe: num_key_value_heads=32 sliding_window=4096 num_local_experts=64
    moe_intermediate_size=1024 num_shared_experts=1 first_k_dense_replace=1
falcon: tie_word_embeddings=yes multi_query=yes
falcon_h1: num_key_value_heads=8 mamba_state=256 mamba_kernel=4 mamba_groups=1 mamba_expand=2
    mamba_d_ssm=1024
falcon_mamba: tie_word_embeddings=yes mamba_state=16 mamba_kernel=4 mamba_expand=2
flex_olmo: num_local_experts=7
flint: num_key_value_heads=4 head_dim=128 sliding_window=513 num_local_experts=256
    moe_intermediate_size=512 shared_expert_intermediate_size=1024 decoder_sparse_step=1
gemma: num_hidden_layers=28 hidden_size=3072 num_attention_heads=16 num_key_value_heads=16
    head_dim=256 intermediate_size=24576 vocab_size=256000 max_position_embeddings=8192
    tie_word_embeddings=yes
gemma2: num_hidden_layers=26 hidden_size=2304 num_attention_heads=8 num_key_value_heads=4
    head_dim=256 intermediate_size=9216 vocab_size=256000 max_position_embeddings=8192
    sliding_window=4096 tie_word_embeddings=yes
gemma3_text: num_hidden_layers=26 hidden_size=2304 num_attention_heads=8 num_key_value_heads=4
    head_dim=256 intermediate_size=9216 vocab_size=262208 max_position_embeddings=131072
    sliding_window=4096 tie_word_embeddings=yes
gemma3n_text: num_hidden_layers=35 hidden_size=2048 num_attention_heads=8 num_key_value_heads=2
    head_dim=256 intermediate_size=16384 vocab_size=262400 max_position_embeddings=32768
    sliding_window=512 tie_word_embeddings=yes num_kv_shared_layers=15
    hidden_size_per_layer_input=256 vocab_size_per_layer_input=262144 laurel_rank=64
gemma4_text: num_hidden_layers=30 hidden_size=2304 num_attention_heads=8 num_key_value_heads=4
    head_dim=256 intermediate_size=9216 vocab_size=262144 max_position_embeddings=131072
    sliding_window=512 tie_word_embeddings=yes num_kv_shared_layers=0
    hidden_size_per_layer_input=256 vocab_size_per_layer_input=262144
gemma4_unified_text: num_hidden_layers=30 hidden_size=2304 num_attention_heads=8
    num_key_value_heads=4 head_dim=256 intermediate_size=9216 vocab_size=262144
    max_position_embeddings=262144 sliding_window=1024 tie_word_embeddings=yes
    num_kv_shared_layers=0
glm: num_key_value_heads=2 head_dim=128 attention_bias=yes
glm4: num_hidden_layers=40 hidden_size=4096 num_attention_heads=32 num_key_value_heads=2
    head_dim=128 intermediate_size=13696 vocab_size=151552 max_position_embeddings=131072
    attention_bias=yes
glm4_moe: num_hidden_layers=46 hidden_size=4096 num_attention_heads=96 num_key_value_heads=8
    intermediate_size=10944 vocab_size=151552 max_position_embeddings=131072 num_local_experts=128
    moe_intermediate_size=1408 n_shared_experts=1 first_k_dense_replace=1
glm4_moe_lite: num_key_value_heads=20 kv_lora_rank=512 q_lora_rank=768 qk_rope_head_dim=64
    qk_nope_head_dim=192 v_head_dim=256 num_local_experts=64 moe_intermediate_size=1536
    n_shared_experts=1
glm4v_moe_text: num_hidden_layers=46 hidden_size=4096 num_attention_heads=96 num_key_value_heads=8
    intermediate_size=10944 vocab_size=151424 max_position_embeddings=65536 attention_bias=yes
    num_local_experts=128 moe_intermediate_size=1408 n_shared_experts=1 first_k_dense_replace=1
glm4v_text: num_hidden_layers=40 hidden_size=4096 num_attention_heads=32 num_key_value_heads=2
    intermediate_size=13696 vocab_size=151552 max_position_embeddings=32768
glm_moe_dsa: num_key_value_heads=64 head_dim=64 kv_lora_rank=512 q_lora_rank=2048
    qk_rope_head_dim=64 qk_nope_head_dim=192 v_head_dim=256 index_head_dim=128 num_local_experts=256
    moe_intermediate_size=2048 n_shared_experts=1 first_k_dense_replace=3 index_n_heads=32
glm_ocr_text: num_hidden_layers=16 hidden_size=1024 num_attention_heads=16 num_key_value_heads=8
    intermediate_size=4096 vocab_size=59392 max_position_embeddings=131072
gpt2: num_hidden_layers=12 hidden_size=768 num_attention_heads=12 vocab_size=50257
    max_position_embeddings=1024 tie_word_embeddings=yes
gpt_bigcode: tie_word_embeddings=yes multi_query=yes
gpt_neo: tie_word_embeddings=yes window_size=256
gpt_neox: attention_bias=yes
gpt_oss: num_hidden_layers=36 hidden_size=2880 num_attention_heads=64 num_key_value_heads=8
    head_dim=64 intermediate_size=2880 vocab_size=201088 max_position_embeddings=131072
    sliding_window=128 num_local_experts=128 attention_bias=yes
gptj:
granite: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 intermediate_size=11008
    vocab_size=32000 max_position_embeddings=2048
granite_docling_text: num_hidden_layers=28 hidden_size=1024 num_attention_heads=16
    num_key_value_heads=4 intermediate_size=2048 vocab_size=133800 max_position_embeddings=32768
    tie_word_embeddings=yes
granite_swa: num_key_value_heads=4 sliding_window=128 tie_word_embeddings=yes
granitemoe: num_local_experts=8
granitemoe_swa: sliding_window=128 num_local_experts=8 shared_intermediate_size=0
granitemoehybrid: mamba_state=256 mamba_kernel=4 mamba_groups=1 mamba_expand=2 num_local_experts=8
    shared_intermediate_size=1024
granitemoeshared: num_local_experts=8 shared_intermediate_size=0
helium: num_key_value_heads=20 head_dim=128
hunyuan_v1_dense:
hunyuan_v1_moe: num_local_experts=1
hy_v3: num_key_value_heads=8 head_dim=128 num_local_experts=192 moe_intermediate_size=1536
    num_shared_experts=1
internlm3: num_key_value_heads=2 head_dim=128
iquestcoder: num_key_value_heads=8 head_dim=128
jais2: attention_bias=yes mlp_bias=yes
jamba: num_key_value_heads=8 attn_layer_period=8 attn_layer_offset=4 expert_layer_period=2
    expert_layer_offset=1 mamba_state=16 mamba_kernel=4 mamba_expand=2 num_local_experts=16
kimi_linear: num_key_value_heads=32 kv_lora_rank=512 qk_rope_head_dim=64 qk_nope_head_dim=128
    v_head_dim=128 linear_conv_kernel_dim=4 num_local_experts=256 moe_intermediate_size=1024
    n_shared_experts=1
kolibri1: num_key_value_heads=4 head_dim=128 sliding_window=513 num_local_experts=384
    moe_intermediate_size=512 shared_expert_intermediate_size=512
lara_mini: num_key_value_heads=4 head_dim=128 sliding_window=512 tie_word_embeddings=yes
    linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128
    linear_num_key_heads=8 linear_num_value_heads=16 num_local_experts=128 moe_intermediate_size=512
    shared_expert_intermediate_size=512
lfm2: num_key_value_heads=8 tie_word_embeddings=yes conv_L_cache=3
lfm2_moe: num_key_value_heads=8 tie_word_embeddings=yes conv_L_cache=3 num_local_experts=32
    moe_intermediate_size=1792 num_dense_layers=2
llama: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 intermediate_size=11008
    vocab_size=32000 max_position_embeddings=2048
llama4_text: num_hidden_layers=48 hidden_size=5120 num_attention_heads=40 num_key_value_heads=8
    head_dim=128 intermediate_size=8192 vocab_size=202048 max_position_embeddings=131072
    attention_chunk_size=8192 no_rope_layer_interval=4 interleave_moe_layer_step=1
    num_local_experts=16 intermediate_size_mlp=16384
longcat_flash: head_dim=64 kv_lora_rank=512 q_lora_rank=1536 qk_rope_head_dim=64
    qk_nope_head_dim=128 v_head_dim=128 num_local_experts=512
mamba: tie_word_embeddings=yes mamba_state=16 mamba_kernel=4 mamba_expand=2
mamba2: mamba_state=128 mamba_kernel=4 mamba_head_dim=64 mamba_groups=8 mamba_expand=2
    mamba_heads=128
mellum: num_key_value_heads=4 head_dim=128 sliding_window=1024 num_local_experts=64
    moe_intermediate_size=896
mimo_v2_flash: num_key_value_heads=4 head_dim=192 sliding_window=129 v_head_dim=128
    num_local_experts=256 moe_intermediate_size=2048
minicpm3: num_key_value_heads=40 tie_word_embeddings=yes kv_lora_rank=256 q_lora_rank=768
    qk_rope_head_dim=32 qk_nope_head_dim=64
minimax: num_key_value_heads=8 num_local_experts=8
minimax_m2: num_key_value_heads=8 head_dim=128 num_local_experts=256
ministral: num_key_value_heads=8 sliding_window=4096
ministral3: num_hidden_layers=34 hidden_size=4096 num_attention_heads=32 num_key_value_heads=8
    head_dim=128 intermediate_size=14336 vocab_size=131072 max_position_embeddings=262144
mistral: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 num_key_value_heads=8
    intermediate_size=14336 vocab_size=32000 max_position_embeddings=131072 sliding_window=4096
mistral4: num_hidden_layers=36 hidden_size=4096 num_attention_heads=32 num_key_value_heads=32
    intermediate_size=12288 vocab_size=131072 max_position_embeddings=1048576 kv_lora_rank=256
    q_lora_rank=1024 qk_rope_head_dim=64 qk_nope_head_dim=64 v_head_dim=128 num_local_experts=128
    moe_intermediate_size=2048 n_shared_experts=1 first_k_dense_replace=0
mixtral: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 num_key_value_heads=8
    intermediate_size=14336 vocab_size=32000 max_position_embeddings=131072 num_local_experts=8
mllama_text_model: num_hidden_layers=40 hidden_size=4096 num_attention_heads=32
    num_key_value_heads=8 intermediate_size=14336 vocab_size=128256 max_position_embeddings=131072
mpt: tie_word_embeddings=yes
nanochat:
nemotron:
nemotron_h: hidden_size=4096 num_attention_heads=32 num_key_value_heads=8 head_dim=128
    intermediate_size=21504 vocab_size=131072 max_position_embeddings=4096 mamba_state=128
    mamba_kernel=4 mamba_head_dim=64 mamba_groups=8 num_local_experts=8 moe_intermediate_size=7688
    n_shared_experts=1 mamba_heads=128 moe_shared_expert_intermediate_size=7688
olmo:
olmo2:
olmo3: sliding_window=4096
olmo_hybrid: linear_conv_kernel_dim=4
olmoe: num_local_experts=64
opt: num_hidden_layers=12 hidden_size=768 num_attention_heads=12 intermediate_size=3072
    vocab_size=50272 max_position_embeddings=2048 tie_word_embeddings=yes
paddleocr_vl_text: num_hidden_layers=18 hidden_size=1024 num_attention_heads=16
    num_key_value_heads=2 head_dim=128 intermediate_size=3072 vocab_size=103424
    max_position_embeddings=131072 tie_word_embeddings=yes
persimmon:
phi: num_hidden_layers=24 hidden_size=2048 num_attention_heads=32 intermediate_size=8192
    vocab_size=51200 max_position_embeddings=2048
phi3: num_hidden_layers=32 hidden_size=3072 num_attention_heads=32 intermediate_size=8192
    vocab_size=32064 max_position_embeddings=4096
phi4_multimodal: num_key_value_heads=8
phimoe: num_key_value_heads=8 num_local_experts=16
qwen2: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 num_key_value_heads=32
    intermediate_size=22016 vocab_size=151936 max_position_embeddings=32768 sliding_window=4096
    max_window_layers=28
qwen2_5_omni_text: num_hidden_layers=28 hidden_size=3584 num_attention_heads=28
    num_key_value_heads=4 intermediate_size=18944 vocab_size=152064 max_position_embeddings=32768
    sliding_window=32768 max_window_layers=28
qwen2_5_vl_text: num_hidden_layers=80 hidden_size=8192 num_attention_heads=64
    num_key_value_heads=8 intermediate_size=29568 vocab_size=152064 max_position_embeddings=32768
    sliding_window=4096 max_window_layers=80
qwen2_moe: num_hidden_layers=24 hidden_size=2048 num_attention_heads=16 num_key_value_heads=16
    intermediate_size=5632 vocab_size=151936 max_position_embeddings=32768 sliding_window=4096
    max_window_layers=28 num_local_experts=60 moe_intermediate_size=1408
    shared_expert_intermediate_size=5632 decoder_sparse_step=1 qkv_bias=yes
qwen2_vl_text: num_hidden_layers=80 hidden_size=8192 num_attention_heads=64 num_key_value_heads=8
    intermediate_size=29568 vocab_size=152064 max_position_embeddings=32768 sliding_window=4096
    max_window_layers=80
qwen3: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 num_key_value_heads=32
    head_dim=128 intermediate_size=22016 vocab_size=151936 max_position_embeddings=32768
    sliding_window=4096 max_window_layers=28
qwen3_5_moe_text: num_hidden_layers=40 hidden_size=2048 num_attention_heads=16
    num_key_value_heads=2 head_dim=256 vocab_size=248320 max_position_embeddings=32768
    linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128
    linear_num_key_heads=16 linear_num_value_heads=32 num_local_experts=256
    moe_intermediate_size=512 shared_expert_intermediate_size=512
qwen3_5_text: num_hidden_layers=32 hidden_size=4096 num_attention_heads=16 num_key_value_heads=4
    head_dim=256 intermediate_size=12288 vocab_size=248320 max_position_embeddings=32768
    linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128
    linear_num_key_heads=16 linear_num_value_heads=32
qwen3_moe: num_hidden_layers=24 hidden_size=2048 num_attention_heads=32 num_key_value_heads=4
    intermediate_size=6144 vocab_size=151936 max_position_embeddings=32768 sliding_window=4096
    num_local_experts=128 moe_intermediate_size=768 decoder_sparse_step=1
qwen3_next: num_key_value_heads=2 head_dim=256 linear_conv_kernel_dim=4 linear_key_head_dim=128
    linear_value_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
    num_local_experts=512 moe_intermediate_size=512 shared_expert_intermediate_size=512
    decoder_sparse_step=1
qwen3_omni_moe_text: num_hidden_layers=28 hidden_size=2048 num_attention_heads=28
    num_key_value_heads=4 intermediate_size=18944 vocab_size=3584 max_position_embeddings=32768
    num_local_experts=128 moe_intermediate_size=768 decoder_sparse_step=1
qwen3_vl_moe_text: num_hidden_layers=24 hidden_size=2048 num_attention_heads=16
    num_key_value_heads=16 intermediate_size=5632 vocab_size=151936 max_position_embeddings=128000
    tie_word_embeddings=yes num_local_experts=60 moe_intermediate_size=1408 decoder_sparse_step=1
qwen3_vl_text: num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 num_key_value_heads=32
    head_dim=128 intermediate_size=22016 vocab_size=151936 max_position_embeddings=128000
recurrent_gemma: sliding_window=2048 tie_word_embeddings=yes conv1d_width=4
sarvam_mla: kv_lora_rank=512 qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128
    num_local_experts=128 moe_intermediate_size=2048 n_shared_experts=1 first_k_dense_replace=1
sarvam_moe: num_key_value_heads=4 head_dim=64 num_local_experts=128 moe_intermediate_size=1024
    n_shared_experts=1 first_k_dense_replace=1
seed_oss: num_key_value_heads=8 head_dim=128 attention_bias=yes
smollm3: num_hidden_layers=36 hidden_size=2048 num_attention_heads=16 num_key_value_heads=4
    intermediate_size=11008 vocab_size=128256 max_position_embeddings=32768
    tie_word_embeddings=yes no_rope_layer_interval=4
solar_open: num_key_value_heads=8 head_dim=128 num_local_experts=128 moe_intermediate_size=1280
    n_shared_experts=1
stablelm: num_key_value_heads=32
starcoder2: num_key_value_heads=2 tie_word_embeddings=yes use_bias=yes
vaultgemma: num_key_value_heads=4 head_dim=256 sliding_window=4096 tie_word_embeddings=yes
xglm: tie_word_embeddings=yes
youtu: num_key_value_heads=16 tie_word_embeddings=yes kv_lora_rank=512 q_lora_rank=1536
    qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128
zamba: num_key_value_heads=16 tie_word_embeddings=yes attn_layer_period=6 attn_layer_offset=4
    mamba_state=16 mamba_kernel=4 mamba_expand=2
zamba2: tie_word_embeddings=yes mamba_state=64 mamba_kernel=4 mamba_groups=1 mamba_expand=2
"""


def _parse(table: str) -> dict[str, dict[str, int | bool]]:
    defaults: dict[str, dict[str, int | bool]] = {}
    current: dict[str, int | bool] = {}
    for line in table.strip().splitlines():
        words = line.split()
        if not line.startswith(" "):
            current = defaults[words.pop(0).removesuffix(":")] = {}
        for word in words:
            name, _, value = word.partition("=")
            current[name] = True if value == "yes" else int(value)
    return defaults


DEFAULTS: Mapping[str, Mapping[str, int | bool]] = _parse(_TABLE)
