"""A shared-memory peer that says anything and hands over any descriptor, from either side."""

from __future__ import annotations

import array
import asyncio
import fcntl
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import pytest

from tests.transfer.bulk_harness import MIB, checked_engines, pattern, soon, whole
from tests.transfer.fuzzing import (
    EDGES,
    EXAMPLE_LIMIT_S,
    NESTED,
    allocates_at_most,
    descriptors_return_to,
    examples,
    mutated,
    no_alarm,
    num_descriptors,
    shuffled,
)
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, FrameInvalid, PeerLost, TransferError, Unauthorized
from transfer.interface import deadline_after
from transfer.shm_control import CONTROL_NBYTES, ControlPage
from transfer.shm_owner import listen_abstract
from transfer.shm_peer import ShmUnavailable
from transfer.shm_wire import (
    MAX_PACKET_NBYTES,
    SHM_PROTOCOL_VERSION,
    HelloPacket,
    MapPacket,
    Packet,
    PlacePacket,
    RefusalPacket,
    WelcomePacket,
    receive_packet,
)
from transfer.token import TOKEN_VERSION, Endpoint, Token, decode_token, encode_token
from transfer.transports import host_id

ENGINE_NBYTES = 8 * MIB
FILE_NBYTES = 8192
REGION_ID = 1 << 16
INCARNATION = "raw-owner"
_NAMES = itertools.count(1)

encode = msgspec.msgpack.encode


async def small_read_works(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = owner.allocate(1000), user.allocate(1000)
    region.view[:] = pattern(1000).data
    await user.read(region.export("r"), whole(1000), into=local, deadline_s=soon())
    assert local.view == region.view
    region.revoke()
    local.revoke()


class Sent(NamedTuple):
    """One packet and the descriptors that go with it."""

    data: bytes
    fds: tuple[int, ...] = ()


def send(sock: socket.socket, sent: Sent) -> None:
    ancillary = []
    if sent.fds:
        fds = array.array("i", sent.fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    with suppress(OSError):  # hung up on already
        sock.sendmsg([sent.data], ancillary)


def memory_file(nbytes: int, *seals: int) -> int:
    fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


class Fds(NamedTuple):
    """Descriptors of every kind that a peer could hand over."""

    sealed: int
    unsealed: int
    null: int
    pipe: int


@contextmanager
def some_fds() -> Iterator[Fds]:
    reading, writing = os.pipe()
    fds = Fds(
        memory_file(FILE_NBYTES, fcntl.F_SEAL_SHRINK),
        memory_file(FILE_NBYTES),
        os.open("/dev/null", os.O_RDWR),
        reading,
    )
    try:
        yield fds
    finally:
        for fd in (*fds, writing):
            os.close(fd)


# ── the owner, asked by a peer ──────────────────────────────────────────────────────────────────


async def attack(rng: random.Random, address: str, packets: list[bytes], fds: Fds) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, "\0" + address)
        for data in shuffled(rng, packets):
            count = rng.choice((0, 0, 1, 4, 40))
            send(sock, Sent(data[: MAX_PACKET_NBYTES * 2], tuple(rng.choices(fds, k=count))))
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while await asyncio.get_running_loop().sock_recv(sock, MAX_PACKET_NBYTES):
                pass
    finally:
        sock.close()


async def test_an_owner_survives_any_peer() -> None:
    async with checked_engines("shm") as engines:
        owner, user = await engines.make(), await engines.make()
        guarded = owner.allocate(4096)
        token = decode_token(guarded.export("r"))
        known = MapPacket(1, token.region_id, token.capability)
        packets = [
            encode(HelloPacket(SHM_PROTOCOL_VERSION, "raw")),
            encode(known),
            encode(MapPacket(2, 1 << 62, b"c" * 16)),
            encode(MapPacket(-1, -1, b"")),
            encode(PlacePacket(1, 1, 1, 0, 1, "rw")),
            b"\x82\xa4type\xa5hello\xa1x" + NESTED,
            b"",
        ]
        await small_read_works(owner, user)
        before = num_descriptors()
        with some_fds() as fds, no_alarm(), allocates_at_most(ENGINE_NBYTES):
            for example in examples(80):
                with example as rng:
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        await attack(rng, token.endpoint.shm, packets, fds)
                        await small_read_works(owner, user)
        await descriptors_return_to(before)


class RawPeer:
    """A connection to an owner that has said hello."""

    def __init__(self, address: str, first: Packet) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(EXAMPLE_LIMIT_S)
        self.sock.connect("\0" + address)
        self.ask(first)

    def ask(self, packet: Packet) -> None:
        send(self.sock, Sent(encode(packet)))

    def answer(self) -> tuple[Packet | None, list[int]]:
        return receive_packet(self.sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.sock.close()


async def test_a_peer_cannot_resize_or_seal_what_it_was_handed() -> None:
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        token = decode_token(owner.allocate(4096).export("rw"))
        hello = HelloPacket(SHM_PROTOCOL_VERSION, "raw")
        with RawPeer(token.endpoint.shm, hello) as peer:
            _, (control,) = peer.answer()
            peer.ask(MapPacket(1, token.region_id, token.capability))
            _, (memory,) = peer.answer()
        for fd in (control, memory):
            for nbytes in (0, 1 << 30):
                with pytest.raises(OSError):  # by its seals, or because it is for reading only
                    os.ftruncate(fd, nbytes)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            os.close(fd)


async def test_an_owner_refuses_another_version_and_a_map_before_the_hello() -> None:
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        token = decode_token(owner.allocate(64).export("r"))
        old = HelloPacket(SHM_PROTOCOL_VERSION - 1, "raw")
        with RawPeer(token.endpoint.shm, old) as peer:
            assert peer.answer() == (None, [])
        with RawPeer(token.endpoint.shm, MapPacket(1, token.region_id, token.capability)) as peer:
            assert peer.answer() == (None, [])


# ── the peer, answered by an owner ──────────────────────────────────────────────────────────────

Answers = Callable[[MapPacket, Fds], list[Sent]]


class RawOwner:
    """Welcomes as an engine would, unless told otherwise, and answers maps with ``answers``."""

    def __init__(self, answers: Answers, welcome: Sent | None = None) -> None:
        self.name = f"kvferry-test/{os.getpid()}/{next(_NAMES)}"
        self._answers = answers
        self._welcome = welcome
        self._tasks: list[asyncio.Task[None]] = []

    def token(self, nbytes: int = FILE_NBYTES) -> bytes:
        endpoint = Endpoint(INCARNATION, "elsewhere", host_id(), shm=self.name)
        return encode_token(
            Token(TOKEN_VERSION, endpoint, REGION_ID, nbytes, "rw", b"c" * 16, True)
        )

    async def __aenter__(self) -> Self:
        self._listener = listen_abstract(self.name)
        self._control = ControlPage()
        self._control.publish(REGION_ID)
        self._fds = some_fds()
        self.fds = self._fds.__enter__()
        self._tasks.append(asyncio.create_task(self._accept()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._fds.__exit__(None, None, None)
        self._control.close()
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._tasks.append(asyncio.create_task(self._serve(sock)))

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        welcome = Sent(
            encode(WelcomePacket(SHM_PROTOCOL_VERSION, INCARNATION)), (self._control.fd,)
        )
        with sock, suppress(ConnectionError):
            await loop.sock_recv(sock, MAX_PACKET_NBYTES)
            send(sock, self._welcome or welcome)
            while data := await loop.sock_recv(sock, MAX_PACKET_NBYTES):
                for sent in self._answers(msgspec.msgpack.decode(data, type=MapPacket), self.fds):
                    send(sock, sent)


def place(packet: MapPacket, fds: tuple[int, ...], **changes: int) -> list[Sent]:
    right = PlacePacket(packet.number, 1, FILE_NBYTES, 0, FILE_NBYTES, "rw")
    return [Sent(encode(msgspec.structs.replace(right, **changes)), fds)]


BROKEN: dict[str, tuple[Answers, type[TransferError]]] = {
    "no descriptor": (lambda p, _: place(p, ()), ShmUnavailable),
    "two descriptors": (lambda p, f: place(p, (f.sealed, f.sealed)), FrameInvalid),
    "forty descriptors": (lambda p, f: place(p, (f.sealed,) * 40), FrameInvalid),
    "a pipe": (lambda p, f: place(p, (f.pipe,)), FrameInvalid),
    "a device": (lambda p, f: place(p, (f.null,)), FrameInvalid),
    "a file that can shrink": (lambda p, f: place(p, (f.unsealed,)), FrameInvalid),
    "a shorter file": (lambda p, f: place(p, (f.sealed,), file_nbytes=1 << 20), FrameInvalid),
    "a file of nothing": (lambda p, f: place(p, (f.sealed,), file_nbytes=0), FrameInvalid),
    "a negative file": (lambda p, f: place(p, (f.sealed,), file_nbytes=-1), FrameInvalid),
    "an endless file": (lambda p, f: place(p, (f.sealed,), file_nbytes=1 << 63), FrameInvalid),
    "a place beyond its file": (lambda p, f: place(p, (f.sealed,), offset=4096), FrameInvalid),
    "a place before its file": (
        lambda p, f: place(p, (f.sealed,), offset=-4096, nbytes=4096),
        FrameInvalid,
    ),
    "a negative place": (lambda p, f: place(p, (f.sealed,), nbytes=-1), FrameInvalid),
    "a smaller region": (lambda p, f: place(p, (f.sealed,), nbytes=16), FrameInvalid),
    "a refusal with success": (
        lambda p, _: [Sent(encode(RefusalPacket(p.number, 0, "")))],
        FrameInvalid,
    ),
    "a negative status": (
        lambda p, _: [Sent(encode(RefusalPacket(p.number, -100, "")))],
        FrameInvalid,
    ),
    "a refusal": (lambda p, _: [Sent(encode(RefusalPacket(p.number, 2, "no")))], Unauthorized),
    "nested arrays": (lambda _p, f: [Sent(b"\x82\xa1x" + NESTED, (f.sealed,))], PeerLost),
    "an empty packet": (lambda _p, f: [Sent(b"", (f.sealed,))], PeerLost),
    "a huge packet": (lambda _p, f: [Sent(b"\xc6" * 60_000, (f.sealed,))], PeerLost),
}


async def read(user: TransferEngine, token: bytes, deadline_s: float) -> None:
    local = user.allocate(FILE_NBYTES)
    try:
        await user.read(token, whole(FILE_NBYTES), into=local, deadline_s=deadline_s)
    finally:
        local.revoke()


@pytest.mark.parametrize("name", BROKEN)
async def test_a_peer_maps_nothing_that_it_could_not_use_safely(name: str) -> None:
    answers, expected = BROKEN[name]
    before = num_descriptors()
    async with checked_engines("shm") as engines:
        owner, user = await engines.make(), await engines.make()
        with no_alarm():
            async with RawOwner(answers) as evil:
                with pytest.raises(expected):
                    await read(user, evil.token(), soon())
                await small_read_works(owner, user)
    await descriptors_return_to(before)


@pytest.mark.parametrize(
    "welcome",
    [
        Sent(encode(WelcomePacket(SHM_PROTOCOL_VERSION, INCARNATION))),
        Sent(encode(WelcomePacket(SHM_PROTOCOL_VERSION + 1, INCARNATION)), (0,)),
        Sent(encode(HelloPacket(SHM_PROTOCOL_VERSION, INCARNATION)), (0,)),
        Sent(b"\x91" * 3000),
        Sent(b""),
    ],
    ids=["no control page", "another version", "a hello", "nested arrays", "nothing"],
)
async def test_a_welcome_that_is_none_is_refused(welcome: Sent) -> None:
    async with checked_engines("shm") as engines:
        user = await engines.make()
        async with RawOwner(lambda _p, _f: [], welcome) as evil:
            with no_alarm(), pytest.raises((ShmUnavailable, FrameInvalid)):
                await read(user, evil.token(), soon())


@pytest.mark.parametrize("seals", [(), (fcntl.F_SEAL_SHRINK,)], ids=["can shrink", "too short"])
async def test_a_control_page_that_could_vanish_is_not_mapped(seals: tuple[int, ...]) -> None:
    fd = memory_file(CONTROL_NBYTES - 8 * len(seals), *seals)
    welcome = Sent(encode(WelcomePacket(SHM_PROTOCOL_VERSION, INCARNATION)), (fd,))
    async with checked_engines("shm") as engines:
        user = await engines.make()
        async with RawOwner(lambda _p, _f: [], welcome) as evil:
            with no_alarm(), pytest.raises(ShmUnavailable, match="control page"):
                await read(user, evil.token(), soon())
    os.close(fd)


async def test_silence_of_an_owner_ends_with_the_deadline() -> None:
    async with checked_engines("shm") as engines:
        owner, user = await engines.make(), await engines.make()
        async with RawOwner(lambda _p, _f: []) as evil:
            with pytest.raises(DeadlineExceeded):
                await read(user, evil.token(), deadline_after(0.05))
            await small_read_works(owner, user)


async def test_a_peer_survives_any_owner() -> None:
    async with checked_engines("shm") as engines:
        owner, user = await engines.make(), await engines.make()
        await small_read_works(owner, user)
        before = num_descriptors()
        with no_alarm(), allocates_at_most(ENGINE_NBYTES):
            for example in examples(60):
                with example as rng:
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        async with RawOwner(lambda p, f: any_place(rng, p, f)) as evil:
                            with suppress(TransferError):
                                await read(user, evil.token(), deadline_after(0.2))
                        await small_read_works(owner, user)
        await descriptors_return_to(before)


def any_place(rng: random.Random, packet: MapPacket, fds: Fds) -> list[Sent]:
    numbers = [edge for edge in EDGES if edge < 1 << 63]
    fields = {
        name: rng.choice((-1, 1)) * rng.choice(numbers)
        for name in rng.sample(("file_nbytes", "offset", "nbytes", "number", "file_id"), 2)
    }
    chosen = tuple(rng.choices(fds, k=rng.choice((0, 1, 1, 1, 2))))
    (sent,) = place(packet, chosen, **fields)
    data = mutated(rng, sent.data) if rng.random() < 0.5 else sent.data
    return [Sent(data, chosen), *place(packet, (fds.sealed,))]
