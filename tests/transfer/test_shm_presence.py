"""Who is inside of shared memory, and what becomes of memory that somebody does not leave."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from tests.transfer.bulk_harness import pattern
from transfer import shm_control
from transfer.shm_control import REVOKE_PATIENCE_S, STALLED_PATIENCE_S, ControlPage
from transfer.shm_memory import Allocation
from transfer.shm_presence import EVERY_REGION, Presence, wait_until_empty


def test_the_owner_is_refused_exactly_while_a_peer_is_inside() -> None:
    control = ControlPage()
    presence = Presence(control.open_for_peer())
    assert presence.enter(7)
    assert presence.enter(7), "threads of one peer share the lock"
    presence.leave(7)
    assert not wait_until_empty(control.fd, 7, 0.0)
    assert not wait_until_empty(control.fd, EVERY_REGION, 0.0)
    assert wait_until_empty(control.fd, 8, 0.0), "another region"
    presence.leave(7)
    assert wait_until_empty(control.fd, 7, 0.0)
    assert wait_until_empty(control.fd, EVERY_REGION, 0.0)
    presence.close()
    control.close()


def test_each_peer_has_locks_of_its_own() -> None:
    control = ControlPage()
    one, two = (Presence(control.open_for_peer()) for _ in range(2))
    assert one.enter(7)
    assert two.enter(7)
    one.leave(7)
    assert not wait_until_empty(control.fd, 7, 0.0)
    two.leave(7)
    assert wait_until_empty(control.fd, 7, 0.0)
    one.close()
    two.close()
    control.close()


def test_a_connection_that_closes_keeps_the_locks_of_those_inside() -> None:
    control = ControlPage()
    presence = Presence(control.open_for_peer())
    assert presence.enter(7)
    presence.close()
    presence.close()
    assert not presence.enter(7)
    assert not wait_until_empty(control.fd, 7, 0.0)
    presence.leave(7)
    assert wait_until_empty(control.fd, 7, 0.0)
    control.close()


def test_a_peer_that_uses_up_the_patience_holds_up_one_revocation_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def wait(fd: int, region_id: int, patience_s: float) -> bool:
        waits.append(patience_s)
        return wait_until_empty(fd, region_id, 0.0)

    monkeypatch.setattr(shm_control, "wait_until_empty", wait)
    control = ControlPage()
    presence = Presence(control.open_for_peer())
    for region_id in (7, 8):
        assert presence.enter(region_id)
    assert not control.wait_until_empty(7)
    assert not control.wait_until_empty(8)
    assert waits == [REVOKE_PATIENCE_S, 0.0, STALLED_PATIENCE_S]
    for region_id in (7, 8):
        presence.leave(region_id)
    assert control.wait_until_empty(9)
    assert waits[-1] == REVOKE_PATIENCE_S
    presence.close()
    control.close()


def test_memory_left_behind_keeps_its_address_and_loses_no_store() -> None:
    allocation = Allocation(50 * 4096, shared=True)
    allocation.hold()
    assert allocation.fd is not None
    peer = mmap.mmap(allocation.fd, allocation.nbytes)
    mine, address = np.frombuffer(allocation.view, np.uint8), allocation.address
    mine[:] = pattern(allocation.nbytes)
    storing, stop = np.frombuffer(allocation.view, np.int64, 1, 10 * 4096), threading.Event()
    storing[0] = 0

    def store() -> None:
        while not stop.is_set():
            storing[0] += 1
            count[0] += 1

    count = [0]
    thread = threading.Thread(target=store)
    thread.start()
    while count[0] < 1000:
        pass
    assert allocation.leave_behind()
    assert allocation.keep_bytes()
    so_far = count[0]
    while count[0] < so_far + 1000:
        pass
    stop.set()
    thread.join()
    peer[:] = b"\xee" * allocation.nbytes
    assert storing[0] == count[0]
    rest = np.ones(allocation.nbytes, bool)
    rest[10 * 4096 : 10 * 4096 + 8] = False
    assert np.array_equal(mine[rest], pattern(allocation.nbytes)[rest])
    assert (allocation.address, allocation.fd) == (address, None)
