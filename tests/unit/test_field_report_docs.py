"""docs/field-reports.md: a line for every report, and tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "field-reports.md"
OWN = (
    "unit/test_field_reports.py",
    "unit/test_field_report_models.py",
    "cli/test_field_report_commands.py",
    "full/test_field_report_programs.py",
)
# The reports that a test or a policy can hold. Others were no more than remarks.
REPORTS = (
    *(1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 22, 23, 24, 25, 27, 28, 29),
    *(31, 32, 33, 35, 37, 40, 42, 43, 45, 46, 48, 50, 54, 55, 56, 58, 60, 61, 63, 65, 66),
)
_LINE = re.compile(r"^\| (\d+) \|([^|]+)\|([^|]+)\|([^|]+)\|$", re.MULTILINE)
_TEST = re.compile(r"`([a-z_0-9/]+\.py)::(test_\w+)`")
_NUMBERS = re.compile(r"# Reports? (\d+(?:(?:, | and )\d+)*)")

Tests = set[tuple[str, str]]


@cache
def read_document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def named(text: str) -> Tests:
    return set(_TEST.findall(text))


def lines() -> dict[int, tuple[str, str, Tests]]:
    """Return what is said of every report: what was reported, what is done, and its tests."""
    found = {}
    for number, reported, done, held_by in _LINE.findall(read_document()):
        assert int(number) not in found, f"report {number} has two lines"
        found[int(number)] = (reported.strip(), done.strip(), named(held_by))
    return found


@cache
def functions(path: str) -> dict[str, str]:
    """Return the tests of a module, by name, with their source."""
    source = (TESTS / path).read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_report_has_one_line_and_there_are_no_others() -> None:
    assert sorted(lines()) == list(REPORTS)
    assert len(set(REPORTS)) == 45


@pytest.mark.parametrize("number", REPORTS)
def test_a_line_says_who_reported_what_is_done_and_which_tests_hold_it(number: int) -> None:
    reported, done, held_by = lines()[number]
    assert re.match(r"[\w.-]+ #\d+.*: \S", reported)
    assert len(done) > 20
    assert held_by or "does not apply" in done


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named(read_document()))
        if not (TESTS / path).is_file() or name not in functions(path)
    ]
    assert missing == []


def test_nothing_that_looks_like_a_test_escapes_the_check() -> None:
    assert read_document().count("::test_") == len(_TEST.findall(read_document()))


@pytest.mark.parametrize("path", OWN)
def test_every_test_of_a_report_is_named_in_the_lines_of_its_reports(path: str) -> None:
    found = lines()
    for name, source in functions(path).items():
        numbers = [
            int(number)
            for group in _NUMBERS.findall(source)
            for number in re.findall(r"\d+", group)
        ]
        assert numbers or (path, name) in named(read_document()), name
        for number in numbers:
            assert (path, name) in found[number][2], f"report {number}: {name}"
