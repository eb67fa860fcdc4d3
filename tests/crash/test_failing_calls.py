"""An edit of which any call fails is done in full, or leaves the old artifact and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import Failed, report_failures, spread
from trees import NEW, OLD

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from bench import Place
    from tracing import Call, Outcome

_ERRORS = {
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EACCES": "Permission denied",
}
# What file systems and mounts answer where a directory cannot be exchanged or renamed.
_ERRORS_OF_RENAMES = {
    "EXDEV": "Invalid cross-device link",
    "EBUSY": "Device or resource busy",
    "EINVAL": "Invalid argument",
}
# Only some users may set owners and some attributes, so that they may is not asked for.
_MAY_BE_REFUSED = {"chown", "fchown", "lchown", "fchownat", "setxattr", "fsetxattr", "lsetxattr"}
_MAY_STAND_BESIDE = ("reblock: note: ", "copying large.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that fails, and all of its name that come later where it is `for_good`."""

    call: Call
    error: str
    for_good: bool

    def __str__(self) -> str:
        return f"{self.error} {'for good ' if self.for_good else ''}of {self.call}"


def test_an_edit_of_which_any_call_fails_is_whole_or_leaves_the_old_artifact(
    bench: list[Place], say: Callable[[str], None], pytestconfig: pytest.Config
) -> None:
    is_exhaustive = bool(pytestconfig.getoption("--exhaustive", default=False))
    failures = _failures(bench[0].calls, is_exhaustive=is_exhaustive)
    say(f"{bench[0].way}: {len(failures)} failing calls, one in each edit")
    found = spread(bench, failures, _check_failure)
    assert not found, report_failures(found, len(failures))


def _failures(calls: list[Call], *, is_exhaustive: bool) -> list[Failure]:
    """Return every call with every error, or, not exhaustive, with one of them in turn."""
    failures = []
    for number, call in enumerate(calls):
        each = [
            Failure(call=call, error=error, for_good=for_good)
            # Messages are written by the same call, so it cannot fail for good.
            for for_good in ((False,) if call.name == "write" else (False, True))
            for error in _ERRORS
        ]
        failures += each if is_exhaustive else [each[number % len(each)]]
        if call.name.startswith("rename"):
            failures += [
                Failure(call=call, error=error, for_good=False) for error in _ERRORS_OF_RENAMES
            ]
    return failures


def _check_failure(place: Place, failure: Failure) -> None:
    call, error = failure.call, failure.error
    place.reset()
    outcome = place.server.fail_at(call, error, *place.edit, for_good=failure.for_good)
    if outcome.code == 0:
        count = NEW
    else:
        count = OLD
        _check_message(outcome, error)
    if "Traceback" in outcome.stderr:
        raise Failed(f"a traceback: {outcome.stderr}")
    strays = [line for line in place.strays(count) if not _is_tolerated(call, line)]
    if strays and "note: " not in outcome.stderr:
        raise Failed(f"without a note, {strays[0]}")
    if place.get() != count:
        raise Failed(f"the code was {outcome.code}, but the count is not {count}: {outcome}")
    place.verify()
    if place.way != "output-dir" or count == NEW:
        # What could not be removed was named in a note, and is removed by the next command.
        strays = [line for line in place.strays(count) if not _is_tolerated(call, line)]
        if strays:
            raise Failed(f"after `get`, {strays[0]}")
    place.rerun()
    strays = [line for line in place.strays(NEW) if not _is_tolerated(call, line)]
    if strays:
        raise Failed(f"after a rerun, {strays[0]}")


def _is_tolerated(call: Call, stray: str) -> bool:
    """Whether a difference is an owner or attribute that the system refused to set."""
    return call.name in _MAY_BE_REFUSED and stray.endswith(("another owner", "another attributes"))


def _check_message(outcome: Outcome, error: str) -> None:
    """Check that the error is one line that names a path and what the system said."""
    if outcome.code != 1:
        raise Failed(f"exit code {outcome.code}: {outcome.stderr}")
    lines = outcome.stderr.splitlines()
    errors = [line for line in lines if line.startswith("reblock: error: ")]
    others = [line for line in lines if line not in errors]
    # Beside it there may be notes, and the progress of large files that had to be copied.
    if len(errors) != 1 or not all(line.startswith(_MAY_STAND_BESIDE) for line in others):
        raise Failed(f"not one line of error: {outcome.stderr}")
    reason = (_ERRORS | _ERRORS_OF_RENAMES)[error]
    if "/parent/" not in errors[0] or reason not in errors[0]:
        raise Failed(f"names no path, or not {reason!r}: {errors[0]}")
