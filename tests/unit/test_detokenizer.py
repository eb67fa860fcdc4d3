from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reblock.engine.detokenizer import MAX_HELD_TOKENS, Detokenizer

# Three decoders as tokenizers have them. A vocabulary is a list; a token id is an index into it.


def decode_byte_level(vocabulary: list[bytes], token_ids: list[int]) -> str:
    """GPT-2 and most models since: tokens are bytes, and nothing is stripped."""
    return b"".join(vocabulary[token_id] for token_id in token_ids).decode("utf-8", "replace")


def decode_byte_fallback(vocabulary: list[str | int], token_ids: list[int]) -> str:
    """Llama 2: words, or single bytes; one bad byte spoils its whole run. Strips one space."""
    text, run = "", b""
    for token in [*(vocabulary[token_id] for token_id in token_ids), ""]:
        if isinstance(token, int):
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\N{REPLACEMENT CHARACTER}" * len(run)
        text, run = text + token, b""
    return text.removeprefix(" ")


def byte_level(tokens: list[bytes], **keywords: object) -> Detokenizer:
    return Detokenizer(lambda ids: decode_byte_level(tokens, ids), **keywords)  # type: ignore[arg-type]


def byte_fallback(tokens: list[str | int], **keywords: object) -> Detokenizer:
    return Detokenizer(lambda ids: decode_byte_fallback(tokens, ids), **keywords)  # type: ignore[arg-type]


def pieces_of(detokenizer: Detokenizer, num_tokens: int, *, start: int = 0) -> list[str]:
    pieces = [detokenizer.add(token_id) for token_id in range(start, num_tokens)]
    return [*pieces, detokenizer.flush()]


def test_whole_words_come_out_at_once() -> None:
    assert pieces_of(byte_level([b"One", b" two", b"!"]), 3) == ["One", " two", "!", ""]


def test_a_character_of_four_tokens_comes_out_with_the_last_one() -> None:
    tokens = [bytes([byte]) for byte in "😀".encode()]
    assert pieces_of(byte_level(tokens), 4) == ["", "", "", "😀", ""]


def test_what_precedes_an_unfinished_character_comes_out_at_once() -> None:
    tokens = [b"a\xe4", b"\xbd\xa0\xe5", b"\xa5\xbd."]
    assert pieces_of(byte_level(tokens), 3) == ["a", "你", "好.", ""]


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    assert pieces_of(byte_level([b"a", b"\xe4\xbd"]), 2) == ["a", "", "\ufffd"]


def test_a_replacement_character_that_is_really_meant_is_kept() -> None:
    assert "".join(pieces_of(byte_level([b"a", "\ufffd".encode(), b"b"]), 3)) == "a\ufffdb"


def test_bytes_of_a_character_in_byte_fallback_come_out_together() -> None:
    tokens: list[str | int] = [" Hi", " ", *"你".encode(), *"好".encode(), "!"]
    assert pieces_of(byte_fallback(tokens), len(tokens)) == [
        *("Hi", " ", "", "", "你", "", "", "好", "!", "")
    ]


def test_spaces_between_words_survive_a_decoder_that_strips_the_first() -> None:
    tokens: list[str | int] = [" Once", " upon", " a", " time"]
    assert pieces_of(byte_fallback(tokens), 4) == ["Once", " upon", " a", " time", ""]


def test_spaces_that_are_tokens_of_their_own_survive_too() -> None:
    tokens: list[str | int] = ["\n", " ", " ", " x", " ", " y"]
    assert "".join(pieces_of(byte_fallback(tokens), 6)) == "\n   x  y"


def test_a_continued_text_keeps_the_space_in_front_of_its_first_word() -> None:
    tokens: list[str | int] = [" Once", " upon", " a"]
    detokenizer = byte_fallback(tokens, context_ids=[0])
    assert pieces_of(detokenizer, 3, start=1) == [" upon", " a", ""]


def test_without_context_an_answer_starts_without_a_space() -> None:
    assert pieces_of(byte_fallback([" Once", " upon"]), 2, start=1) == ["upon", ""]


def test_skipped_tokens_are_no_text_and_do_not_part_the_words_around_them() -> None:
    tokens: list[str | int] = ["<s>", " Once", "<x>", " upon", "</s>"]
    detokenizer = byte_fallback(tokens, skipped_ids={0, 2, 4}, context_ids=[0])
    assert pieces_of(detokenizer, 5) == ["", "Once", "", " upon", "", ""]


def test_bytes_that_are_no_text_do_not_hold_back_the_answer_for_ever() -> None:
    detokenizer = byte_level([b"\xff"])
    pieces = [detokenizer.add(0) for _ in range(1000)]
    assert len("".join(pieces)) >= 1000 - 2 * MAX_HELD_TOKENS
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 1000


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_byte_level([b"ab ", b"\xf0", b""], token_ids)

    detokenizer = Detokenizer(decode)
    for token_id in [0] * 100 + [1] * 100 + [2] * 100 + [0] * 100:
        detokenizer.add(token_id)
    assert longest <= 2 * MAX_HELD_TOKENS


def test_flushing_an_answer_without_tokens_gives_nothing() -> None:
    assert byte_level([]).flush() == ""


@st.composite
def split_bytes(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut into tokens anywhere, also amid characters."""
    whole = draw(data)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(whole) - 1)))))
    return [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]


any_text = st.text(st.characters(codec="utf-8")).map(str.encode)


@given(tokens=split_bytes(any_text))
def test_pieces_of_any_text_cut_anywhere_join_to_the_text(tokens: list[bytes]) -> None:
    detokenizer = byte_level(tokens)
    shown = ""
    for token_id in range(len(tokens)):
        shown += detokenizer.add(token_id)
        complete = b"".join(tokens[: token_id + 1]).decode("utf-8", "ignore")
        # nothing complete is held back, save U+FFFD itself, which looks like an unfinished end
        assert shown in (complete, complete.rstrip("\ufffd"))
    assert shown + detokenizer.flush() == b"".join(tokens).decode()


# bytes that begin, continue and end characters, and one that never does
fragments = st.sampled_from([b"\xff", b"\xe4", b"\xbd", b"\xa0", b"\xf0", b"\x9f", b"a"])
any_bytes = st.one_of(st.binary(max_size=60), st.lists(fragments, max_size=60).map(b"".join))


@settings(max_examples=300)
@given(tokens=split_bytes(any_bytes))
def test_pieces_of_any_bytes_join_to_what_decoding_all_at_once_gives(tokens: list[bytes]) -> None:
    joined = "".join(pieces_of(byte_level(tokens), len(tokens)))
    assert joined == b"".join(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("num_bad", range(3 * MAX_HELD_TOKENS))
def test_a_character_behind_bytes_that_are_no_text_is_whole(num_bad: int) -> None:
    tokens = [*[b"\xff"] * num_bad, b"\xf0", b"\x9f", b"\x98", b"\x80"]
    joined = "".join(pieces_of(byte_level(tokens), len(tokens)))
    assert joined == "\ufffd" * num_bad + "😀"


words = st.text(st.sampled_from("ab "), min_size=1, max_size=4)
characters = st.characters(min_codepoint=0x80, codec="utf-8", exclude_characters="\ufffd")
chunks = st.one_of(words.map(lambda word: [word]), characters.map(lambda c: list(c.encode())))


@given(parts=st.lists(chunks, min_size=1), num_context=st.integers(0, 3))
def test_pieces_of_byte_fallback_tokens_join_to_the_text(
    parts: list[list[str | int]], num_context: int
) -> None:
    tokens = [token for part in parts for token in part]
    num_context = sum(len(part) for part in parts[:num_context])
    context_ids = list(range(num_context))
    detokenizer = byte_fallback(tokens, context_ids=context_ids)
    joined = "".join(pieces_of(detokenizer, len(tokens), start=num_context))
    before = decode_byte_fallback(tokens, context_ids)
    assert before + joined == decode_byte_fallback(tokens, list(range(len(tokens))))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_every_character_is_one_piece_however_many_bytes_it_has(num_tokens: int) -> None:
    character = {1: "a", 2: "é", 3: "你", 4: "😀"}[num_tokens]
    tokens = [bytes([byte]) for byte in character.encode()]
    assert pieces_of(byte_level(tokens), num_tokens) == [*[""] * (num_tokens - 1), character, ""]
