"""An edit that is killed at any call that changes the file system leaves the old or the new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import Failed, report_failures, spread
from namespaces import may_mount
from trees import NEW, OLD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench import Place
    from tracing import Call


def test_an_edit_killed_at_any_call_leaves_the_old_or_the_new_artifact(
    bench: list[Place], say: Callable[[str], None]
) -> None:
    calls = bench[0].calls
    say(f"{bench[0].way}: {len(calls)} calls change the file system; killed at each of them")
    failures = spread(bench, calls, _check_kill)
    assert not failures, report_failures(failures, len(calls))


def _check_kill(place: Place, call: Call) -> None:
    _kill(place, call)
    seen = _read_only_count(place)
    count = place.get()
    if seen not in {None, count}:
        raise Failed(f"read-only {seen}, but then {count}")
    if place.way != "output-dir" or count == NEW:
        # Who reads the source knows of no output; whoever reads the output tidies up beside it.
        place.expect_end(count, "after `get`")
    place.verify()
    _kill(place, call)
    place.verify()
    if place.get() != count:
        raise Failed(f"`verify` first, and `get` answers another count than {count}")
    _kill(place, call)
    place.rerun()
    place.expect_end(NEW, "after a rerun")
    if place.get() != NEW:
        raise Failed("a rerun did not bring the new count")


def _kill(place: Place, call: Call) -> None:
    place.reset()
    place.server.kill_at(call, *place.edit)


def _read_only_count(place: Place) -> int | None:
    """Return the count that one reads who may write nothing; None where that cannot be tried."""
    if not may_mount():
        return None
    before = place.listing()
    count = place.get(is_read_only=True)
    place.verify(is_read_only=True)
    if place.listing() != before:
        raise Failed("something was written where nothing may be")
    return count


def test_a_recovery_killed_at_any_call_leaves_the_old_or_the_new_artifact(
    bench: list[Place], say: Callable[[str], None]
) -> None:
    points = []
    for first in _representative(bench[0]):
        _kill(bench[0], first)
        recovery, _ = bench[0].server.record(*_recovering(bench[0]))
        points += [(first, second) for second in _until_the_next_edit(recovery)]
    say(f"{bench[0].way}: recoveries killed at {len(points)} calls")
    assert points
    failures = spread(bench, points, _check_killed_recovery)
    assert not failures, report_failures(failures, len(points))


def _recovering(place: Place) -> tuple[str | Path, ...]:
    """Return the command that finds what a killed edit left."""
    return place.edit if place.way == "output-dir" else ("get", place.artifact)


def _until_the_next_edit(recovery: list[Call]) -> list[Call]:
    """Return the calls before a new marker is made: what follows is an edit like any other."""
    for number, call in enumerate(recovery):
        if call.name == "openat" and '.lock"' in call.arguments and "O_EXCL" in call.arguments:
            return recovery[:number]
    return recovery


def _representative(place: Place) -> list[Call]:
    """Return calls at which an edit is killed first: all behind the commit of a journal."""
    calls = place.calls
    commit = max(
        number
        for number, call in enumerate(calls)
        if call.name.startswith("rename") and call.has_succeeded and _is_commit(place, call)
    )
    after = calls[commit + 1 :]
    if place.is_journal:
        return [calls[commit // 2], calls[commit], *after]
    if place.way == "output-dir":  # whose recovery is a whole edit
        return [calls[commit // 2], calls[commit], after[-1]]
    before = [calls[commit * part // 4] for part in (1, 2, 3)]
    return [*before, calls[commit], after[0], after[len(after) // 2], after[-1]]


def _is_commit(place: Place, call: Call) -> bool:
    if place.way == "output-dir":
        return '"/parent/output"' in call.arguments
    return ('committed"' if place.is_journal else "RENAME_EXCHANGE") in call.arguments


def _check_killed_recovery(place: Place, point: tuple[Call, Call]) -> None:
    first, second = point
    for check in (_check_get, _check_rerun):
        _kill(place, first)
        place.server.kill_at(second, *_recovering(place))
        check(place)


def _check_get(place: Place) -> None:
    seen, count = _read_only_count(place), place.get()
    if seen not in {None, count}:
        raise Failed(f"read-only {seen}, but then {count}")
    if place.way != "output-dir":
        place.expect_end(count, "after `get`")


def _check_rerun(place: Place) -> None:
    place.rerun()
    place.expect_end(NEW, "after a rerun")


def test_the_calls_of_an_edit_are_the_same_each_time(bench: list[Place]) -> None:
    names = [[(call.name, call.nth) for call in place.calls] for place in bench]
    assert names[0] == names[1]
    assert bench[0].ends[OLD] != bench[0].ends[NEW]
