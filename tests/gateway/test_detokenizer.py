"""Claims about detokenising: never half a character, stop strings across any borders."""

from __future__ import annotations

import random

import pytest

from gateway.detokenizer import Detokenizer, StopMatch, StopScanner
from gateway.tokenizer import ByteTokenizer

TEXTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family 🎉", "mixed ✓ ünï 漢字 🎈 end"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_one_by_one_give_whole_characters_only(text: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    shown = ""
    for byte in text.encode():
        piece = detokenizer.push(byte)
        assert "�" not in piece
        shown += piece
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def test_invalid_bytes_become_replacement_characters_like_in_decode() -> None:
    rng = random.Random(1)
    for _ in range(300):
        raw = bytes(rng.choices([0x41, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0xFF], k=8))
        detokenizer = Detokenizer(ByteTokenizer())
        shown = "".join(detokenizer.push(byte) for byte in raw) + detokenizer.flush()
        assert shown == raw.decode("utf-8", "replace")


def test_a_character_that_is_never_completed_shows_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push(0xE6) == ""
    assert detokenizer.flush() == "�"


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.push(token) for token in (256, 65, 257, 258)] == ["", "A", "", ""]


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Where the text ends when it is read character by character."""
    for end in range(1, len(text) + 1):
        ending = sorted(
            (text[:end].rfind(stop), stop) for stop in stops if text[:end].endswith(stop)
        )
        if ending:
            position, stop = ending[0]
            return text[: position + (len(stop) if include else 0)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_stops_are_found_across_borders_and_nothing_of_them_leaks(seed: int, include: bool) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 14)))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randrange(1, 4))) for _ in range(2)]
        scanner = StopScanner(stops, include_stop=include)
        shown, found = "", None
        for char in text:
            piece = scanner.push(char)
            if isinstance(piece, StopMatch):
                shown, found = shown + piece.text, piece.stop
                break
            shown += piece
        else:
            shown += scanner.flush()
        assert (shown, found) == naive(text, stops, include)


def test_text_that_cannot_become_a_stop_is_not_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("hello E") == "hello "
    assert scanner.push("x") == "Ex"
    assert scanner.push("EN") == ""
    assert scanner.push("D more") == StopMatch("", "END")


def test_a_stop_within_one_piece_cuts_at_its_first_occurrence() -> None:
    scanner = StopScanner(["\n\n", "b"])
    assert scanner.push("a b\n\nc b") == StopMatch("a ", "b")


def test_stops_do_not_match_before_they_may() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("ax", may_stop=False) == "ax"
    assert scanner.push("bx") == StopMatch("b", "x")
