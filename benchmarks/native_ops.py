"""How near the native operators come to what the machine can do.

    python benchmarks/native_ops.py [--threads N] [--rounds 15] [--rows 1,8,128,512] [--json FILE]

Linear layers: all those of a 200 M-parameter Llama (12 layers, hidden size 1024, 16 heads, 4
key-value heads, intermediate size 2816), one after the other, so that every weight comes from
memory as it does in a model. "of limit" is the time that reading the weights alone would take, by
the time it took. Beside them torch's own `linear` and oneDNN with weights packed by itself.

Attention: one step of a decoder with 8 rows. "of limit" is likewise of the keys and values. Beside
it the pages gathered and given to torch's attention.

Everything runs in one process, in turn, round by round: what else the machine does meanwhile hits
all of it alike. Reading speed is that of a sum over the float32 weights. Numbers are medians; in
brackets the best round.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from machine import describe_machine, machine_line
from torch import Tensor

from reblock.backends.torch import native
from reblock.backends.torch.host import host_isa
from reblock.backends.torch.native import ops
from reblock.backends.torch.native.pack import packed_shape

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 12
# [outputs, inputs] of q, k, v, o, gate, up, down
SHAPES = (
    (1024, 1024),
    (256, 1024),
    (256, 1024),
    (1024, 1024),
    (2816, 1024),
    (2816, 1024),
    (1024, 2816),
)
ROWS_OF_ATTENTION, KV_HEADS, GROUPS, HEAD_SIZE, BLOCK = 8, 4, 4, 64, 256
CONTEXTS = (128, 2048, 8192)
READ = "reading"


class Case(NamedTuple):
    """Something to run, the bytes it has to read and the operations it has to do."""

    name: str
    rows: int
    run: Callable[[], object]
    num_bytes: int
    operations: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="1,8,128,512")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        native.load(native.build(directory, host_isa()))
    cases = [*linear_cases([int(rows) for rows in args.rows.split(",")]), *attention_cases()]
    seconds = measure(cases, args.rounds)
    print(f"{machine_line()}, {args.threads} threads, {host_isa()}")
    print_table(cases, seconds)
    if args.json:
        numbers = {name: [round(s, 6) for s in times] for name, times in seconds.items()}
        result = {"machine": describe_machine(), "threads": args.threads, "seconds": numbers}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def room(dtype: torch.dtype, count: int) -> Tensor:
    """Return memory on large pages, as caches have it and files of weights may have."""
    region = mmap.mmap(-1, count * dtype.itemsize)
    region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=dtype)
    return tensor.fill_(1)


def weights(dtype: torch.dtype, shape_of: Callable[[int, int], tuple[int, ...]]) -> list[Tensor]:
    """Return the weights of all layers, side by side in memory."""
    shapes = [shape_of(*shape) for shape in SHAPES] * LAYERS
    flat = room(dtype, sum(map(math.prod, shapes)))
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def linear_cases(all_rows: list[int]) -> list[Case]:
    packed = {
        dtype: weights(dtype, lambda n, k, dtype=dtype: packed_shape(n, k, dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    plain = weights(torch.float32, lambda outputs, inputs: (outputs, inputs))
    whole = packed[torch.float32][0]._base
    assert whole is not None
    count = whole.numel()
    cases = [Case(READ, 0, whole.sum, count * 4, 0)]
    for rows in all_rows:
        x = {inputs: torch.randn(rows, inputs) for _, inputs in SHAPES}
        runs = {
            **{
                (f"packed {str(dtype)[6:]}", dtype): run_packed(packed[dtype], x)
                for dtype in packed
            },
            ("torch float32", torch.float32): run_torch(plain, x),
            ("oneDNN float32", torch.float32): run_onednn(plain, x, rows),
        }
        for (name, dtype), run in runs.items():
            cases.append(Case(name, rows, run, count * dtype.itemsize, 2.0 * rows * count))
    return cases


def run_packed(packed: list[Tensor], x: dict[int, Tensor]) -> Callable[[], None]:
    scales = torch.ones(max(outputs for outputs, _ in SHAPES))

    def run() -> None:
        for index, weight in enumerate(packed):
            outputs, inputs = SHAPES[index % len(SHAPES)]
            scale = scales[:outputs] if weight.dtype == torch.int8 else None
            ops.linear(x[inputs], weight, scale, None, outputs)

    return run


def run_torch(plain: list[Tensor], x: dict[int, Tensor]) -> Callable[[], None]:
    def run() -> None:
        for weight in plain:
            torch.nn.functional.linear(x[weight.shape[1]], weight)

    return run


def run_onednn(plain: list[Tensor], x: dict[int, Tensor], rows: int) -> Callable[[], None]:
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in plain]

    def run() -> None:
        for weight in reordered:
            torch.ops.mkldnn._linear_pointwise(x[weight.shape[1]], weight, None, "none", [], "")

    return run


def attention_cases() -> list[Case]:
    return [
        case
        for context in CONTEXTS
        for dtype in (torch.float32, torch.bfloat16)
        for case in attention_of(context, dtype)
    ]


def attention_of(context: int, dtype: torch.dtype) -> list[Case]:
    width = context // BLOCK + 1
    shape = (ROWS_OF_ATTENTION * width, KV_HEADS, BLOCK, HEAD_SIZE)
    keys, values = (room(dtype, math.prod(shape)).view(shape) for _ in range(2))
    tables = torch.randperm(shape[0]).reshape(ROWS_OF_ATTENTION, width)
    query = torch.randn(ROWS_OF_ATTENTION, KV_HEADS * GROUPS, 1, HEAD_SIZE).to(dtype)
    new = torch.randn(ROWS_OF_ATTENTION, KV_HEADS, 1, HEAD_SIZE).to(dtype)
    start = torch.full((ROWS_OF_ATTENTION,), context - 1)
    one, rows = torch.ones_like(start), torch.tensor([ROWS_OF_ATTENTION])
    mask = torch.arange(width * BLOCK)[None, None, None, :] < context

    def run() -> None:
        scale = HEAD_SIZE**-0.5
        ops.paged_attention(
            query, new, new, keys, values, tables, start, one, rows, scale, 0.0, 0, None
        )

    def pages(cache: Tensor) -> Tensor:
        side_by_side = cache[tables].transpose(1, 2)
        return side_by_side.reshape(ROWS_OF_ATTENTION, KV_HEADS, width * BLOCK, HEAD_SIZE)

    def gather() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, pages(keys), pages(values), attn_mask=mask, enable_gqa=True
        )

    count = ROWS_OF_ATTENTION * context * KV_HEADS * HEAD_SIZE * 2
    name = f"{str(dtype)[6:]}, context {context}"
    return [
        Case(f"paged attention {name}", 8, run, count * dtype.itemsize, 2.0 * GROUPS * count),
        Case(f"gather and torch {name}", 8, gather, count * dtype.itemsize, 2.0 * GROUPS * count),
    ]


def measure(cases: list[Case], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every case in every round; one round before is not counted."""
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for case in cases:
            started = time.perf_counter()
            case.run()
            if number > 0:
                taken = time.perf_counter() - started
                seconds.setdefault(f"{case.name}, {case.rows} rows", []).append(taken)
    return seconds


def print_table(cases: list[Case], seconds: dict[str, list[float]]) -> None:
    reading = seconds[f"{READ}, 0 rows"]
    speed = cases[0].num_bytes / statistics.median(reading), cases[0].num_bytes / min(reading)
    print("| what | rows | ms | GB/s | of limit | GFLOP/s |")
    print("|---|---:|---:|---:|---:|---:|")
    for case in cases:
        times = seconds[f"{case.name}, {case.rows} rows"]
        median, best = statistics.median(times), min(times)
        print(
            f"| {case.name} | {case.rows or ''} | {median * 1e3:.2f} ({best * 1e3:.2f}) "
            f"| {case.num_bytes / median / 1e9:.1f} ({case.num_bytes / best / 1e9:.1f}) "
            f"| {case.num_bytes / median / speed[0]:.0%} ({case.num_bytes / best / speed[1]:.0%}) "
            f"| {case.operations / median / 1e9:.0f} ({case.operations / best / 1e9:.0f}) |"
        )


if __name__ == "__main__":
    main()
