"""Fast in-process counterparts of network, transfer and membership, with faults at will.

``World`` is what all nodes of one test share. Messages are really encoded and decoded. Delays and
failures are switched on per world; a node is killed with ``World.kill``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvstore.messages import PagesAcquired
from tests.hub import HubNetwork
from transfer.channel import Caller, Channel, Hello, Listener, Service
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    RegionRevoked,
    RemoteFailed,
    TransferError,
)
from transfer.identity import Identity, NodeId
from transfer.interface import Priority, Range, Region, Rights
from transfer.membership import Member, MembershipView, NodeInfo, NodeStatus, ViewCallback

R = TypeVar("R", bound=msgspec.Struct)


class World:
    """Everything the nodes of one test share."""

    def __init__(self) -> None:
        self.listeners: dict[str, FakeListener] = {}
        self.regions: dict[bytes, FakeRegion] = {}
        self.infos: dict[NodeId, tuple[NodeInfo, Callable[[], NodeStatus]]] = {}
        self.callbacks: list[ViewCallback] = []
        self.view = MembershipView()
        self.requests: list[msgspec.Struct] = []
        self.reply_lost: type[msgspec.Struct] | None = None  # replies of this type vanish
        self.bulk_gate: asyncio.Event | None = None  # bulk operations wait here when set
        self.bulk_error: TransferError | None = None
        self.bulk_delay_s = 0.0
        self.flip_reads = False  # every read delivers one flipped byte
        self.flip_writes = False
        self.fail_read_at: int | None = None  # the read of this number fails
        self.unreadable: int | None = None  # reads from this offset of any region fail
        self.copy_error: TransferError | None = None  # of reads with background priority
        self.stuck: Region | None = None  # reads into this region wait until their deadline
        self.granted: list[NodeId] = []  # who has granted read leases
        self.break_writes = 0  # so many more writes fail half-way
        self.reads: list[list[Range]] = []
        self.read_priorities: list[Priority] = []
        self.writes: list[list[Range]] = []
        self._next = 0

    def number(self) -> int:
        self._next += 1
        return self._next

    def publish(self) -> None:
        """Give every subscriber a new view."""
        members = [Member(info=info, status=status()) for info, status in self.infos.values()]
        members.sort(key=lambda member: member.node_id)
        self.view = MembershipView(version=self.view.version + 1, members=tuple(members))
        for callback in self.callbacks:
            callback(self.view)

    def unlist(self, node_id: NodeId) -> None:
        """Drop a node from the membership."""
        self.infos.pop(node_id, None)
        self.publish()

    def cut(self, node_id: NodeId) -> None:
        """Make a node unreachable: its listener is gone and its channels are lost."""
        for address, listener in list(self.listeners.items()):
            if listener.hello.identity.node_id == node_id:
                del self.listeners[address]
                listener.lose()


class FakeRegion:
    """Host memory; tokens are its name and the rights."""

    def __init__(self, world: World, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._world = world
        self.array = buffer
        self.revoked = False
        self._name = f"region-{world.number()}".encode()
        world.regions[self._name] = self

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    @property
    def view(self) -> memoryview:
        return self.array.data

    def export(self, rights: Rights) -> bytes:
        return self._name + b"/" + rights.encode()

    def revoke(self) -> None:
        self.revoked = True


class FakeTransfer:
    """Copies bytes between regions of one world."""

    transport = "fake"

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self) -> None: ...

    def register(self, buffer: object) -> Region:
        array = np.frombuffer(buffer, dtype=np.uint8)  # type: ignore[call-overload]
        return FakeRegion(self._world, array)

    def allocate(self, nbytes: int) -> Region:
        return FakeRegion(self._world, np.zeros(nbytes, dtype=np.uint8))

    async def _remote(self, token: bytes, right: str, deadline_s: float) -> FakeRegion:
        name, rights = token.rsplit(b"/", 1)
        assert right in rights.decode()
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.sleep(self._world.bulk_delay_s)
                if self._world.bulk_gate is not None:
                    await self._world.bulk_gate.wait()
        except TimeoutError:
            raise DeadlineExceeded("bulk operation") from None
        if self._world.bulk_error is not None:
            raise self._world.bulk_error
        region = self._world.regions[name]
        if region.revoked:
            raise RegionRevoked(name.decode())
        return region

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None:
        remote = await self._remote(token, "r", deadline_s)
        if into is self._world.stuck:
            await asyncio.sleep(deadline_s - asyncio.get_running_loop().time())
            raise DeadlineExceeded("stuck")
        if priority is Priority.BACKGROUND and self._world.copy_error is not None:
            raise self._world.copy_error
        self._world.read_priorities.append(priority)
        self._world.reads.append(list(ranges))
        if len(self._world.reads) - 1 == self._world.fail_read_at:
            raise FrameInvalid("this read fails")
        if any(r.remote_offset == self._world.unreadable for r in ranges):
            raise PeerLost("this page cannot be read")
        for r in ranges:
            data = bytearray(remote.view[r.remote_offset : r.remote_offset + r.nbytes])
            if self._world.flip_reads:
                data[0] ^= 1
            into.view[r.local_offset : r.local_offset + r.nbytes] = data

    async def write(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        source: Region,
        deadline_s: float,
        priority: Priority = Priority.BACKGROUND,
    ) -> None:
        remote = await self._remote(token, "w", deadline_s)
        self._world.writes.append(list(ranges))
        if self._world.break_writes:
            self._world.break_writes -= 1
            raise PeerLost("the connection was reset")
        for r in ranges:
            data = bytearray(source.view[r.local_offset : r.local_offset + r.nbytes])
            data[0] ^= self._world.flip_writes
            remote.view[r.remote_offset : r.remote_offset + r.nbytes] = data

    async def close(self) -> None: ...

    def abort(self) -> None: ...


class FakeListener:
    """A service at an address."""

    def __init__(self, world: World, service: Service, hello: Hello, address: str) -> None:
        self._world = world
        self.service = service
        self.hello = hello
        self.address = address
        self.channels: list[FakeChannel] = []

    def lose(self) -> None:
        for channel in self.channels:
            channel.abort()

    async def close(self) -> None:
        self._world.listeners.pop(self.address, None)
        self.lose()


class FakeChannel:
    """Calls handlers of the listener as tasks, through the codec."""

    def __init__(self, world: World, listener: FakeListener, caller: Identity) -> None:
        self._world = world
        self._listener = listener
        self._caller = caller
        self._calls: dict[asyncio.Task[msgspec.Struct], None] = {}
        self.closed = False

    @property
    def peer(self) -> Identity:
        return self._listener.hello.identity

    async def request(self, message: msgspec.Struct, reply: type[R], *, deadline_s: float) -> R:
        if self.closed:
            raise PeerLost(self.peer.node_id)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
        self._world.requests.append(sent)
        handler = self._listener.service.requests.get(type(message))
        if handler is None:
            raise RemoteFailed("unknown_request", type(message).__name__)
        task = asyncio.ensure_future(handler(sent, Caller(self._caller, deadline_s)))
        self._calls[task] = None
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await task
                if type(answer) is self._world.reply_lost:
                    await asyncio.Event().wait()
        except TimeoutError:
            raise DeadlineExceeded(type(message).__name__) from None
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise PeerLost(self.peer.node_id) from None
            raise
        finally:
            task.cancel()
            self._calls.pop(task, None)
        if isinstance(answer, PagesAcquired) and answer.pages:
            self._world.granted.append(self.peer.node_id)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=reply)

    async def stream(
        self, message: msgspec.Struct, item: Any, *, deadline_s: float
    ) -> AsyncIterator[Any]:
        if self.closed:
            raise PeerLost(self.peer.node_id)
        handler = self._listener.service.streams.get(type(message))
        if handler is None:
            raise RemoteFailed("unknown_request", type(message).__name__)
        items: asyncio.Queue[Any] = asyncio.Queue()

        async def serve() -> msgspec.Struct:
            async with aclosing(handler(message, Caller(self._caller, deadline_s))) as answers:
                async for answer in answers:
                    items.put_nowait(answer)
            return message

        task = asyncio.ensure_future(serve())
        task.add_done_callback(lambda _: items.put_nowait(None))
        self._calls[task] = None
        try:
            while (answer := await items.get()) is not None:
                yield msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=item)
            if self.closed:
                raise PeerLost(self.peer.node_id)
            task.result()
        finally:
            task.cancel()
            self._calls.pop(task, None)
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.closed = True
        for task in list(self._calls):
            task.cancel()


class FakeNetwork(HubNetwork):
    """Connects within one world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.num_connects = 0

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        address = f"fake://{self._world.number()}" if bind.endswith(":0") else bind
        if address in self._world.listeners:
            raise PeerUnreachable(f"{address} is taken")
        listener = FakeListener(self._world, service, hello, address)
        self._world.listeners[address] = listener
        return listener

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        self.num_connects += 1
        await asyncio.sleep(0)
        listener = self._world.listeners.get(address)
        if listener is None:
            raise PeerUnreachable(address)
        channel = FakeChannel(self._world, listener, hello.identity)
        listener.channels.append(channel)
        return channel

    async def close(self) -> None: ...


class FakeMembership:
    """A seat in the world's membership."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._node_id: NodeId | None = None

    @property
    def view(self) -> MembershipView:
        return self._world.view

    @property
    def connected(self) -> bool:
        return True

    @property
    def superseded(self) -> bool:
        return False

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        self._node_id = info.identity.node_id
        self._world.infos[self._node_id] = (info, status)
        self._world.publish()

    def subscribe(self, callback: ViewCallback) -> None:
        self._world.callbacks.append(callback)
        callback(self._world.view)

    async def leave(self) -> None:
        if self._node_id is not None:
            self._world.unlist(self._node_id)
            self._node_id = None
