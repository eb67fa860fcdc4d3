"""Laws of the estimate over random devices, against a search that is written here once more."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rbln_models import FakeModel, Rows

import reblock
from reblock.devices import Device
from reblock.errors import BudgetTooSmall
from reblock.rbln import RBLNDecoderOnlyFlashAttentionMixin as Mixin
from reblock.rbln import attention

ALIGNMENT = 2_097_152

# Sizes in small steps, sizes about the alignment, and sizes that no float can tell apart.
SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(ALIGNMENT - 2, 3 * ALIGNMENT),
    st.integers(2**53, 2**60),
)


@dataclass
class Case:
    """An artifact whose grids may be ragged; caches are given by their bytes per block."""

    alloc: list[dict[str, Rows]]
    per_block: dict[str, Rows]
    fixed: dict[str, Rows]
    current: int
    minimum: int
    full: int

    @property
    def num_chiplets(self) -> int:
        """How many chiplets the device has, by what is reported."""
        return max(len(row) for rows in self._grids() for row in rows)

    @property
    def num_nodes(self) -> int:
        """How many devices there are, by what is reported."""
        return max(map(len, self._grids()))

    def _grids(self) -> list[Rows]:
        grids = [rows for terms in self.alloc for rows in terms.values()]
        return [*grids, *self.per_block.values(), *self.fixed.values()]

    def models(self, held: int | None = None) -> dict[str, FakeModel]:
        held = self.current if held is None else held
        dram = {name: scaled(rows, held) for name, rows in self.per_block.items()}
        names = ["prefill", *(f"decoder_batch_{n}" for n in range(1, len(self.alloc)))]
        return {
            name: FakeModel(terms, {**dram, **self.fixed})
            for name, terms in zip(names, self.alloc, strict=True)
        }

    def config(self, budget: int | None = None) -> SimpleNamespace:
        metas = [SimpleNamespace(name=name, can_resize=True) for name in self.per_block]
        metas += [SimpleNamespace(name=name, can_resize=False) for name in self.fixed]
        return SimpleNamespace(
            memory_budget=budget,
            npu="made-up",
            phases=["prefill"],
            num_full_blocks=self.full,
            num_min_blocks=self.minimum,
            kvcache_num_blocks=self.current,
            cache_metas=metas,
        )

    def needed(self, num_blocks: int) -> int:
        """Return what the fullest chiplet holds, by the definition."""
        taken: dict[tuple[int, int], int] = {}
        for terms in self.alloc:
            for rows in terms.values():
                for node, row in enumerate(rows):
                    for chiplet, size in enumerate(row):
                        taken[node, chiplet] = taken.get((node, chiplet), 0) + size
        for blocks, caches in ((num_blocks, self.per_block), (1, self.fixed)):
            for rows in caches.values():
                for node, row in enumerate(rows):
                    for chiplet, size in enumerate(row):
                        units = (size * blocks + ALIGNMENT - 1) // ALIGNMENT
                        taken[node, chiplet] = taken.get((node, chiplet), 0) + units * ALIGNMENT
        return max(taken.values())

    def most(self, per_chiplet: int) -> int | None:
        """Return the answer, by trying every count."""
        counts = range(self.minimum, self.full + 1)
        return max((n for n in counts if self.needed(n) <= per_chiplet), default=None)


def scaled(rows: Rows, factor: int) -> Rows:
    return [[size * factor for size in row] for row in rows]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def grids(prefix: str, least: int) -> dict[str, Rows]:
        # At most four nodes of four chiplets; a term may leave the last ones out.
        rows = st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=4)
        found = draw(st.lists(rows, min_size=least, max_size=3))
        return {f"{prefix}_{index}": grid for index, grid in enumerate(found)}

    full = draw(st.integers(1, 24))
    return Case(
        alloc=[grids("term", 0) for _ in range(draw(st.integers(1, 3)))],
        per_block=grids("kv", 1),
        fixed=grids("window", 0),
        current=draw(st.integers(1, 9)),
        minimum=draw(st.integers(1, full)),
        full=full,
    )


@st.composite
def cases_with_share(draw: st.DrawFn) -> tuple[Case, int]:
    """A case, and what each chiplet may hold: about as much as some count of blocks needs."""
    case = draw(cases())
    near = case.needed(draw(st.integers(1, case.full + 1)))
    return case, max(1, near + draw(st.integers(-2, 2)))


def search(case: Case, per_chiplet: int) -> int | None:
    """Return the answer for so many bytes of each chiplet, None where nothing fits."""
    config = case.config(per_chiplet * case.num_chiplets)
    device = Device(
        name="made-up",
        dram_bytes=per_chiplet * case.num_chiplets,
        num_chiplets=case.num_chiplets,
        reserve_bytes_per_chiplet=0,
        max_eager_seq_len=None,
        min_partition_len=1,
        max_partition_len=None,
        default_partition_len=1,
    )
    with mock.patch.object(attention, "get_device", return_value=device):
        try:
            return Mixin.estimate_num_kvcache_blocks(case.models(), config, case.current)
        except BudgetTooSmall as error:
            smallest = error.smallest_budget_bytes
            assert smallest == case.needed(case.minimum) * case.num_chiplets
            return None


@given(cases_with_share())
@settings(deadline=None)
def test_estimate_is_what_trying_every_count_gives(case_share: tuple[Case, int]) -> None:
    case, per_chiplet = case_share
    found = search(case, per_chiplet)
    assert found == case.most(per_chiplet)
    if found is not None:
        assert case.needed(found) <= per_chiplet
        assert found == case.full or case.needed(found + 1) > per_chiplet


@given(cases_with_share())
@settings(deadline=None)
def test_search_by_bytes_of_a_chiplet_gives_the_same(case_share: tuple[Case, int]) -> None:
    case, per_chiplet = case_share
    alloc: dict[tuple[int, int], int] = {}
    for terms in case.alloc:
        for rows in terms.values():
            for node, row in enumerate(rows):
                for chiplet, size in enumerate(row):
                    alloc[node, chiplet] = alloc.get((node, chiplet), 0) + size
    chiplets = {
        (node, chiplet) for node in range(case.num_nodes) for chiplet in range(case.num_chiplets)
    }
    sizes = case.models()["prefill"].dram
    try:
        found: int | None = Mixin._search_num_kvcache_blocks(
            case.config(), alloc, sizes, per_chiplet, chiplets, case.current
        )
    except BudgetTooSmall:
        found = None
    assert found == case.most(per_chiplet)


@given(cases_with_share(), st.integers(0, 2**55))
@settings(deadline=None)
def test_more_memory_never_gives_fewer_blocks(case_share: tuple[Case, int], more: int) -> None:
    case, per_chiplet = case_share
    assert (search(case, per_chiplet) or 0) <= (search(case, per_chiplet + more) or 0)


@given(cases())
@settings(deadline=None)
def test_smallest_budget_works_and_a_byte_less_of_a_chiplet_does_not(case: Case) -> None:
    smallest = max(1, case.needed(case.minimum))
    assert (search(case, smallest) or 0) >= case.minimum
    if smallest > 1:
        assert search(case, smallest - 1) is None


@given(cases(), st.integers(1, 24))
@settings(deadline=None)
def test_answer_does_not_depend_on_what_the_caches_hold_now(case: Case, held: int) -> None:
    config, sizes = case.config(), case.models()["prefill"].dram
    other = case.models(held)["prefill"].dram
    for num_blocks in (1, case.full):
        assert Mixin._kvcache_bytes_per_chiplet(
            sizes, config, num_blocks, case.current
        ) == Mixin._kvcache_bytes_per_chiplet(other, config, num_blocks, held)


@given(cases(), st.lists(st.integers(1, 24), max_size=4))
@settings(deadline=None)
def test_resizes_that_end_where_they_began_give_the_same_bytes(
    case: Case, targets: list[int]
) -> None:
    models, config = case.models(), case.config()
    config.num_min_blocks = 1
    before = {name: model.dram for name, model in models.items()}
    for target in [*targets, case.current]:
        Mixin.rescale_kvcache_num_blocks(models, config, target)
        config.kvcache_num_blocks = target
        for model in models.values():
            for name, rows in case.per_block.items():
                assert model.dram[name] == scaled(rows, target)
    assert {name: model.dram for name, model in models.items()} == before


@given(cases())
@settings(deadline=None)
def test_required_memory_never_falls_when_the_count_rises(case: Case) -> None:
    models, config = case.models(), case.config()
    taken = [Mixin._required_memory_at(models, config, n) for n in range(1, 12)]
    assert taken == sorted(taken)
    aligned = [
        -(-size // ALIGNMENT) * ALIGNMENT
        for rows in models["prefill"].dram.values()
        for row in rows
        for size in row
    ]
    assert Mixin._required_memory_at(models, config, case.current) == sum(aligned)


def test_bytes_that_no_float_holds_decide() -> None:
    # 2**53 + 1 has no float; as one it would be 2**53, and would fit.
    case = Case(
        alloc=[{"term": [[2**53 + 1]]}],
        per_block={"kv": [[0]]},
        fixed={},
        current=1,
        minimum=1,
        full=1,
    )
    assert search(case, 2**53 + 1) == 1
    assert search(case, 2**53) is None


# No floats

ARITHMETIC = [
    "units.py",
    "budget.py",
    "memory.py",
    "sizing.py",
    "block_count.py",
    "artifact/rebel_model.py",
    "rbln/attention.py",
    "rbln/inputs.py",
]
# What a user wrote as a float is told from infinity here, before it becomes a Fraction.
USERS_FLOAT = {"budget.py": "_from_float"}
FLOAT_FUNCTIONS = {"float", "round"}
FLOAT_MODULES = {"math", "statistics"}


def floats_in(text: str, exempt: str | None = None) -> list[str]:
    """Return the places in a source at which a float could come about."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name == exempt:
            return
        match node:
            case ast.Constant(value=float()):
                found.append(ast.unparse(node))
            # A Fraction that is divided is a Fraction.
            case ast.BinOp(op=ast.Div(), left=ast.Call(func=ast.Name(id="Fraction"))):
                pass
            case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
                found.append(ast.unparse(node))
            case ast.Call(func=ast.Name(id=name)) if name in FLOAT_FUNCTIONS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id=module)) if module in FLOAT_MODULES:
                found.append(ast.unparse(node))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return found


@pytest.mark.parametrize(
    "text", ["x = 0.5", "a / b", "a /= b", "float(a)", "math.ceil(a)", "round(a)", "1e9"]
)
def test_what_makes_a_float_is_found(text: str) -> None:
    assert len(floats_in(text)) == 1


@pytest.mark.parametrize("text", ["a // b", "Fraction(a) / 100", "isinstance(a, float)", "int(a)"])
def test_what_makes_no_float_is_not_found(text: str) -> None:
    assert floats_in(text) == []


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_has_no_floats(name: str) -> None:
    path = os.path.join(os.path.dirname(reblock.__file__), name)
    with open(path, encoding="utf-8") as file:
        assert floats_in(file.read(), USERS_FLOAT.get(name)) == []
