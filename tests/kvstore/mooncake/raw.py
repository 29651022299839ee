"""Mooncake used past kvferry: a client that reads, damages and leaves objects under any key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvstore.mooncake.binding import Library
from kvstore.page import PageKey


class RawClient:
    """A client of the library itself."""

    def __init__(self, master: str) -> None:
        self.native: Any = Library().new_store()
        code = self.native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        assert code == 0, code

    def replace(self, name: str, value: bytes) -> None:
        """Store ``value`` under ``name``, whatever was there."""
        self.native.batch_remove([name], True)
        assert self.native.put(name, value) == 0

    def get(self, name: str) -> bytes:
        value: bytes = self.native.get(name)
        return value

    def exists(self, name: str) -> bool:
        return bool(self.native.is_exist(name) == 1)


@contextlib.contextmanager
def raw_client(master: str) -> Iterator[RawClient]:
    client = RawClient(master)
    try:
        yield client
    finally:
        client.native.close()


def object_name(prefix: str, key: PageKey) -> str:
    """The key of a page's object; part of the format that processes share."""
    return f"{prefix}/{key.hex()}"
