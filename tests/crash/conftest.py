"""Options of the tests that break edits, and places to break them at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench import MORE_WAYS, WAYS, places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench import Place, Way

_SUMMARY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crash")
    group.addoption(
        "--exhaustive",
        action="store_true",
        help="fail every call of an edit with every error, not each with one of them; break edits "
        "also where there are no hard links",
    )
    group.addoption(
        "--side-by-side-seconds",
        type=float,
        default=60.0,
        help="how long 8 writers and 8 readers work on one artifact",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SUMMARY] = []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[_SUMMARY]
    if lines:
        terminalreporter.section("edits broken on purpose")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Note a line that is printed at the end of the run, whatever its outcome."""
    return pytestconfig.stash[_SUMMARY].append


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" in metafunc.fixturenames:
        is_exhaustive = metafunc.config.getoption("--exhaustive", default=False)
        ways = [*WAYS, *MORE_WAYS] if is_exhaustive else WAYS
        metafunc.parametrize("bench", ways, indirect=True, scope="session")


@pytest.fixture(scope="session")
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Place]]:
    """Places to make an edit at, in one of the ways."""
    way: Way = request.param
    with places(tmp_path_factory.mktemp(way.replace(" ", "-")), way) as found:
        yield found
