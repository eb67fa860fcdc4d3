"""A place where one edit is made again and again, each time disturbed at another call.

There are three ways to write, and each has a place of its own: an exchange of directories, a
journal (the artifact is a mount point, which cannot be exchanged), and another directory. Two more
are exchange and journal on a file system without hard links, where files have to be copied.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar

from namespaces import NO_EXCHANGE, NO_LINKS, need_filters, need_mounts
from tracing import CommandServer, HarnessError, need_strace
from trees import NEW, OLD, clear, copy_tree, differences, listing, make_small_artifact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tracing import Call, Outcome
    from trees import Entry

    Way = Literal["exchange", "journal", "output-dir", "copying exchange", "unlinked journal"]

WAYS: tuple[Way, ...] = ("exchange", "journal", "output-dir")
MORE_WAYS: tuple[Way, ...] = ("copying exchange", "unlinked journal")
MOUNTED_ON_ITSELF = 'mount --bind "$1/parent/artifact" "$1/parent/artifact"'
VERIFY = ("verify", "--quick")
# As many as there are places; more than that many processors are not asked for.
_NUM_PLACES = 2


_Point = TypeVar("_Point")


class Failed(Exception):  # noqa: N818 - says what it is
    """What is tested did not do what it should."""


class Place:
    """A directory with an artifact in it, an edit of it, and a server that runs commands there."""

    def __init__(self, base: Path, template: Path, server: CommandServer, way: Way) -> None:
        self.base = base
        self.server = server
        self.way = way
        self.is_journal = way.endswith("journal")
        self.artifact = base / "parent" / "artifact"
        self._output = base / "parent" / "output"
        self.edit: tuple[str | Path, ...] = ("set", self.artifact, str(NEW))
        if way == "output-dir":
            self.edit = (*self.edit, "--output-dir", self._output)
        self._template = template
        self.warm_up()
        self.calls, self.ends = self._record()

    def warm_up(self) -> None:
        """Let the server import all that the commands need."""
        self.reset()
        artifact = self.artifact
        self.server.warm_up(
            ("get", artifact), self.edit, (*VERIFY, artifact), ("set", artifact, "8")
        )

    def _record(self) -> tuple[list[Call], dict[int, dict[str, Entry]]]:
        """Return the calls of the edit, and what is there without it and after it."""
        self.reset()
        ends = {OLD: self.listing()}
        calls, outcome = self.server.record(*self.edit)
        if outcome.code:
            raise HarnessError(f"the edit fails undisturbed: {outcome.stderr}")
        ends[NEW] = self.listing()
        return calls, ends

    def reset(self) -> None:
        """Put the artifact there as it was, and nothing else."""
        parent = self.base / "parent"
        parent.mkdir(exist_ok=True)
        clear(parent, keep=self.artifact if self.way == "journal" else None)
        if self.way == "journal":  # the mount point itself has to stay
            clear(self.artifact)
        copy_tree(self._template, self.artifact)

    def listing(self) -> dict[str, Entry]:
        """Return what is there now."""
        return listing(self.base / "parent")

    def get(self, *, is_read_only: bool = False) -> int:
        """Return the count that `reblock get` answers with, and check that it is a known one.

        With `--output-dir` that is the new count where the output is there, or else the old one.
        """
        read_only = self.base if is_read_only else None
        path = self.artifact
        if self.way == "output-dir":
            source = self.server.run("get", self.artifact, read_only=read_only)
            if (source.code, source.stdout) != (0, f"{OLD}\n"):
                raise Failed(f"the source has another count: {source}")
            if not self._output.exists():
                return OLD
            path = self._output
        outcome = self.server.run("get", path, read_only=read_only)
        allowed = (NEW,) if self.way == "output-dir" else (OLD, NEW)
        if outcome.code or outcome.stdout not in [f"{count}\n" for count in allowed]:
            raise Failed(f"`get` answers neither the old nor the new count: {outcome}")
        return int(outcome.stdout)

    def verify(self, *, is_read_only: bool = False) -> None:
        """Check that `reblock verify --quick` finds all artifacts whole."""
        outputs = [self._output] if self._output.exists() else []
        for path in [self.artifact, *outputs]:
            read_only = self.base if is_read_only else None
            outcome = self.server.run(*VERIFY, path, read_only=read_only)
            if outcome.code:
                raise Failed(f"`verify` finds fault: {outcome}")

    def rerun(self) -> Outcome:
        """Run the edit undisturbed; where the output is there already, that has to be said."""
        is_there = self.way == "output-dir" and self._output.exists()
        outcome = self.server.run(*self.edit)
        if is_there and outcome.code == 1 and "exists and is not an empty" in outcome.stderr:
            return outcome
        if outcome.code:
            raise Failed(f"a rerun fails: {outcome}")
        return outcome

    def expect_end(self, count: int, after: str) -> None:
        """Check that all is as it is without the edit, or as it is after it, and no stray file."""
        if found := self.strays(count):
            raise Failed(f"{after}, at {count} blocks: " + "; ".join(found[:4]))

    def strays(self, count: int) -> list[str]:
        """Return what is not as it is without the edit, or not as it is after it."""
        return differences(self.listing(), self.ends[count])


@contextmanager
def places(base: Path, way: Way) -> Iterator[list[Place]]:
    """Yield places for one way to write; skips the test where there can be none."""
    need_strace()
    if way == "journal":
        need_mounts()
    refused = {"copying exchange": NO_LINKS, "unlinked journal": NO_LINKS + NO_EXCHANGE}.get(
        way, []
    )
    if refused:
        need_filters()
    template = make_small_artifact(base / "template")
    with ExitStack() as stack:
        found = []
        for number in range(_NUM_PLACES):
            place = base / f"place-{number}"
            (place / "parent" / "artifact").mkdir(parents=True)
            mounts = MOUNTED_ON_ITSELF if way == "journal" else ""
            server = CommandServer(place, mounts=mounts, refused=refused)
            found.append(Place(place, template, stack.enter_context(server), way))
        yield found


def spread(
    found: Sequence[Place], points: Sequence[_Point], check: Callable[[Place, _Point], None]
) -> list[str]:
    """Check every point, at whichever place is free, and return what has failed."""
    free: SimpleQueue[Place] = SimpleQueue()
    for place in found:
        free.put(place)

    def check_one(point: _Point) -> str | None:
        place = free.get()
        try:
            check(place, point)
        except (Failed, HarnessError) as error:
            parts = point if isinstance(point, tuple) else (point,)
            return f"{type(error).__name__} at {' / '.join(map(str, parts))}: {error}"
        finally:
            free.put(place)
        return None

    with ThreadPoolExecutor(len(found)) as pool:
        return [failure for failure in pool.map(check_one, points) if failure is not None]


def report_failures(failures: Sequence[str], num_points: int) -> str:
    """Return a text of a few failures, for the message of an assert."""
    shown = "\n".join(failures[:40])
    return f"{len(failures)} of {num_points} points failed:\n{shown}"
