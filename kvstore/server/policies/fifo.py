"""First in, first out."""

from __future__ import annotations

from kvstore.server.policies.base import EvictionPolicy


class Fifo(EvictionPolicy):
    """Oldest grant first, whatever was used since."""

    name = "fifo"

    def order(self, row: int) -> int:
        return self._table.generation[row]  # type: ignore[no-any-return]
