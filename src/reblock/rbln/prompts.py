"""The prompts that `generate` is given, as rows of token ids without padding."""

from __future__ import annotations

from torch import Tensor

from reblock.errors import UsageError

__all__ = ["check_ids", "check_inputs", "read_prompts"]


def check_inputs(input_ids: object) -> None:
    """Check that there are rows of token ids, where any are given.

    Raises:
        UsageError: They are something else.
    """
    if input_ids is None:
        return
    if not isinstance(input_ids, Tensor):
        raise UsageError(
            f"input_ids are {type(input_ids).__name__!r} and must be a tensor; what a tokenizer "
            "returns is given as generate(**inputs)"
        )
    if input_ids.ndim != 2 or not len(input_ids) or input_ids.is_floating_point():
        raise UsageError(
            f"input_ids have shape {tuple(input_ids.shape)} and type {input_ids.dtype}; they must "
            "be whole numbers of shape [rows, tokens], with one row at least"
        )


def read_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of every row that its mask shows.

    Raises:
        UsageError: The mask is not of the shape of the ids, has other values than 0 and 1, or
            hides a whole row.
    """
    if attention_mask is None:
        prompts: list[list[int]] = input_ids.tolist()
    else:
        shown = attention_mask == 1
        if attention_mask.shape != input_ids.shape or not (shown | (attention_mask == 0)).all():
            raise UsageError(
                f"the attention_mask of shape {tuple(attention_mask.shape)} must have a 0 or a 1 "
                f"for every one of the {tuple(input_ids.shape)} input ids"
            )
        prompts = [ids[row].tolist() for ids, row in zip(input_ids, shown, strict=True)]
    if not all(prompts):
        raise UsageError("a prompt has no tokens; every row of input_ids needs one at least")
    return prompts


def check_ids(input_ids: Tensor, vocabulary: int) -> None:
    """Refuse ids that would make the programs read outside of the table of embeddings.

    Raises:
        UsageError: There is one that is not from 0 to `vocabulary` - 1.
    """
    if input_ids.numel() and not (input_ids.min() >= 0 and input_ids.max() < vocabulary):
        raise UsageError(
            f"token ids go from {int(input_ids.min())} to {int(input_ids.max())}, but the model "
            f"knows those from 0 to {vocabulary - 1}; the tokenizer is another model's, or "
            "pad_token_id is none of its tokens"
        )
