"""What is asked of the engine, and the state of one request while it is served."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from reblock.errors import InvalidOption, UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsIndex

    from reblock.engine.prefix_cache import Prefix

__all__ = ["FinishReason", "SamplingParams", "Sequence", "parse_token_ids"]

FinishReason = Literal["stop", "length", "error"]
"""Why a request ended.

"stop" is an end-of-sequence token or a stop string, "length" all the tokens it asked for, "error"
a detokenizer that raised."""

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature could leave the range of a 32-bit float."""

MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_NEW_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and how many at most.

    Raises `InvalidOption`, which names the field, for a value out of range.
    """

    max_new_tokens: int
    """Tokens of the answer, at most; where none ends it before, as many."""
    temperature: float = 0.0
    """0 takes the most probable token each time; the three fields below are without effect then."""
    top_k: int | None = None
    """Sample from the k most probable tokens only.

    Here and with `top_p`, tokens that are as probable as the last of them are kept as well."""
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Sample from tokens at least this probable, relative to the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the answer so far less probable."""
    seed: int | None = None
    """Makes sampling repeatable, up to 2**63 - 1; None draws a new seed."""
    ignore_eos: bool = False
    """Go on to `max_new_tokens` whatever the model says."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer where they begin; they are no part of it."""
    logprobs: int | None = None
    """Tell the log probability of each token and of this many of the most probable ones.

    They are the model's own, before temperature and all else above."""

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, minimum=1, maximum=MAX_NEW_TOKENS)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        if 0 < self.temperature < MIN_TEMPERATURE:
            _refuse("temperature", self.temperature, f"0 or at least {MIN_TEMPERATURE}")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, minimum=1)
        if self.top_p is not None:
            _check_float("top_p", self.top_p, 0.0, 1.0)
            if self.top_p == 0:
                _refuse("top_p", self.top_p, "above 0 and at most 1")
        if self.min_p is not None:
            _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        if self.seed is not None:
            _check_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        _check_bool("ignore_eos", self.ignore_eos)
        if not isinstance(self.stop, tuple) or not all(map(_is_text, self.stop)):
            _refuse("stop", self.stop, "a tuple of texts, none of them empty")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, minimum=0, maximum=MAX_LOGPROBS)

    def for_answer(self, index: int) -> SamplingParams:
        """Return the parameters of one of several answers: its seed is `seed + index`."""
        if self.seed is None or index == 0:
            return self
        return replace(self, seed=(self.seed + index) % (MAX_SEED + 1))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _refuse(name: str, value: object, accepted: str) -> None:
    raise InvalidOption(f"{name} must be {accepted}, not {shown(value)}", option=name)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def _check_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    # bool is an int to Python, but nobody who writes True means 1 here
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < minimum or (maximum is not None and value > maximum):  # type: ignore[operator]
        limit = "" if maximum is None else f" and at most {maximum}"
        _refuse(name, value, f"a whole number, at least {minimum}{limit}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A whole number may be more than any float, which is compared but cannot be converted.
    if not is_number or not low <= value <= min(high, sys.float_info.max):  # type: ignore[operator]
        limit = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        _refuse(name, value, f"a finite number, {limit}")


def parse_token_ids(prompt_ids: Iterable[SupportsIndex], vocab_size: int) -> list[int]:
    """Return the tokens of a prompt as plain ints.

    Args:
        prompt_ids: whole numbers of any kind: a list, an array or a tensor of one dimension.
        vocab_size: how many tokens the model knows. Another id would be read outside of its
            table of embeddings.

    Raises:
        UsageError: they are something else, or one is not from 0 to `vocab_size` - 1.
    """
    try:
        # A tensor hands out tensors, one by one and slowly.
        values: list[object] = list(getattr(prompt_ids, "tolist", lambda: prompt_ids)())
    except TypeError as error:
        raise UsageError(
            f"the prompt must be a sequence of token ids, not {shown(prompt_ids)}"
        ) from error
    token_ids = [_token_id(value) for value in values]
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(one for one in token_ids if not 0 <= one < vocab_size)
        raise UsageError(
            f"the prompt has the token id {shown(wrong)}, but the model knows those from 0 to "
            f"{vocab_size - 1:,}; the tokenizer is another model's, or has more tokens than the "
            "model was compiled with"
        )
    return token_ids


def _token_id(value: object) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass  # refused below
    raise UsageError(f"the prompt must be whole numbers, its token ids, not {shown(value)}")


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request while it is served; the scheduler and the engine change it.

    The keys and values of the first `num_computed` of its tokens are stored in the cache, in the
    blocks of `block_table`, `block_size` tokens each.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(init=False)
    """Prompt and answer so far."""
    block_table: list[int] = field(default_factory=list)
    """Empty while the request waits."""
    slot: int | None = None
    """Its row in caches kept per running request (sliding windows); None while it waits."""
    num_computed: int = 0
    num_to_read: int = 0
    """How many tokens the prefill program reads: all that were there when it was admitted."""
    prefix: Prefix | None = None
    """Its last full block, as the prefix cache knows it; None while it waits."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UsageError("the prompt has no tokens; a request needs at least one")
        self.token_ids = list(self.prompt_ids)

    @property
    def num_output(self) -> int:
        """How many tokens the answer has so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_stored_tokens(self) -> int:
        """How many tokens the cache has to hold for the longest answer.

        The token that is sampled last is never fed back, so its keys and values are never stored.
        """
        return len(self.prompt_ids) + self.params.max_new_tokens - 1

    @property
    def running_slot(self) -> int:
        """The slot of a request that runs; RuntimeError where it does not."""
        if self.slot is None:
            raise RuntimeError(f"request {self.request_id} does not run and has no slot")
        return self.slot

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens are in the cache that were there when the request was admitted."""
        return self.num_computed >= self.num_to_read

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence is over by its tokens, or None where it goes on."""
        if not self.num_output:
            return None
        if self.token_ids[-1] in eos_token_ids and not self.params.ignore_eos:
            return "stop"
        if self.num_output >= self.params.max_new_tokens:
            return "length"
        return None
