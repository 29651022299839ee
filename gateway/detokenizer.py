"""From token bytes to text, piece by piece, without ever showing half a character.

Owns ``Detokenizer`` (incremental UTF-8 over the bytes of each token) and ``StopScanner`` (stop
strings across token borders). Sans-I/O; knows no tokenizer files.

A multi-byte character that is split over tokens is held back until it is complete; bytes that can
never become a character turn into U+FFFD, as in the tokenizers' own ``decode``.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; empty for an id without text."""
        ...

    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """Incremental decoding of one output sequence."""

    def __init__(self, vocabulary: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that is complete with ``token``; may be empty."""
        if self._skip_special and self._vocabulary.is_special(token):
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopMatch(NamedTuple):
    """A stop string was found; ``text`` is what may be shown of the last piece."""

    text: str
    stop: str


class StopScanner:
    """Finds stop strings in a stream of text, holding back what might become one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would match anywhere"
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str | StopMatch:
        """Return the text that is safe to show, or the match. ``may_stop`` False never matches."""
        if not self._stops:
            return text
        self._held += text
        found = self._earliest() if may_stop else None
        if found is not None:
            position, stop = found
            end = position + len(stop) if self._include_stop else position
            shown, self._held = self._held[:end], ""
            return StopMatch(shown, stop)
        keep = max(self._partial(stop) for stop in self._stops)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def flush(self) -> str:
        """Return what was held back."""
        shown, self._held = self._held, ""
        return shown

    def _earliest(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stops]
        return min((hit for hit in hits if hit[0] >= 0), default=None)

    def _partial(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
