"""The tokens of all pages: bytes in chunks, without an object per page.

Owns token bytes by *place*, a number the page table keeps per row. Each page size has its own store
of equal places; chunks are never moved, so growing costs the same at any size. A tail page takes a
whole place.
"""

from __future__ import annotations

from kvstore.server.columns import RowPool

CHUNK_PLACES = 4096


class TokenStore:
    """Token bytes of pages of ``page_size`` tokens (4 bytes each)."""

    def __init__(self, page_size: int) -> None:
        self._place_nbytes = page_size * 4
        self._chunks: list[bytearray] = []
        self._places = RowPool()

    def __len__(self) -> int:
        return len(self._places)

    def put(self, tokens: bytes) -> int:
        """Keep ``tokens``, at most a page's worth; returns their place."""
        assert len(tokens) <= self._place_nbytes, len(tokens)
        place = self._places.take()
        number, start = self._at(place)
        if number == len(self._chunks):
            self._chunks.append(bytearray(CHUNK_PLACES * self._place_nbytes))
        self._chunks[number][start : start + len(tokens)] = tokens
        return place

    def get(self, place: int, num_tokens: int) -> bytes:
        number, start = self._at(place)
        return bytes(self._chunks[number][start : start + num_tokens * 4])

    def drop(self, place: int) -> None:
        self._places.give_back(place)

    def _at(self, place: int) -> tuple[int, int]:
        number, index = divmod(place, CHUNK_PLACES)
        return number, index * self._place_nbytes
