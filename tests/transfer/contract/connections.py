"""Connections that hang, stall, die unseen or are cut. For transports that connect.

PITFALLS of this kind of system: name resolution or a connect hangs, and everybody waits for it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from tests.transfer.bulk_harness import LIMIT_S
from tests.transfer.contract.world import (
    BOTH_KINDS,
    HELD_NBYTES,
    Ends,
    Engine,
    Pair,
    Trait,
    World,
    make_pair,
    needs,
    small_read_works,
)
from tests.transfer.wire import Wire
from transfer.errors import DeadlineExceeded, PeerLost
from transfer.interface import deadline_after
from transfer.tcp_sockets import join_address
from transfer.token import decode_token, encode_token

SHORT_S = 0.3
UNRESOLVED = "hangs.invalid"


def at_address(token: bytes, address: str) -> bytes:
    """Return the token as if its owner had said that it listens at ``address``."""
    decoded = decode_token(token)
    ucx = address if decoded.endpoint.ucx else ""
    return encode_token(replace(decoded, endpoint=replace(decoded.endpoint, tcp=address, ucx=ucx)))


async def others_work_until_it_ends(task: asyncio.Task[None], user: Engine, other: Engine) -> int:
    """Return how many reads from ``other`` succeeded before ``task`` ended."""
    num_reads = 0
    while not task.done():
        await small_read_works((other, user))
        num_reads += 1
    return num_reads


@contextmanager
def silent_listener() -> Iterator[str]:
    """An address whose kernel accepts and whose process never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield join_address(*sock.getsockname())


@contextmanager
def hanging_resolver() -> Iterator[str]:
    """An address whose name is never resolved, until the body ends."""
    resolve, over = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == UNRESOLVED:
            over.wait()
            raise socket.gaierror(f"{host} was never resolved")
        return resolve(host, *args, **kwargs)

    with mock.patch("socket.getaddrinfo", getaddrinfo):
        try:
            yield f"{UNRESOLVED}:1"
        finally:
            over.set()


@pytest.mark.parametrize("hanging", [silent_listener, hanging_resolver])
@needs(Trait.CONNECTS)
async def test_a_connect_that_hangs_ends_at_the_deadline_and_holds_up_nobody(
    world: World, hanging: Any
) -> None:
    owner, user = await make_pair(world)
    other = await world.make()
    ends = Ends(Pair(owner, user), "read", 64)
    loop = asyncio.get_running_loop()
    with hanging() as address:
        ends.token = at_address(ends.token, address)
        start_s = loop.time()
        task = ends.start(deadline_after(SHORT_S))
        assert await others_work_until_it_ends(task, user, other) > 0
        with pytest.raises(DeadlineExceeded):
            await task
        assert SHORT_S <= loop.time() - start_s < LIMIT_S / 4
    await small_read_works((owner, user))


@BOTH_KINDS
@needs(Trait.WIRE)
async def test_a_wire_that_stalls_and_goes_on_loses_nothing(world: World, kind: str) -> None:
    ends = Ends(await make_pair(world), kind)
    other = await world.make()
    async with Wire(ends.token) as wire:
        ends.token = wire.token
        await ends.connect()
        wire.stall()
        task = ends.start()
        for _ in range(5):
            await small_read_works((other, ends.user))
        assert not task.done()
        wire.resume()
        await task
    assert ends.target.view == ends.source.view


@BOTH_KINDS
@needs(Trait.WIRE)
async def test_a_half_open_connection_ends_at_the_deadline_and_is_replaced(
    world: World, kind: str
) -> None:
    """The owner's side is gone, the user's side is open and silent: nobody tells the user."""
    ends = Ends(await make_pair(world), kind)
    async with Wire(ends.token) as wire:
        ends.token = wire.token
        await ends.connect()
        wire.lose_owner()
        with pytest.raises(DeadlineExceeded):
            await ends.move(deadline_after(SHORT_S))
        ends.local.view[:] = bytes([5]) * HELD_NBYTES
        wire.cut()
        await works_again(ends)
        assert wire.num_connections == 2
    assert ends.target.view == ends.source.view


async def works_again(ends: Ends) -> None:
    """The user may find the cut connection, once, before it has been told that it was cut."""
    try:
        await ends.move()
    except PeerLost:
        await ends.move()


@needs(Trait.WIRE)
async def test_an_idle_connection_that_is_cut_is_made_again(world: World) -> None:
    ends = Ends(await make_pair(world), "read")
    async with Wire(ends.token) as wire:
        ends.token = wire.token
        for round_ in range(1, 4):
            await works_again(ends)
            assert ends.local.view == ends.remote.view
            assert wire.num_connections == round_
            wire.cut()


@BOTH_KINDS
@needs(Trait.WIRE)
async def test_a_cut_during_an_operation_is_lost_at_once(world: World, kind: str) -> None:
    ends = Ends(await make_pair(world), kind)
    before = bytes(ends.target.view)
    async with Wire(ends.token) as wire:
        ends.token = wire.token
        await ends.connect()
        wire.stall()
        task = ends.start()
        await small_read_works((await world.make(), ends.user))  # it has left by now
        wire.cut()
        with pytest.raises(PeerLost):
            await task
        assert ends.target.view == before
        wire.resume()
        await works_again(ends)
    assert ends.target.view == ends.source.view
