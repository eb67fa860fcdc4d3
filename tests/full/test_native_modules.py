"""A model whose linear layers are replaced answers as before."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from torch import nn

from reblock.backends.torch.native import replace_linears, rounded_linears
from reblock.backends.torch.native.modules import PackedEmbedding, PackedLinear

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("native_operators")]

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS = {
    "tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "untied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True),
    "scaled embedding": transformers.Gemma3TextConfig(**SMALL),
    "transposed": transformers.GPT2Config(
        vocab_size=100, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}
# Relative, of the logits: rounding; bfloat16 weights are off by 2^-9, int8 by 1/254 of the largest.
BOUNDS = {None: 1e-5, torch.bfloat16: 1e-2, torch.int8: 4e-2}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        answer: torch.Tensor = model(ids).logits
    return answer


@pytest.mark.parametrize("weight_dtype", BOUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_replaced_linears_answer_as_the_model_did(
    name: str, weight_dtype: torch.dtype | None
) -> None:
    model = make(name)
    expected = logits(model)
    replace_linears(model, weight_dtype)
    error = torch.linalg.vector_norm(logits(model) - expected) / torch.linalg.vector_norm(expected)
    assert float(error) < BOUNDS[weight_dtype]
    assert not [m for m in model.modules() if type(m) is nn.Linear]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rounded_model_answers_as_replaced_linears_do_and_then_as_before(
    name: str, weight_dtype: torch.dtype
) -> None:
    model = make(name)
    before = logits(model)
    with rounded_linears(model, weight_dtype):
        rounded = logits(model)
    assert torch.equal(logits(model), before)
    replace_linears(model, weight_dtype)
    size = torch.linalg.vector_norm(before)
    # As exact as without rounding, where the model that was not rounded would be refused.
    assert float(torch.linalg.vector_norm(logits(model) - rounded) / size) < 1e-5
    assert float(torch.linalg.vector_norm(before - rounded) / size) > 1e-3


def test_a_model_that_is_not_to_be_rounded_is_left_alone() -> None:
    model = make("tied")
    before = logits(model)
    with rounded_linears(model, None):
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("weight_dtype", BOUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_on_the_meta_device_gets_the_same_tensors(
    name: str, weight_dtype: torch.dtype | None
) -> None:
    model = make(name, torch.bfloat16)
    with torch.device("meta"):
        shapes = make(name, torch.bfloat16)
    replace_linears(model, weight_dtype)
    replace_linears(shapes, weight_dtype)

    def described(of: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(key, tensor.shape, tensor.dtype) for key, tensor in of.named_parameters()]

    assert described(shapes) == described(model)


@pytest.mark.parametrize("name", ["tied", "scaled embedding"])
def test_a_tied_embedding_reads_the_packed_weight_of_the_head(name: str) -> None:
    model = make(name)
    before = sum(parameter.numel() for parameter in model.parameters())
    replace_linears(model)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.weight is model.get_submodule("lm_head").weight
    # 100 tokens are filled up to 112.
    assert sum(parameter.numel() for parameter in model.parameters()) == before + 12 * 64


def test_a_scaled_embedding_keeps_a_copy_where_its_type_would_change() -> None:
    model = make("scaled embedding")
    replace_linears(model, torch.int8)
    assert model.get_input_embeddings().weight.dtype == torch.float32  # type: ignore[operator]


def test_two_layers_that_share_a_weight_share_the_packed_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    replace_linears(model)
    assert isinstance(model[0], PackedLinear)
    assert model[0].weight is model[1].weight
    assert model[0].bias is not model[1].bias
