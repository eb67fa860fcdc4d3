"""The artifact's tokenizer: text to tokens, tokens to text, and the tokens that end an answer."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, cast

from reblock.artifact.files import read_file
from reblock.engine.detokenizer import Detokenizer
from reblock.errors import CorruptArtifact, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Tokenizer", "read_eos_token_ids"]


class Tokenizer:
    """Wraps the Hugging Face tokenizer that lies in an artifact, the one in `directory`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, directory: str) -> None:
        self._tokenizer = tokenizer
        self._directory = directory
        self._skipped_ids = _special_ids(tokenizer)

    @classmethod
    def load(cls, directory: str) -> Tokenizer:
        """Read the tokenizer of an artifact, from its files alone: no network, no code of others.

        Raises:
            CorruptArtifact: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            return cls(tokenizer, directory=directory)
        except Exception as error:  # the tokenizers library raises no narrower class
            raise CorruptArtifact(f"has no readable tokenizer: {error}", path=directory) from error

    @property
    def has_chat_template(self) -> bool:
        """Whether the model expects its prompts as messages of a chat."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token that the tokenizer itself names as the end of a text, if it names one."""
        eos_token_id = self._tokenizer.eos_token_id
        return () if eos_token_id is None else (int(eos_token_id),)

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            text: the prompt; a message of the user where the model has a chat template.
            raw: leave the chat template out, so that the model continues `text` itself.

        Raises:
            UsageError: `text` holds characters that are no Unicode text, or comes to no tokens.
            CorruptArtifact: the chat template or the tokenizer's configuration fails.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not valid text: {error}") from error
        try:
            if self.has_chat_template and not raw:
                token_ids = self._encode_message(text)
            else:
                token_ids = self._tokenizer(text, verbose=False)["input_ids"]
        except Exception as error:  # a chat template is a program, and may fail in any way
            raise CorruptArtifact(
                f"its chat template or tokenizer fails on a prompt: {error!r}",
                path=self._directory,
            ) from error
        if not token_ids:
            raise UsageError(f"the prompt {text!r} comes to no tokens; write at least one word")
        return [int(token_id) for token_id in token_ids]

    def _encode_message(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        token_ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return cast("list[int]", token_ids)

    def detokenizer(self, prompt_ids: list[int], *, raw: bool = False) -> Detokenizer:
        """Start turning the answer to `prompt_ids` into text.

        A raw answer continues the prompt, so a space between the two belongs to it; an answer in
        a chat is a text of its own.
        """
        return Detokenizer(
            self._decode,
            skipped_ids=self._skipped_ids,
            context_ids=prompt_ids if raw or not self.has_chat_template else (),
        )

    def _decode(self, token_ids: list[int]) -> str:
        try:
            # Cleaning up spaces would change text that was shown already.
            text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        except Exception as error:  # the tokenizers library raises no narrower class
            raise CorruptArtifact(
                f"its tokenizer fails on an answer: {error!r}", path=self._directory
            ) from error
        return cast("str", text)


def read_eos_token_ids(directory: str) -> tuple[int, ...]:
    """The tokens that end an answer, as `generation_config.json` says, or else `config.json`.

    Empty where neither names one. Needs no torch and no transformers.

    Raises:
        CorruptArtifact: one of the files is not JSON, or holds something else than token ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            continue
        try:
            config = json.loads(read_file(path))
        except (ValueError, RecursionError) as error:
            raise CorruptArtifact(f"is not valid JSON: {error}", path=path) from error
        eos_token_ids = _eos_of(config)
        if eos_token_ids is None:
            continue
        if not all(type(token_id) is int and token_id >= 0 for token_id in eos_token_ids):
            raise CorruptArtifact(f"eos_token_id holds {eos_token_ids!r}", path=path)
        return tuple(eos_token_ids)
    return ()


def _eos_of(config: object) -> list[int] | None:
    """`eos_token_id` as a list; models of several parts have it in their `text_config`."""
    if not isinstance(config, dict):
        return None
    eos = config.get("eos_token_id")
    if eos is None and "text_config" in config:
        return _eos_of(config["text_config"])
    return eos if isinstance(eos, list) or eos is None else [eos]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What `skip_special_tokens` would leave out when decoding."""
    added = tokenizer.added_tokens_decoder
    special = {token_id for token_id, token in added.items() if token.special}
    return frozenset(special.union(tokenizer.all_special_ids))
