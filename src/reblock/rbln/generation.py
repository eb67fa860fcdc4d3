"""A compiled model that generates text as a model of transformers does.

The loop, the processors of logits, the criteria to stop and the streamers are transformers' own.
What is ours is one step of the loop, run by the compiled programs on the paged cache.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AutoConfig, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutput

from reblock.artifact.reader import open_artifact
from reblock.artifact.transaction import Sharing, begin_edit, check_destination, copy_with
from reblock.backends.torch import load_runner
from reblock.engine.block_pool import BlockPool
from reblock.errors import CorruptArtifact, InvalidOption, UsageError
from reblock.progress import SilentProgress
from reblock.rbln.prompts import check_ids, check_inputs, read_prompts
from reblock.rbln.rows import Rows

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedConfig

    from reblock.artifact.reader import Artifact

__all__ = ["RBLNModelForCausalLM"]

# Its annotations say that only a model of transformers may be one.
_Mixin: Any = GenerationMixin

_GENERATION_NAME = "generation_config.json"
_ONE_WAY = "tokens are chosen one at a time for each sequence: greedily, or by do_sample=True"
_OWN_CACHE = "the KV cache is compiled into the model, and every call of generate starts afresh"

# Arguments of generate, with the reason why they are refused.
_REFUSED_ARGUMENTS = {
    "assistant_model": f"assisted decoding is not supported; {_ONE_WAY}",
    "assistant_tokenizer": f"assisted decoding is not supported; {_ONE_WAY}",
    "cache": _OWN_CACHE,
    "cache_params": _OWN_CACHE,
    "custom_generate": f"other loops are not supported; {_ONE_WAY}",
    "inputs_embeds": "the programs take token ids",
    "negative_prompt_attention_mask": "guidance would need the model to run on two prompts",
    "negative_prompt_ids": "guidance would need the model to run on two prompts",
    "past_key_values": _OWN_CACHE,
    "position_ids": "positions are counted, of the tokens that attention_mask shows",
    "synced_gpus": "the programs run on one cpu",
}
# Values of a GenerationConfig that are accepted, where others are refused with the reason.
_REFUSED_SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "cache_config": ((None,), _OWN_CACHE),
    "cache_implementation": ((None,), _OWN_CACHE),
    "compile_config": ((None,), "the model is compiled already"),
    "guidance_scale": ((None, 1, 1.0), "guidance would need the model to run on two prompts"),
    "output_attentions": ((None, False), "the programs return logits only"),
    "output_hidden_states": ((None, False), "the programs return logits only"),
    "prefill_chunk_size": ((None,), "prompts are read in chunks of the compiled size"),
    "token_healing": ((None, False), "it would need generate to run within itself"),
}
_MODES: tuple[GenerationMode, ...] = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class RBLNModelForCausalLM(_Mixin):  # type: ignore[misc]  # a base of unknown type
    """A causal language model, compiled into the artifact in `model_save_dir`.

    One call of `generate` runs at a time; another thread's waits for it.
    """

    main_input_name = "input_ids"
    training = False
    _is_stateful = False

    def __init__(self, artifact: Artifact, *, creates_runtimes: bool) -> None:
        """Load an artifact of the torch backend; its programs only where `creates_runtimes`.

        Raises:
            CorruptArtifact: The description of the model in it cannot be read.
            HostMismatch, CorruptArtifact, DoesNotFit: as `load_runner`.
        """
        directory = artifact.directory
        self.model_save_dir = os.path.abspath(directory)
        self.config = _read_config(directory)
        self.generation_config = self._read_generation_config(artifact)
        self._loaded_generation = self.generation_config.to_dict()
        self.dtype: torch.dtype = getattr(torch, artifact.config.dtype)
        self.device = torch.device("cpu")
        self.rbln_config = _read_rbln_config(artifact)
        self._runner = load_runner(artifact) if creates_runtimes else None
        self._num_blocks = artifact.config.kvcache_num_blocks
        if self._runner is not None:
            self._num_blocks = self._runner.limits.num_blocks
            self._pool = BlockPool(self._num_blocks)
        self._max_seq_len = artifact.config.max_seq_len
        self._rows: Rows | None = None
        self._lock = threading.RLock()

    def _read_generation_config(self, artifact: Artifact) -> GenerationConfig:
        directory = artifact.directory
        if not os.path.exists(os.path.join(directory, _GENERATION_NAME)):
            return GenerationConfig.from_model_config(self.config)
        try:
            config = GenerationConfig.from_pretrained(directory, local_files_only=True)
            # Both are of the cache that transformers would make, in place of which there is ours.
            config.cache_implementation = None
            if config.max_length is not None:
                config.max_length = min(config.max_length, artifact.config.max_seq_len)
        # A value of a wrong type fails wherever it is met.
        except Exception as error:
            path = os.path.join(directory, _GENERATION_NAME)
            raise CorruptArtifact(f"cannot be read: {error}", path=path) from error
        return config

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        **keywords: Any,
    ) -> Any:
        """Return prompts and answers as transformers' `generate` does, with the same arguments.

        Padding, which `attention_mask` hides, is left out of what the model reads.

        Raises:
            RequestTooLarge: More sequences, tokens or blocks are needed than there is room for.
            InvalidOption: An argument cannot be honoured; the message says why.
            UsageError: Nothing can be generated from such inputs, or by a model like this.
        """
        for name, reason in _REFUSED_ARGUMENTS.items():
            value = keywords.pop(name, None)
            if value is not None and value is not False:
                raise InvalidOption(f"generate: {name} is not supported: {reason}", option=name)
        check_inputs(inputs if inputs is not None else keywords.get("input_ids"))
        if self._runner is None:
            raise UsageError("the model was loaded with create_runtimes=False, so it cannot run")
        with self._lock:
            if self._rows is not None:
                raise UsageError("generate was called from within generate of the same model")
            try:
                return super().generate(
                    inputs,
                    generation_config,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                    synced_gpus=False,
                    **keywords,
                )
            finally:
                self._release()

    def generate_batch(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Refuse what would need other programs.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "generate_batch is not supported: it brings a cache of its own; to serve many requests "
            "from one cache use reblock.engine.Engine, or generate for up to batch_size rows"
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, return_dict: bool = True
    ) -> CausalLMOutput:
        """Take one step of `generate`: logits [rows, 1, vocabulary] after the last tokens.

        Raises:
            UsageError: `generate` is not running, or the inputs make no sense.
        """
        rows = self._rows
        if rows is None or not return_dict:
            raise UsageError(
                "the model is run by generate alone: its programs return the logits of the last "
                "token, and their cache belongs to a running call of generate"
            )
        check_ids(input_ids, rows.vocab_size)
        if rows.has_started:
            logits = rows.decode(input_ids[:, -1].tolist())
        else:
            logits = torch.stack(rows.prefill(read_prompts(input_ids, attention_mask)))
        return CausalLMOutput(logits=logits[:, None])

    def __call__(self, *arguments: Any, **keywords: Any) -> CausalLMOutput:
        """Call `forward`."""
        return self.forward(*arguments, **keywords)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **keywords: Any,  # noqa: ARG002  what concerns a cache of transformers
    ) -> dict[str, Any]:
        """Return what `forward` is called with."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **keywords: Any
    ) -> None:
        """Write a copy of the artifact, as it lies on the disk now, with `generation_config`.

        The copy appears in one step. Large files may be shared with the artifact.

        Raises:
            InvalidDestination, DestinationExists: It cannot go there.
            BadArtifact: The artifact is not there any more, or it is damaged.
            EditFailed: The system refused a write.
        """
        if push_to_hub or keywords:
            name = "push_to_hub" if push_to_hub else next(iter(keywords))
            raise InvalidOption(f"save_pretrained: {name} is not supported", option=name)
        destination = os.fspath(save_directory)
        check_destination(destination, source=self.model_save_dir)
        is_changed = self.generation_config.to_dict() != self._loaded_generation

        def write(directory: str) -> None:
            if is_changed:
                self.generation_config.save_pretrained(directory)

        with begin_edit(self.model_save_dir) as lock:
            copy_with(
                lock,
                destination,
                names=[_GENERATION_NAME] if is_changed else [],
                write=write,
                check=_check_copy,
                sharing=Sharing.SHARE,
                progress=SilentProgress(),
            )

    def get_kvcache_num_blocks(self) -> int:
        """Return how many blocks the KV cache has."""
        return self._num_blocks

    def can_generate(self) -> bool:
        """Return True, as scripts ask."""
        return True

    def eval(self) -> RBLNModelForCausalLM:
        """Return the model, which is always in this mode."""
        return self

    def to(self, *arguments: Any, **keywords: Any) -> RBLNModelForCausalLM:
        """Return the model, where it is asked to be what it is.

        Raises:
            InvalidOption: Another device or dtype is asked for.
        """
        for value in [*arguments, *keywords.values()]:
            is_type = isinstance(value, torch.dtype)
            if isinstance(value, bool) or value is None or (is_type and value == self.dtype):
                continue
            if is_type or torch.device(value).type != "cpu":
                raise InvalidOption(
                    f"to({value!r}): the programs are compiled for the cpu and {self.dtype}; "
                    "compile the model again for another dtype",
                    option="dtype" if is_type else "device",
                )
        return self

    def _release(self) -> None:
        if self._rows is not None:
            self._rows.release()
        self._rows = None

    # What follows stands in for methods of GenerationMixin, in the order in which it calls them.

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **keywords: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Refuse what cannot be honoured, before anything else is made of it."""
        config, rest = super()._prepare_generation_config(generation_config, **keywords)
        for name, (accepted, reason) in _REFUSED_SETTINGS.items():
            if (value := getattr(config, name, None)) not in accepted:
                raise InvalidOption(
                    f"generate: {name}={value!r} is not supported: {reason}", option=name
                )
        mode = config.get_generation_mode()
        if mode not in _MODES:
            raise InvalidOption(
                f"generate: {mode.value} is not supported: {_ONE_WAY}", option="generation_config"
            )
        return config, rest

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Refuse every argument that nothing would look at."""
        for name, value in model_kwargs.items():
            if value is not None and name not in ("input_ids", "attention_mask"):
                raise InvalidOption(
                    f"generate: argument {name!r} is not supported; beside the settings of a "
                    "GenerationConfig there are input_ids, attention_mask, logits_processor, "
                    "stopping_criteria, prefix_allowed_tokens_fn, streamer and tokenizer",
                    option=name,
                )

    def _prepare_generated_length(
        self, *, generation_config: GenerationConfig, has_default_max_length: bool, **keywords: Any
    ) -> GenerationConfig:
        """End at `max_seq_len` where nobody asked for a length."""
        config: GenerationConfig = super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            **keywords,
        )
        if has_default_max_length and config.max_new_tokens is None:
            config.max_length = min(config.max_length, self._max_seq_len)
        return config

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,  # noqa: ARG002  transformers' names
        batch_size: int,
        max_cache_length: int,  # noqa: ARG002
    ) -> None:
        """Take the blocks for all rows, or refuse the call."""
        mask = model_kwargs.get("attention_mask")
        num_rows = batch_size * generation_config.num_return_sequences
        hidden = [0] * num_rows if mask is None else (mask == 0).sum(dim=-1).tolist()
        assert self._runner is not None  # checked by generate
        num_tokens = [max(1, generation_config.max_length - count) for count in hidden]
        self._rows = Rows(self._runner, self._pool, num_tokens)

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        """Change nothing: a compiled model has nothing to switch."""
        return nullcontext()


def _read_config(directory: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    # As above.
    except Exception as error:
        raise CorruptArtifact(f"its config.json cannot be read: {error}", path=directory) from error
    return config


def _check_copy(directory: str, _changed_in: str | None) -> None:
    open_artifact(directory)


def _read_rbln_config(artifact: Artifact) -> Any:
    from reblock.rbln import RBLNDecoderOnlyModelForCausalLMConfig

    return RBLNDecoderOnlyModelForCausalLMConfig.load(artifact.directory)
