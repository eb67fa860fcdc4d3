"""Writes small random models with a tokenizer of their own, as a hub would hand them out.

    python tests/tiny_models.py llama|gemma3 DIRECTORY [--layers N]

A process of its own makes them, so whoever wants one need not have torch loaded, and what the
libraries print or warn of on the way stays out of the way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COMPILE_OPTIONS", "compile_llama", "write_model"]

END_OF_TEXT, USER, MODEL = "<end_of_text>", "<user>", "<model>"
CHAT_TEMPLATE = (
    "{% for message in messages %}" + USER + "{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + MODEL + "{% endif %}"
)
_TEXT = "The cache holds the keys and the values of every token that was read, in blocks."
# A block of 128 tokens of one cache tensor is 256 KiB of float32, so that counts and budgets
# differ by something: every tensor is rounded up to 2 MiB.
_SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}

# 64 blocks for 4 sequences of 2,048 tokens.
COMPILE_OPTIONS = ("--batch-size", "4", "--max-seq-len", "2048", "--kvcache-partition-len", "128")


def compile_llama(directory: Path, *, num_layers: int) -> Path:
    """Return an artifact, made in `directory` with the installed command."""
    model, artifact = directory / f"llama_{num_layers}", directory / f"artifact_{num_layers}"
    write_model("llama", model, num_layers=num_layers)
    command = os.path.join(sysconfig.get_path("scripts"), "reblock")
    line = [command, "compile", str(model), "--output-dir", str(artifact), *COMPILE_OPTIONS]
    subprocess.run(line, check=True, capture_output=True)
    return artifact


def write_model(family: str, directory: Path, *, num_layers: int | None = None) -> None:
    """Write a random model of `family`, "llama" or "gemma3", to `directory`."""
    arguments = [sys.executable, __file__, family, str(directory)]
    if num_layers is not None:
        arguments += ["--layers", str(num_layers)]
    subprocess.run(arguments, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("family", choices=["llama", "gemma3"])
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    vocabulary = _write_tokenizer(args.directory)
    _write_weights(args.family, args.directory, vocabulary, args.layers)


def _write_tokenizer(directory: str) -> int:
    """Write a byte-level BPE tokenizer with a chat template and return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    wrapper: Any = PreTrainedTokenizerFast
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT, USER, MODEL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    wrapped = wrapper(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    return len(wrapped)


def _write_weights(family: str, directory: str, vocabulary: int, num_layers: int | None) -> None:
    import torch
    import transformers as library

    transformers: Any = library
    own: dict[str, Any] = {"num_hidden_layers": num_layers or 2}
    name = "LlamaConfig"
    if family == "gemma3":
        name = "Gemma3TextConfig"
        own = {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 64,
        }
    config = getattr(transformers, name)(
        **_SHAPES,
        **own,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        # Weights as small as they usually start would answer with one token for ever.
        initializer_range=0.2,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Score 0 for the end of the text, which the best of 300 others beats: so an answer has
        # as many tokens as were asked for.
        model.get_output_embeddings().weight[0] = 0
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
