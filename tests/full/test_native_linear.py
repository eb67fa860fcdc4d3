"""Linear layers and embeddings on packed weights are the sums that they stand for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from native_checks import FLOATS, ROWS, SHAPES, WEIGHT_DTYPES, check_linear, packed_weight
from reblock.backends.torch.native import ops
from reblock.backends.torch.native.pack import pack, packed_shape, quantize, unpack

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("native_operators")]


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_of_any_shape_is_the_sum_in_float64(
    shape: tuple[int, int], x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for rows in ROWS:
        check_linear(rows, shape, x_dtype, weight_dtype)


def test_linear_of_more_rows_than_are_taken_at_once_is_the_sum() -> None:
    check_linear(1025, (40, 70), torch.float32, torch.bfloat16)


def test_linear_keeps_the_dimensions_in_front_and_takes_rows_with_gaps() -> None:
    weight = torch.randn(24, 32)
    x = torch.randn(3, 5, 2, 64)[..., ::2]
    y = ops.linear(x, pack(weight), None, None, 24)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_linear_answers_the_same_with_any_number_of_threads(num_threads: int) -> None:
    x, packed = torch.randn(9, 100), pack(torch.randn(200, 100))
    before = torch.get_num_threads()
    expected = ops.linear(x, packed, None, None, 200)
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.linear(x, packed, None, None, 200), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_linear_gives_a_row_the_same_bits_whatever_is_beside_it(
    x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    # More inputs than are taken at once, and no whole words of them at the end.
    x = torch.randn(40, 601).to(x_dtype)
    packed, scales, _ = packed_weight(torch.randn(50, 601), weight_dtype)
    alone = torch.cat([ops.linear(row[None], packed, scales, None, 50) for row in x])
    for rows in range(2, 41):
        together = ops.linear(x[:rows], packed, scales, None, 50)
        assert torch.equal(together, alone[:rows]), rows


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 40, 600])
@pytest.mark.parametrize("outputs", [(50,), (64, 16, 16), (5, 700), (1, 1, 1, 200, 33)])
def test_several_linears_of_one_x_have_the_bits_of_each_alone(
    outputs: tuple[int, ...], rows: int, weight_dtype: torch.dtype
) -> None:
    x = torch.randn(2, rows, 301)
    weights = [packed_weight(torch.randn(count, 301), weight_dtype)[:2] for count in outputs]
    # One bias more than there are none.
    biases = [torch.randn(count) if i % 2 == 0 else None for i, count in enumerate(outputs)]
    packed, scales = (list(column) for column in zip(*weights, strict=True))
    results = ops.linears(x, packed, scales, biases, outputs)
    assert len(results) == len(outputs)
    for result, (weight, scale), bias, count in zip(results, weights, biases, outputs, strict=True):
        assert torch.equal(result, ops.linear(x, weight, scale, bias, count))


def test_several_linears_of_no_rows_are_empty() -> None:
    packed = [pack(torch.randn(16, 32)), pack(torch.randn(5, 32))]
    results = ops.linears(torch.zeros(0, 32), packed, [None] * 2, [None] * 2, [16, 5])
    assert [result.shape for result in results] == [(0, 16), (0, 5)]


def test_several_linears_that_do_not_go_together_are_refused() -> None:
    x, wide, short = torch.zeros(1, 32), pack(torch.zeros(16, 32)), pack(torch.zeros(16, 31))
    narrow = pack(torch.zeros(16, 32).bfloat16())
    for weights, outputs, message in (
        ([], [], "there are 0 weights"),
        ([wide, wide], [16], "1 numbers of outputs"),
        ([wide, short], [16, 16], "are not"),
        ([wide, wide], [16, 17], "are not"),
        ([wide, narrow], [16, 16], "of one type"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.linears(x, weights, [None] * len(weights), [None] * len(weights), outputs)


def test_linear_with_no_rows_is_empty() -> None:
    y = ops.linear(torch.zeros(0, 32), pack(torch.randn(16, 32)), None, None, 16)
    assert y.shape == (0, 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_embedding_gives_the_rows_of_the_packed_weight(
    weight_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    packed, scales, exact = packed_weight(torch.randn(50, 37), weight_dtype)
    ids = torch.tensor([[0, 49, 16], [15, 17, 0]])
    rows = ops.embedding(ids, packed, scales, 50, 37, dtype)
    torch.testing.assert_close(rows, exact[ids].to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("token", [-1, 50])
def test_embedding_of_a_token_that_is_not_there_is_refused(token: int) -> None:
    packed = pack(torch.randn(50, 8))
    with pytest.raises(RuntimeError, match=f"there is no token {token}"):
        ops.embedding(torch.tensor([token]), packed, None, 50, 8, torch.float32)


@pytest.mark.parametrize(
    ("x", "packed", "scales", "outputs", "message"),
    [
        (torch.zeros(1, 31), pack(torch.zeros(16, 32)), None, 16, "are not"),
        (torch.zeros(1, 32), pack(torch.zeros(16, 32)), None, 17, "are not"),
        (torch.zeros(1, 32), pack(torch.zeros(16, 32)), None, 0, "are not"),
        (torch.zeros(1, 32), torch.zeros(16, 32), None, 16, "are not packed"),
        (torch.zeros(1, 32).half(), pack(torch.zeros(16, 32)), None, 16, "float32 or bfloat16"),
        (torch.zeros(1, 32), pack(torch.zeros(16, 32)), torch.ones(15), 16, "scales"),
        (torch.zeros(1, 32), pack(torch.zeros(16, 32)), torch.ones(16).double(), 16, "scales"),
    ],
)
def test_linear_of_tensors_that_do_not_go_together_is_refused(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor | None, outputs: int, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.linear(x, packed, scales, None, outputs)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 4), (17, 5), (33, 64)])
def test_unpack_returns_what_was_packed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randint(-100, 100, shape).to(dtype)
    packed = pack(weight)
    assert packed.shape == packed_shape(*shape, dtype)
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed, *shape), weight)


def test_quantize_is_off_by_half_a_step_at_most_and_keeps_rows_of_zeros() -> None:
    weight = torch.randn(9, 50) * torch.logspace(-6, 6, 9)[:, None]
    weight[3] = 0
    levels, scales = quantize(weight)
    error = (levels * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()
    assert levels.abs().amax(dim=1).tolist() == [127] * 3 + [0] + [127] * 5
