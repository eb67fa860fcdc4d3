"""Another block count: planned, applied, and refused with the artifact as it was."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import (
    BYTES_PER_BLOCK,
    NUM_FULL_BLOCKS,
    NUM_MIN_BLOCKS,
    PROGRAMS,
    fingerprint,
    make_artifact,
    read_config,
    read_description,
)
from reblock.artifact.count import read_num_blocks
from reblock.artifact.previous import read_previous
from reblock.artifact.program import write_resized
from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from reblock.budget import parse_budget
from reblock.errors import (
    BelowMinimum,
    BudgetAboveDevice,
    BudgetTooSmall,
    CorruptArtifact,
    DestinationExists,
    EditFailed,
    InvalidBlockCount,
    InvalidDestination,
    NoPreviousCount,
    NotResizable,
    UnknownFormat,
)
from reblock.sizing import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

    from reblock.budget import MemoryBudget


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16)


def resize(directory: Path, target: int | MemoryBudget, output_dir: Path | None = None) -> None:
    artifact = open_artifact(str(directory))
    destination = None if output_dir is None else str(output_dir)
    apply_resize(artifact, plan_resize(artifact, target), destination)


def test_resize_in_place_writes_every_program_and_the_config(directory: Path) -> None:
    before, config = fingerprint(directory), read_config(directory)
    resize(directory, 20)
    assert read_config(directory) == config | {"kvcache_num_blocks": 20}
    for name in PROGRAMS:
        description = read_description(directory / f"{name}.rbln")
        assert description["kvcache_num_blocks"] == 20
        assert description["dram"]["past_key_values_3"] == [[20 * BYTES_PER_BLOCK]]
    changed = {name for name, state in fingerprint(directory).items() if state != before.get(name)}
    names = {"rbln_config.json", ".reblock.json", *(f"{name}.rbln" for name in PROGRAMS)}
    assert changed == names


def test_resize_leaves_nothing_beside_the_artifact(directory: Path) -> None:
    resize(directory, 20)
    assert os.listdir(directory.parent) == [directory.name]


def test_resize_keeps_sliding_caches_as_they_are(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=16, sliding_layers=(0,))
    before = read_description(directory / "prefill.rbln")["dram"]
    resize(directory, 30)
    after = read_description(directory / "prefill.rbln")["dram"]
    assert after["past_key_values_0"] == before["past_key_values_0"]
    assert after["past_key_values_2"] == [[30 * BYTES_PER_BLOCK]]


def test_resize_there_and_back_gives_the_same_artifact(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "artifact", num_blocks=16)
    original = shutil.copytree(directory, tmp_path / "original")

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(NUM_MIN_BLOCKS, 2**31 - 1), min_size=1, max_size=3))
    def there_and_back(counts: list[int]) -> None:
        for num_blocks in [*counts, 16]:
            resize(directory, num_blocks)
            assert read_num_blocks(str(directory)) == num_blocks
        name = "rbln_config.json"
        assert (directory / name).read_bytes() == (original / name).read_bytes()
        for program in PROGRAMS:
            there, here = original / f"{program}.rbln", directory / f"{program}.rbln"
            assert read_description(here) == read_description(there)

    there_and_back()


def test_resize_to_a_budget_gives_the_largest_count_that_fits(directory: Path) -> None:
    plan = open_artifact(str(directory)).memory_plan()
    budget = smallest_budget(plan, 24)
    resize(directory, parse_budget(budget))
    assert read_num_blocks(str(directory)) == 24
    # Two blocks of 1 MiB are aligned to 2 MiB, so a 24th came with the 23rd.
    resize(directory, parse_budget(budget - 1))
    assert read_num_blocks(str(directory)) == 22


def test_the_budget_counts_from_the_current_size_and_not_from_one_block(directory: Path) -> None:
    budget = parse_budget(smallest_budget(open_artifact(str(directory)).memory_plan(), 24))
    for num_blocks in (9, 16, 100):
        resize(directory, num_blocks)
        assert plan_resize(open_artifact(str(directory)), budget).num_blocks_after == 24


def test_plan_resize_reports_the_memory_before_and_after(directory: Path) -> None:
    plan = plan_resize(open_artifact(str(directory)), 21)
    assert (plan.num_blocks_before, plan.num_blocks_after) == (16, 21)
    assert plan.kv_bytes_before == 4 * 16 * BYTES_PER_BLOCK
    assert plan.kv_bytes_after == 4 * 22 * BYTES_PER_BLOCK
    assert plan.sizing is None
    assert plan.warnings == ()


def test_plan_resize_above_the_full_count_warns_with_the_numbers(directory: Path) -> None:
    plan = plan_resize(open_artifact(str(directory)), 40)
    assert plan.num_blocks_after == 40
    (warning,) = plan.warnings
    assert "40 blocks" in warning
    assert f"the {NUM_FULL_BLOCKS} that" in warning
    assert "8 take 32.00 MiB" in warning


def test_plan_resize_above_the_device_warns_and_says_what_fits(directory: Path) -> None:
    plan = plan_resize(open_artifact(str(directory)), 2**31 - 1)
    too_large, unused = plan.warnings
    assert "blocks need 8,388,608.00 GiB" in too_large
    assert f"the most that fit and can be used are {NUM_FULL_BLOCKS}" in too_large
    assert "can ever use" in unused


def test_plan_resize_where_nothing_fits_the_device_says_so(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", weight_bytes=2**60)
    (warning,) = plan_resize(open_artifact(str(directory)), 20).warnings
    assert f"not even the minimum of {NUM_MIN_BLOCKS} fits" in warning


def test_plan_resize_warns_of_programs_of_an_older_compilation(directory: Path) -> None:
    shutil.copy(directory / "prefill.rbln", directory / "decoder_batch_9.rbln")
    before = fingerprint(directory)["decoder_batch_9.rbln"]
    (warning,) = plan_resize(open_artifact(str(directory)), 20).warnings
    assert "decoder_batch_9.rbln belongs to no program" in warning
    resize(directory, 20)
    assert fingerprint(directory)["decoder_batch_9.rbln"] == before


@pytest.mark.parametrize("target", [0, -1, 2**31, True, "1e3", 16.0])
def test_plan_resize_to_no_count_is_refused(directory: Path, target: Any) -> None:
    with pytest.raises(InvalidBlockCount):
        plan_resize(open_artifact(str(directory)), target)


@pytest.mark.parametrize("target", [1, NUM_MIN_BLOCKS - 1])
def test_plan_resize_below_the_minimum_is_refused_with_the_minimum(
    directory: Path, target: int
) -> None:
    with pytest.raises(BelowMinimum, match="below the 9 blocks") as caught:
        plan_resize(open_artifact(str(directory)), target)
    assert caught.value.num_min_blocks == NUM_MIN_BLOCKS
    assert isinstance(caught.value, ValueError)


def test_plan_resize_to_exactly_the_minimum_is_possible(directory: Path) -> None:
    resize(directory, NUM_MIN_BLOCKS)
    assert read_num_blocks(str(directory)) == NUM_MIN_BLOCKS


def test_plan_resize_to_a_budget_that_holds_nothing_is_refused(directory: Path) -> None:
    artifact = open_artifact(str(directory))
    needed = smallest_budget(artifact.memory_plan(), NUM_MIN_BLOCKS)
    with pytest.raises(BudgetTooSmall) as caught:
        plan_resize(artifact, parse_budget(needed - 1))
    assert caught.value.smallest_budget_bytes == needed
    assert plan_resize(artifact, parse_budget(needed)).num_blocks_after == 10


def test_plan_resize_to_a_budget_above_the_device_is_refused(directory: Path) -> None:
    with pytest.raises(BudgetAboveDevice):
        plan_resize(open_artifact(str(directory)), parse_budget("1000TB"))


def test_plan_resize_of_an_eager_artifact_says_that_it_cannot(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=4, attn_impl="eager")
    with pytest.raises(NotResizable, match="a fixed count, 4"):
        plan_resize(open_artifact(str(directory)), 8)


def test_apply_resize_to_the_same_count_writes_nothing(directory: Path) -> None:
    identity = directory.stat().st_ino
    resize(directory, 16)
    assert directory.stat().st_ino == identity


def test_apply_resize_to_an_output_directory_leaves_the_source(
    directory: Path, tmp_path: Path
) -> None:
    before = fingerprint(directory)
    for name, num_blocks, new in (("same", 16, set()), ("deep/other", 20, {".reblock.json"})):
        resize(directory, num_blocks, tmp_path / name)
        assert open_artifact(str(tmp_path / name)).config.kvcache_num_blocks == num_blocks
        assert set(fingerprint(tmp_path / name)) == {*before, *new}
    assert fingerprint(directory) == before


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("artifact", InvalidDestination),
        ("artifact/inside", InvalidDestination),
        ("full", DestinationExists),
        ("file", DestinationExists),
    ],
)
def test_apply_resize_to_a_bad_output_directory_changes_nothing(
    directory: Path, tmp_path: Path, name: str, error: type[Exception]
) -> None:
    (tmp_path / "full" / "mine").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    before = fingerprint(tmp_path)
    with pytest.raises(error):
        resize(directory, 20, tmp_path / name)
    assert fingerprint(tmp_path) == before


def test_resize_in_place_keeps_modes(directory: Path) -> None:
    modes = {"prefill.rbln": 0o440, "rbln_config.json": 0o604, "tokenizer.json": 0o400}
    for name, mode in modes.items():
        (directory / name).chmod(mode)
    directory.chmod(0o710)
    resize(directory, 20)
    for name, mode in modes.items():
        assert (directory / name).stat().st_mode & 0o7777 == mode
    assert directory.stat().st_mode & 0o7777 == 0o710


def test_resize_in_place_never_writes_through_links_to_shared_files(
    directory: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    # As in the cache of the Hugging Face hub: every file is a link to a read-only blob.
    for index, name in enumerate(os.listdir(directory)):
        blob = store / f"blob{index}"
        os.rename(directory / name, blob)
        blob.chmod(0o444)
        (directory / name).symlink_to(f"../store/blob{index}")
    (directory / "hard").hardlink_to(store / "blob0")
    before = fingerprint(store)
    resize(directory, 20)
    assert fingerprint(store) == before
    assert read_num_blocks(str(directory)) == 20
    assert not (directory / "prefill.rbln").is_symlink()
    assert (directory / "tokenizer.json").is_symlink()
    assert os.path.samefile(directory / "hard", store / "blob0")


def test_resize_in_place_keeps_unchanged_files_as_the_same_files(directory: Path) -> None:
    identity = (directory / "weights.safetensors").stat().st_ino
    resize(directory, 20)
    status = (directory / "weights.safetensors").stat()
    assert (status.st_ino, status.st_nlink) == (identity, 1)


def test_resize_through_a_symbolic_link_exchanges_the_real_directory(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(directory)
    resize(link, 20)
    assert link.is_symlink()
    assert read_num_blocks(str(directory)) == 20
    assert os.listdir(tmp_path / "elsewhere") == ["link"]


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("function", ["mkdir", "link", "fsync", "chmod", "rename", "write"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_write_that_fails_leaves_everything_as_it_was(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    call: int,
    in_place: bool,
) -> None:
    owner: Any = zipfile.ZipFile if function == "write" else os
    attribute = "writestr" if function == "write" else function
    real, calls = getattr(owner, attribute), 0

    def fail(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **keywords)

    before = fingerprint(tmp_path)
    artifact = open_artifact(str(directory))
    plan = plan_resize(artifact, 20)
    monkeypatch.setattr(owner, attribute, fail)
    destination = None if in_place else str(tmp_path / "deep" / "copy")
    error: EditFailed | None = None
    try:
        apply_resize(artifact, plan, destination)
    except EditFailed as raised:
        error = raised
    monkeypatch.undo()
    if error is None:
        # The way never made that call so often; then it must have gone through.
        assert calls < call
        assert read_num_blocks(destination or str(directory)) == 20
    else:
        assert "nothing was changed" in str(error)
        assert fingerprint(tmp_path) == before


def test_a_stage_that_reads_back_wrong_is_not_put_in_place(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reblock.artifact import resize as module

    def write_damaged(source: str, destination: str, **keywords: Any) -> None:
        real_write(source, destination, **keywords | {"num_blocks": 21})

    real_write = write_resized
    before = fingerprint(tmp_path)
    monkeypatch.setattr(module, "write_resized", write_damaged)
    with pytest.raises(EditFailed, match="does not read back"):
        resize(directory, 20)
    assert fingerprint(tmp_path) == before


def test_a_change_is_remembered_and_the_next_one_takes_its_place(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoPreviousCount, match="never changed"):
        read_previous(str(directory))
    for num_blocks, previous in ((16, None), (20, 16), (20, 16), (24, 20), (20, 24)):
        resize(directory, num_blocks)
        if previous is not None:
            assert read_previous(str(directory)) == previous
    resize(directory, 30, tmp_path / "copy")
    assert read_previous(str(tmp_path / "copy")) == 20
    assert read_previous(str(directory)) == 24


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", CorruptArtifact),
        ("{}", CorruptArtifact),
        ('{"format_version": 1, "previous_kvcache_num_blocks": 0}', CorruptArtifact),
        ('{"format_version": 2, "previous_kvcache_num_blocks": 16}', UnknownFormat),
        ('{"format_version": 1, "previous_kvcache_num_blocks": 16, "more": 1}', UnknownFormat),
    ],
)
def test_a_damaged_memory_of_a_change_is_refused_and_does_not_keep_from_another(
    directory: Path, text: str, error: type[Exception]
) -> None:
    (directory / ".reblock.json").write_text(text)
    with pytest.raises(error):
        read_previous(str(directory))
    resize(directory, 20)
    assert read_previous(str(directory)) == 16
