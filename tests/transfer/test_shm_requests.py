"""Hellos and map requests over the unix socket of shm: who is asked, how often, how long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    checked_engines,
    open_files,
    soon,
    until,
    whole,
)
from tests.transfer.test_shm import only_connection
from transfer import shm_owner, shm_peer
from transfer.engine import TransferEngine
from transfer.shm_wire import SHM_PROTOCOL_VERSION, HelloPacket, MapPacket, send_packet
from transfer.token import decode_token


class Requests:
    """The map requests that an owner gets, noted, and held on its I/O thread until let go."""

    def __init__(self, owner: TransferEngine) -> None:
        assert owner._shm is not None
        self.num_got = 0
        self.answer = threading.Event()
        self._on_map = owner._shm._owner._on_map
        owner._shm._owner._on_map = self._note  # type: ignore[method-assign]

    def _note(self, *args: object) -> None:
        self.num_got += 1
        assert self.answer.wait(LIMIT_S), "nobody let the owner answer"
        self._on_map(*args)  # type: ignore[arg-type]


async def test_those_who_use_a_region_first_at_the_same_moment_ask_for_it_once() -> None:
    """Hundreds of requests would not fit the socket, and the peer would be left to tcp for good."""
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        token, local = owner.allocate(8).export("r"), peer.allocate(8)
        requests = Requests(owner)
        requests.answer.set()
        async with asyncio.TaskGroup() as group:
            for _ in range(1000):
                group.create_task(peer.read(token, whole(8), into=local, deadline_s=soon()))
        assert requests.num_got == 1
        assert peer.counters().fallbacks == 0


async def test_a_request_whose_asker_gave_up_still_maps_the_region() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        token, local = owner.allocate(8).export("r"), peer.allocate(8)
        requests = Requests(owner)
        asking = asyncio.create_task(peer.read(token, whole(8), into=local, deadline_s=soon()))
        await until(lambda: requests.num_got)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        requests.answer.set()
        await until(lambda: only_connection(peer).mappings.region_ids)
        await peer.read(token, whole(8), into=local, deadline_s=soon())
        assert requests.num_got == 1


async def test_an_owner_that_answers_nothing_is_not_asked_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm_peer, "MAX_MAP_REQUESTS", 2)
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        regions, local = [owner.allocate(8) for _ in range(3)], peer.allocate(8)
        requests = Requests(owner)
        reads = [
            asyncio.create_task(
                peer.read(region.export("r"), whole(8), into=local, deadline_s=soon())
            )
            for region in regions
        ]
        await until(lambda: requests.num_got)
        connection = only_connection(peer)
        await until(lambda: len(connection._requests) == 2)
        requests.answer.set()
        await asyncio.gather(*reads)  # the third by tcp
        assert peer.counters().fallbacks == 1


async def test_a_revocation_that_crosses_a_mapping_leaves_nothing_mapped() -> None:
    """The owner revokes when the peer's request is answered but not yet seen."""
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(4096), peer.allocate(4096)
        await peer.read(region.export("r"), whole(8), into=local, deadline_s=soon())
        connection = only_connection(peer)
        other = owner.allocate(4096)
        token = decode_token(other.export("r"))
        assert peer._io is not None
        answer = connection._on_reply

        def revoke_first(*args: object) -> None:
            other.revoke()
            answer(*args)  # type: ignore[arg-type]

        connection._on_reply = revoke_first  # type: ignore[method-assign]
        await peer._io.run(connection.map(token.region_id, token.capability))
        assert connection.mappings.region_ids == [region.region_id]


async def test_peers_that_say_nothing_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_owner, "HELLO_LIMIT_S", 0.01)
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(f"\0kvferry/{owner.address}")
            assert await asyncio.to_thread(silent.recv, 1) == b"", "hung up on"


async def test_only_so_many_peers_may_be_unknown_and_the_known_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm_owner, "MAX_UNKNOWN_PEERS", 3)
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(sock)
                sock.connect(f"\0kvferry/{owner.address}")
            assert await asyncio.to_thread(sock.recv, 1) == b"", "the last is hung up on"
            assert owner._shm is not None
            assert len(owner._shm._owner._unknown) == 3
            later = owner.allocate(64)
            await peer.read(later.export("r"), whole(64), into=local, deadline_s=soon())


async def test_a_peer_that_asks_and_does_not_read_is_dropped() -> None:
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        token = decode_token(owner.allocate(4096).export("r"))
        files = len(open_files())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
            deaf.connect("\0" + token.endpoint.shm)
            send_packet(deaf, HelloPacket(SHM_PROTOCOL_VERSION, "deaf"))
            ask = MapPacket(1, token.region_id, token.capability)

            def flood() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        send_packet(deaf, ask)

            await asyncio.to_thread(flood)
        await until(lambda: len(open_files()) == files)
        assert owner._shm is not None
        assert owner._shm._owner.num_connections == 0
        assert not owner._shm._owner.is_mapped(token.region_id)
