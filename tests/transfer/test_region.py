"""The table of regions under several threads: what ``revoke`` and ``register`` promise to all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from transfer.region import HostRegion, RegionTable
from transfer.shm_memory import shared_memory_available


def new_table() -> RegionTable:
    return RegionTable(lambda *_: b"")


def test_a_second_revoke_returns_no_sooner_than_the_first() -> None:
    region = new_table().register_host(memoryview(bytearray(64)))
    assert region.gate.enter()
    threads = [threading.Thread(target=region.revoke) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.05)
        assert thread.is_alive(), "revoked while somebody is inside"
    region.gate.leave()
    for thread in threads:
        thread.join()
    assert region.revoked


class Handover:
    """A lock that somebody else takes at once when it is first given back."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._then: Callable[[], None] | None = then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if (then := self._then) is not None:
            self._then = None
            then()


@pytest.mark.skipif(not shared_memory_available(), reason="no memfd")
def test_a_slice_registered_while_the_whole_is_revoked_keeps_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = new_table()
    whole = table.allocate(8192, shared=True)
    monkeypatch.setattr(table, "_lock", Handover(whole.revoke))
    part = table.register(whole.view[:4096])
    assert whole.revoked
    assert isinstance(part, HostRegion)
    assert part.in_shared_memory
    assert part.allocation is not None
    assert part.allocation.fd is not None
    os.fstat(part.allocation.fd)
    part.revoke()
