"""The far side of ``kvferry doctor``: owns memory, fills and checks it when asked.

In a process of its own (``kvferry doctor --serve``, also what the doctor starts on one machine), or
in the doctor's process for loopback. Takes no part in the transfers themselves: those are
one-sided. Serves one doctor at a time; its memory lives exactly as long as the doctor's stream, so
a doctor that dies leaves nothing behind here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launch.doctor.grid import BATCH_MAX, CASE_NBYTES_MAX, WORD_NBYTES, Case
from launch.doctor.memory import Memory, TransportUnavailable
from launch.doctor.messages import (
    CONTRACT,
    AreYouThere,
    CheckMemory,
    Done,
    FillMemory,
    MemoryChecked,
    MemoryOpened,
    OpenMemory,
    OpenSocket,
    SocketOpened,
)
from launch.doctor.options import DoctorOptions
from launch.doctor.pattern import SEED_MAX, arrived_there, fill, untouched, wrong_byte
from launch.doctor.plain_socket import PlainSocketServer
from launch.errors import LaunchError, StartError
from launch.output import show_result
from launch.parts import make_network
from launch.ports import url_host
from transfer.channel import Caller, Hello, Listener, Network, Service
from transfer.errors import PeerUnreachable, RemoteFailed
from transfer.identity import Role, new_identity


def hello() -> Hello:
    return Hello(identity=new_identity(Role.OBSERVER), contract=CONTRACT)


class _Session:
    """What one doctor holds here."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.sockets: list[PlainSocketServer] = []

    async def close(self) -> None:
        for server in self.sockets:
            await asyncio.to_thread(server.close)
        await self.memory.close()


class DoctorService:
    """Answers one doctor. ``listen`` starts it; closing the listener ends every session."""

    def __init__(self, options: DoctorOptions, secret: str | None) -> None:
        self._options = options
        self._secret = secret
        self._doctor: str | None = None  # incarnation of the one that is served
        self._one_at_a_time = asyncio.Lock()
        self._session: _Session | None = None

    async def listen(self, network: Network, port: int) -> Listener:
        """Serve at the options' host.

        Raises:
            PeerUnreachable: the address cannot be bound.
        """
        service = Service()
        service.on_stream(OpenMemory, self._open)
        service.on(FillMemory, self._fill)
        service.on(CheckMemory, self._check)
        service.on(OpenSocket, self._open_socket)
        service.on(AreYouThere, self._here)
        return await network.listen(
            service, hello(), f"tcp://{url_host(self._options.host)}:{port}"
        )

    async def _open(self, message: OpenMemory, caller: Caller) -> AsyncIterator[MemoryOpened]:
        doctor = caller.peer.incarnation
        if self._doctor not in (None, doctor):
            raise RemoteFailed("busy", "another doctor is measuring here: try again when it ended")
        if not 0 < message.nbytes <= CASE_NBYTES_MAX:
            raise RemoteFailed("too_large", f"{message.nbytes}: at most {CASE_NBYTES_MAX} bytes")
        async with self._one_at_a_time:  # the same doctor's last transport may still be closing
            self._doctor = doctor
            try:
                async with self._opened(message) as session:
                    yield MemoryOpened(session.memory.region.export("rw"))
                    await asyncio.Event().wait()  # cancelled when the doctor leaves, however
            finally:
                self._doctor = None

    @asynccontextmanager
    async def _opened(self, message: OpenMemory) -> AsyncIterator[_Session]:
        try:
            memory = await Memory.open(
                message.transport, message.nbytes, self._options, self._secret
            )
        except TransportUnavailable as error:
            raise RemoteFailed("unavailable", str(error)) from error
        session = self._session = _Session(memory)
        try:
            yield session
        finally:
            self._session = None
            await session.close()

    def _session_of(self, caller: Caller) -> _Session:
        if self._session is None or self._doctor != caller.peer.incarnation:
            raise RemoteFailed("no_memory", "open memory first")
        return self._session

    async def _fill(self, message: FillMemory, caller: Caller) -> Done:
        view = self._session_of(caller).memory.view
        inside = 0 < message.nbytes <= len(view) and message.nbytes % WORD_NBYTES == 0
        if not inside or not 0 <= message.seed <= SEED_MAX:
            raise RemoteFailed("out_of_bounds", f"cannot fill {message.nbytes} bytes")
        await asyncio.to_thread(fill, view[: message.nbytes], message.seed)
        return Done()

    async def _check(self, message: CheckMemory, caller: Caller) -> MemoryChecked:
        view = self._session_of(caller).memory.view
        case = Case(message.page_nbytes, message.batch)
        inside = min(case) >= 1 and case.nbytes <= len(view) and case.page_nbytes % WORD_NBYTES == 0
        if not inside or case.batch > BATCH_MAX or not 0 <= message.seed <= SEED_MAX:
            raise RemoteFailed("out_of_bounds", f"cannot check {case}")
        places = arrived_there(case) if message.written else untouched(case)
        return MemoryChecked(await asyncio.to_thread(wrong_byte, view, message.seed, places))

    async def _open_socket(self, message: OpenSocket, caller: Caller) -> SocketOpened:
        session = self._session_of(caller)
        if session.sockets:
            raise RemoteFailed("one_socket", "this doctor has its plain socket already")
        memory = memoryview(bytearray(len(session.memory.view)))
        try:
            server = PlainSocketServer(self._options.host, memory)
        except OSError as error:
            raise RemoteFailed("unavailable", f"cannot listen: {error.strerror}") from error
        session.sockets.append(server)
        host = self._options.advertise_host or self._options.host
        return SocketOpened(host, server.port, server.key)

    async def _here(self, message: AreYouThere, caller: Caller) -> Done:
        return Done()


class DoctorRole:
    """``kvferry doctor --serve`` as a process."""

    def __init__(self, options: DoctorOptions, secret: str | None) -> None:
        self._options = options
        self._service = DoctorService(options, secret)
        self._network = make_network(secret)

    async def start(self) -> None:
        try:
            listener = await self._service.listen(self._network, self._options.port)
        except PeerUnreachable as error:
            raise StartError(str(error)) from error
        port = listener.address.rpartition(":")[2]
        host = url_host(self._options.advertise_host or self._options.host)
        show_result(f"serving kvferry doctor: run `kvferry doctor --peer {host}:{port}`")

    async def failed(self) -> LaunchError:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def drain(self, timeout_s: float) -> None:
        """Nothing is owed to anybody."""

    async def close(self) -> None:
        await self._network.close()

    def abort(self) -> None:
        """Nothing: the process exits next, and leaves nothing that outlives it."""
