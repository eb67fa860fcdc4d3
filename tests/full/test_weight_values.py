"""Weights that are no finite numbers, or not of the stated type, are refused and hidden nowhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch
from families import save_model
from safetensors.torch import load_file, save_file

from reblock.backends.torch.native.pack import dequantize, pack, quantize
from reblock.backends.torch.refusal import NotCompilable
from reblock.backends.torch.source import load_model, open_source
from reblock.backends.torch.weights import check_weight_dtype
from reblock.errors import ArtifactMismatch

if TYPE_CHECKING:
    from pathlib import Path

    from reblock.options import Dtype

pytestmark = pytest.mark.full

NAME = "model.layers.1.mlp.up_proj.weight"


def write_with(value: float, directory: Path) -> str:
    save_model("llama", directory)
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    tensors[NAME][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return str(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_finite_number_is_refused_by_name(
    value: float, dtype: Dtype, tmp_path: Path
) -> None:
    source = open_source(write_with(value, tmp_path))
    with pytest.raises(NotCompilable, match=f"'{NAME}' has values that are infinite or NaN"):
        load_model(source, dtype)


def test_a_weight_beyond_the_type_that_it_is_read_in_is_refused(tmp_path: Path) -> None:
    # Beyond the largest bfloat16, which it rounds away from.
    source = open_source(write_with(3.4e38, tmp_path))
    assert load_model(source, "float32").get_parameter(NAME)[3, 5] > 3e38
    with pytest.raises(NotCompilable, match=f"'{NAME}'.*exceed bfloat16"):
        load_model(source, "bfloat16")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_quantize_of_no_finite_number_stays_one_and_spares_the_other_rows(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    back = dequantize(quantize(weight))
    assert not back[1].isfinite().any()
    assert torch.equal(back[[0, 2]], weight[[0, 2]])


def test_the_stated_type_of_weights_is_compared_with_that_of_the_packed_ones() -> None:
    levels, scales = quantize(torch.ones(3, 4))
    weights = {"norm": torch.ones(4), "up.weight": pack(levels), "up.scales": scales}
    check_weight_dtype(weights, "int8", path="artifact")
    for stated in ("float32", "bfloat16"):
        with pytest.raises(ArtifactMismatch, match=rf"artifact: .* in int8, but .* says {stated}"):
            check_weight_dtype(weights, stated, path="artifact")


def test_weights_of_which_none_is_packed_contradict_no_type() -> None:
    check_weight_dtype({"norm": torch.ones(4)}, "int8", path="artifact")
