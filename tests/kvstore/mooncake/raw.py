"""Mooncake used past kvferry: a client that reads, damages and leaves objects under any key.

Also clients that many tests use in turn, since leaving a cluster takes Mooncake a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from kvstore.mooncake.binding import Library, NativeStore
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


class KeptClients(Library):
    """The library, except that a client which a store has closed serves the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[_KeptClient] = []
        self.free: list[_KeptClient] = []

    def new_store(self) -> NativeStore:
        if not self.free:
            self.all.append(_KeptClient(super().new_store(), self))
            return cast(NativeStore, self.all[-1])
        return cast(NativeStore, self.free.pop())

    def close(self) -> None:
        if self.all:
            with ThreadPoolExecutor(len(self.all)) as threads:
                list(threads.map(lambda client: client.native.close(), self.all))


class _KeptClient:
    def __init__(self, native: Any, home: KeptClients) -> None:
        self.native = native
        self._home = home
        self._is_set_up = False

    def setup(self, *args: Any) -> int:
        code = 0 if self._is_set_up else int(self.native.setup(*args))
        self._is_set_up = code == 0
        return code

    def close(self) -> int:
        self._home.free.append(self)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)
