"""What an artifact says of its workspace is enough for serving, for every compilation measured."""

from __future__ import annotations

import pytest

from reblock.units import MIB

pytestmark = pytest.mark.full

# MiB: weights, cache and runtime of an artifact; how far the peak rose above them when it was
# measured; the highest peak of a process that served a full batch.
MEASURED = {
    "llama, large batch": (715.9, 8.2, 721.1),
    "llama, long chunk": (686.6, 26.1, 716.6),
    "llama, four decoders": (639.9, 8.1, 645.1),
    "llama, bfloat16": (400.9, 8.1, 406.0),
    "llama, tiny": (324.5, 8.2, 329.5),
    "gemma2": (498.9, 8.2, 504.1),
    "qwen2": (571.5, 8.2, 576.0),
    "phi3": (691.8, 8.1, 697.3),
    "mixtral": (627.2, 19.2, 665.8),
    "mixtral, wide": (910.5, 59.9, 932.1),
    "qwen3_moe": (736.4, 18.1, 757.1),
    "gpt_oss": (580.1, 11.1, 588.9),
}


@pytest.mark.parametrize("name", MEASURED)
def test_workspace_with_gaps_keeps_the_plan_near_the_peak_of_serving(name: str) -> None:
    from reblock.backends.torch.profile import with_gaps

    held, rise, peak = MEASURED[name]
    plan = held + with_gaps(int(rise * MIB)) / MIB
    assert peak <= 1.02 * plan
    # Nor is it far above.
    assert plan <= 1.11 * peak


@pytest.mark.parametrize("num_mib", [0, 1, 64])
def test_workspace_with_gaps_is_twice_what_was_seen_while_that_is_little(num_mib: int) -> None:
    from reblock.backends.torch.profile import with_gaps

    assert with_gaps(num_mib * MIB) == 2 * num_mib * MIB


def test_workspace_with_gaps_has_no_more_gaps_than_the_heap_keeps() -> None:
    from reblock.backends.torch.profile import with_gaps

    assert with_gaps(1000 * MIB) == 1064 * MIB
