"""Small numbers for the namespaces of the pages that are here.

Owns one number per namespace while it has pages; numbers of namespaces without pages are used
again. Number 0 is the empty namespace and stays.
"""

from __future__ import annotations


class Names:
    """Namespaces by number, counted."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._names: list[bytes] = [b""]
        self._counts: list[int] = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        """Namespaces that have pages."""
        return sum(1 for count in self._counts if count)

    def join(self, name: bytes) -> int:
        """One more page of ``name``."""
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            if number == len(self._names):
                self._names.append(name)
                self._counts.append(0)
            self._names[number] = name
            self._numbers[name] = number
        self._counts[number] += 1
        return number

    def leave(self, number: int) -> None:
        """One page less."""
        self._counts[number] -= 1
        if number and not self._counts[number]:
            del self._numbers[self._names[number]]
            self._free.append(number)

    def find(self, name: bytes) -> int | None:
        """The number of ``name``; None when it has no pages."""
        number = self._numbers.get(name)
        return number if number is not None and self._counts[number] else None

    def name(self, number: int) -> bytes:
        return self._names[number]

    def counts(self) -> dict[bytes, int]:
        """Pages by namespace."""
        return {n: c for n, c in zip(self._names, self._counts, strict=True) if c}
