from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.engine.detokenizer import Detokenizer
from reblock.engine.stop import AnswerText, StopStrings


def shown(stop: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown after every piece and at the end, and what was matched."""
    strings = StopStrings(stop)
    texts = [strings.add(piece) for piece in pieces]
    return [*texts, strings.flush()], strings.matched


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "matched"),
    [
        ((), ["ab", "c"], ["ab", "c", ""], None),
        (("x",), ["ab", "xc"], ["ab", "", ""], "x"),
        (("x",), ["abxc"], ["ab", ""], "x"),
        (("xyz",), ["ax", "y", "z!"], ["a", "", "", ""], "xyz"),
        (("xyz",), ["ax", "y", "a"], ["a", "", "xya", ""], None),
        (("xyz",), ["ax", "y"], ["a", "", "xy"], None),
        (("aab",), ["aa", "a", "b", "c"], ["", "a", "", "", ""], "aab"),
        (("\n\n",), ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], "\n\n"),
        # The one that is complete first counts, and of two at once the longer.
        (("abcd", "c"), ["abcd"], ["ab", ""], "c"),
        (("bc", "abc"), ["xabc"], ["x", ""], "abc"),
        (("b", "a"), ["xa", "b"], ["x", "", ""], "a"),
    ],
)
def test_text_passes_up_to_the_stop_string_that_is_complete_first(
    stop: tuple[str, ...], pieces: list[str], expected: list[str], matched: str | None
) -> None:
    assert shown(stop, pieces) == (expected, matched)


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    stop: tuple[str, ...], pieces: list[str]
) -> None:
    texts, matched = shown(stop, pieces)
    whole, matched_of_whole = shown(stop, ["".join(pieces)])
    single, matched_of_single = shown(stop, list("".join(pieces)))
    assert "".join(texts) == "".join(whole) == "".join(single)
    assert matched == matched_of_whole == matched_of_single
    assert not any(text in "".join(texts) for text in stop)
    if matched is None:
        assert "".join(texts) == "".join(pieces)


def bytes_text(stop: tuple[str, ...]) -> AnswerText:
    return AnswerText(Detokenizer(lambda ids: bytes(ids).decode("utf-8", "replace")), stop)


def test_tokens_become_text_up_to_the_stop_string() -> None:
    text = bytes_text(("END",))
    assert [text.add(byte) for byte in b"aENbEND!"] == ["a", "", "", "ENb", "", "", "", ""]
    assert text.matched == "END"
    assert text.finish() == ""


def test_the_end_of_an_answer_shows_what_was_held_back() -> None:
    text = bytes_text(("END",))
    assert [text.add(byte) for byte in b"aEN"] == ["a", "", ""]
    assert text.finish() == "EN"
    assert text.matched is None


def test_a_character_that_never_becomes_whole_comes_behind_what_was_held_back() -> None:
    text = bytes_text(("END",))
    assert [text.add(byte) for byte in b"EN\xc3"] == ["", "", ""]
    assert text.finish() == "EN\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_may_have_characters_of_several_tokens() -> None:
    text = bytes_text(("é!",))
    assert "".join(text.add(byte) for byte in "aé!b".encode()) == "a"
    assert text.matched == "é!"
