"""Seats in a real etcd, for tests: members and what they saw, and a way to etcd that can be cut."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.transfer.etcd_server import EtcdServer
from transfer.etcd import EtcdAccess, EtcdAddress, EtcdMembership, parse_address
from transfer.identity import Identity, Role, new_identity
from transfer.membership import MembershipView, NodeInfo, NodeStatus

SEEN_WITHIN_S = 15.0


def coded(text: bytes) -> str:
    """As etcd's JSON has bytes."""
    return base64.b64encode(text).decode()


async def until(condition: Callable[[], bool], within_s: float = SEEN_WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - polled: a view has no event
            await asyncio.sleep(0.01)


class Member:
    """A seat, and all views that it saw."""

    def __init__(
        self,
        etcd: EtcdServer,
        name: str,
        address: EtcdAddress | None = None,
        access: EtcdAccess | None = None,
        **contract: str,
    ) -> None:
        self.identity = new_identity(Role.STORE, name)
        self.info = NodeInfo(identity=self.identity, address=f"tcp://{name}:1", contract=contract)
        self.status = NodeStatus()
        self.renewals: list[Identity] = []
        self.views: list[MembershipView] = []
        self.seat = EtcdMembership(
            address or etcd.address, self.identity, access=access, renewed=self.renewals.append
        )
        self.seat.subscribe(self.views.append)

    async def join(self) -> None:
        await self.seat.join(self.info, lambda: self.status)

    def names(self) -> list[str]:
        return [member.node_id for member in self.seat.view.members]

    def ever_seen(self) -> list[list[str]]:
        return [[m.node_id for m in view.members] for view in self.views]


@asynccontextmanager
async def members(etcd: EtcdServer, *names: str) -> AsyncIterator[list[Member]]:
    """Members that have joined and see each other; they leave at the end."""
    seats = [Member(etcd, name) for name in names]
    try:
        for seat in seats:
            await seat.join()
        await until(lambda: all(seat.names() == sorted(names) for seat in seats))
        yield seats
    finally:
        await asyncio.gather(*(seat.seat.leave() for seat in seats))


@asynccontextmanager
async def joined(etcd: EtcdServer, name: str) -> AsyncIterator[Member]:
    member = Member(etcd, name)
    await member.join()
    try:
        yield member
    finally:
        await member.seat.leave()


async def nothing_changes(seats: list[Member], during_s: float) -> None:
    """Wait, and see that no member notices anything."""
    seen = [len(seat.views) for seat in seats]
    await asyncio.sleep(during_s)
    assert [len(seat.views) for seat in seats] == seen, [seat.ever_seen() for seat in seats]


class Detour:
    """A way to etcd that can be cut, while others reach it."""

    def __init__(self, etcd: EtcdServer) -> None:
        self._etcd = etcd
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.cut = False

    async def open(self) -> EtcdAddress:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return parse_address(f"etcd://127.0.0.1:{port}/{self._etcd.address.name}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.cut:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._etcd.port)
        self._writers.append(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(1 << 16):
                sink.write(piece)
        except OSError:
            pass  # it was cut
        sink.close()

    def drop_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_all()
        await asyncio.gather(*self._tasks)
