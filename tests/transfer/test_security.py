"""Who is let in, what they may do, and what a stranger learns: the security claims of transfer.

Frames at random are in ``test_fuzz_*.py``, what a peer may cost in ``test_security_bounds.py``.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from pydantic import SecretStr

from launch.cluster import plan
from launch.config import GatewayOptions, NodeOptions, Options, StoreOptions, UpOptions
from launch.errors import ConfigError
from launch.parts import MIN_SECRET_NCHARS, SECRET_VARIABLE, make_network, read_secret
from tests.transfer.bulk_harness import ROOT, checked_engines, pattern, soon, whole
from tests.transfer.channel_contract import ANY, Ask, TestService, Told, hello
from tests.transfer.fuzzing import EXAMPLE_LIMIT_S
from tests.transfer.raw_tcp import INCARNATION, RawClient, RawServer, lend, request_frame
from transfer import zmq_network
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import (
    FrameInvalid,
    HelloRefused,
    PeerUnreachable,
    RegionRevoked,
    TransferError,
    Unauthorized,
)
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after
from transfer.membership import NodeInfo, NodeStatus
from transfer.region import RegionTable
from transfer.registry import Registry, RegistryService
from transfer.registry_client import RegistryMembership
from transfer.tcp_codec import (
    HEADER_NBYTES,
    TCP_PROTOCOL_VERSION,
    Header,
    HelloBody,
    Op,
    ProofBody,
    control_frame,
    decode_body,
    decode_header,
)
from transfer.tcp_handshake import ClientHandshake, ServerHandshake
from transfer.token import CAPABILITY_NBYTES, decode_token
from transfer.zmq_network import ZmqNetwork

SECRET = "a cluster secret of some length"
OTHER = "a cluster secret of other length"
BEYOND = [
    "0.0.0.0",
    "::",
    "10.0.0.1",
    "192.0.2.7",
    "fd00::1",
    "::ffff:127.0.0.1",  # local, but not worth a second parser
    "example.org",
    "localhost.example.org",
    "0",
    "127.1",
]


# ── nothing but loopback addresses without a secret ─────────────────────────────────────────────


@pytest.mark.parametrize("host", BEYOND)
def test_bulk_transport_beyond_this_machine_needs_a_secret(host: str) -> None:
    for secret in (None, SecretStr("")):
        with pytest.raises(ValueError, match="cluster secret"):
            TransferConfig(host=host, advertise_host="10.0.0.1", cluster_secret=secret)


@pytest.mark.parametrize("host", BEYOND)
async def test_channels_and_the_registry_beyond_this_machine_need_a_secret(host: str) -> None:
    network = make_network(None)
    where = f"[{host}]" if ":" in host else host
    with pytest.raises(PeerUnreachable, match=r"other machines|cannot listen"):
        await network.listen(TestService(), hello(Role.GATEWAY), f"tcp://{where}:0")
    await network.close()


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://127.0.0.1@0.0.0.0:0",
        "tcp://0.0.0.0#@127.0.0.1:0",
        "tcp://0.0.0.0/@127.0.0.1:0",
        "tcp://127.0.0.1#.0.0.0.0:0",
        "tcp://*;127.0.0.1:0",
        "tcp://eth0:0",
        "TCP://0.0.0.0:0",
    ],
)
async def test_no_spelling_of_an_address_gets_around_the_check(bind: str) -> None:
    network = make_network(None)
    with pytest.raises(PeerUnreachable):
        await network.listen(TestService(), hello(Role.GATEWAY), bind)
    await network.close()


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.usefixtures("no_secret")
@pytest.mark.parametrize("kind", [GatewayOptions, StoreOptions, NodeOptions, UpOptions])
@pytest.mark.parametrize("host", BEYOND)
def test_every_role_beyond_this_machine_needs_a_secret(kind: type[Options], host: str) -> None:
    with pytest.raises(ConfigError, match="cluster secret"):
        read_secret(kind.of(host=host))


@pytest.mark.parametrize("length", [1, MIN_SECRET_NCHARS - 1, MIN_SECRET_NCHARS])
def test_a_secret_that_protects_an_address_is_not_short(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "x" * length)
    assert read_secret(StoreOptions.of()) == "x" * length
    options = StoreOptions.of(host="10.0.0.1")
    if length >= MIN_SECRET_NCHARS:
        assert read_secret(options) == "x" * length
    else:
        with pytest.raises(ConfigError, match="openssl rand"):
            read_secret(options)


# ── with a secret: nobody without it, on any wire ───────────────────────────────────────────────


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
async def test_bulk_connections_refuse_another_secret_and_none(
    ours: str | None, theirs: str | None
) -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=ours)
        user = await engines.make(cluster_secret=theirs)
        region, local = lend(owner, 64, 7), lend(user, 64, 1)
        with pytest.raises(Unauthorized):
            await user.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        with pytest.raises(Unauthorized):
            await user.write(region.export("rw"), whole(64), source=local, deadline_s=soon())
        assert region.view == b"\x07" * 64
        assert local.view == b"\x01" * 64


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
async def test_channels_and_registry_refuse_another_secret_and_none(
    ours: str | None, theirs: str | None
) -> None:
    server, client = ZmqNetwork(secret=ours), ZmqNetwork(secret=theirs)
    service, registry = TestService(), Registry()
    hosted = RegistryService(registry, service)
    listener = await server.listen(service, hello(Role.GATEWAY), ANY)
    with pytest.raises(PeerUnreachable):
        await client.connect(listener.address, hello(Role.STORE), deadline_s=deadline_after(0.3))
    identity = new_identity(Role.STORE)
    membership = RegistryMembership(client, listener.address, identity)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await membership.join(NodeInfo(identity=identity, address="x"), NodeStatus)
    assert registry.view(0.0).members == ()
    assert not listener.server._connections, "a frame of a stranger arrived"
    hosted.close()
    for network in (client, server):
        await network.close()


async def test_a_stranger_hears_no_byte_of_application_data_from_a_channel() -> None:
    """Connected and silent, then speaking ZeroMQ without a secret, while others are served."""
    network = ZmqNetwork(secret=SECRET)
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    loop = asyncio.get_running_loop()
    with socket.socket() as raw, zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", urlsplit(listener.address).port))
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(listener.address)
        await loop.sock_sendall(raw, b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
        told = await channel.request(Ask("for friends only"), Told, deadline_s=soon())
        assert told.text == "for friends only"
        heard = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(EXAMPLE_LIMIT_S):
                while part := await loop.sock_recv(raw, 4096):
                    heard += part
        assert len(heard) <= 64, "more than a ZeroMQ greeting"
        assert not plain.poll(0)
    await network.close()


def greeting(secret: bytes, nonce: bytes = b"s" * 16) -> tuple[ClientHandshake, ServerHandshake]:
    return (
        ClientHandshake(secret, "cli", "srv", b"c" * 16),
        ServerHandshake(secret, "srv", nonce),
    )


def split(frame: bytes) -> tuple[Header, bytes]:
    return decode_header(frame[:HEADER_NBYTES]), frame[HEADER_NBYTES:]


async def refused(raw: RawClient) -> bytes:
    """Return why the engine refused; it must not have let anybody in."""
    header, body = await raw.frame()
    assert header.op is Op.DONE, header
    raw.end_sending()
    assert await raw.until_cut_off() == b"", "let in after all"
    return body


async def test_a_recorded_proof_opens_no_second_connection() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=SECRET)
        handshake = ClientHandshake(SECRET.encode(), "raw", owner.incarnation, b"n" * 16)
        async with RawClient(owner) as first:
            await first.send(handshake.first())
            proof = handshake.receive(*await first.frame())
            await first.send(proof)
            assert (await first.frame())[0].op is Op.READY
        async with RawClient(owner) as second:
            await second.send(handshake.first())
            assert (await second.frame())[0].op is Op.HELLO
            await second.send(proof)
            assert b"secret" in await refused(second)


async def test_a_server_cannot_be_made_to_answer_its_own_challenge() -> None:
    """What the server proves, sent back to it; also with its own nonce as the client's."""
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=SECRET)
        async with RawClient(owner) as raw:
            await raw.send(ClientHandshake(b"", "raw", owner.incarnation, b"n" * 16).first())
            theirs = decode_body((await raw.frame())[1], HelloBody)
            await raw.send(control_frame(Op.PROOF, body=ProofBody(theirs.proof)))
            assert b"secret" in await refused(raw)
        async with RawClient(owner) as one, RawClient(owner) as two:
            await one.send(ClientHandshake(b"", "raw", owner.incarnation, b"n" * 16).first())
            nonce = decode_body((await one.frame())[1], HelloBody).nonce
            await two.send(ClientHandshake(b"", "raw", owner.incarnation, nonce).first())
            theirs = decode_body((await two.frame())[1], HelloBody)
            await one.send(control_frame(Op.PROOF, body=ProofBody(theirs.proof)))
            assert b"secret" in await refused(one)


async def test_a_mirror_is_no_server() -> None:
    """Whoever answers a hello with that very hello has proven nothing."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                said = decode_body(data[HEADER_NBYTES:], HelloBody)
                mirrored = HelloBody(said.protocol, said.expected, said.nonce, "", said.proof)
                writer.write(control_frame(Op.HELLO, body=mirrored))
        writer.close()

    async with checked_engines("tcp") as engines:
        user = await engines.make(cluster_secret=SECRET)
        mirror = await asyncio.start_server(echo, "127.0.0.1", 0)
        evil = RawServer(never)
        evil.port = mirror.sockets[0].getsockname()[1]
        with pytest.raises(Unauthorized):
            await user.read(evil.token(64), whole(64), into=lend(user, 64, 0), deadline_s=soon())
        mirror.close()
        await mirror.wait_closed()


async def never(_: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes) -> None:
    raise AssertionError(f"{header.op.name} was sent to somebody without the secret")


@pytest.mark.parametrize("version", [0, TCP_PROTOCOL_VERSION - 1, TCP_PROTOCOL_VERSION + 1, -1])
def test_no_other_protocol_version_is_spoken_to_please_a_peer(version: int) -> None:
    client, server = greeting(SECRET.encode())
    old = HelloBody(version, "old", b"o" * 16)
    with pytest.raises(HelloRefused):
        server.receive(*split(control_frame(Op.HELLO, body=old)))
    with pytest.raises(HelloRefused):
        client.receive(*split(control_frame(Op.HELLO, body=old)))
    assert {client.ready, server.ready} == {False}


@pytest.mark.parametrize(
    "frame",
    [
        control_frame(Op.READY),
        control_frame(Op.PROOF, body=ProofBody(b"")),
        control_frame(Op.PROOF, body=ProofBody(bytes(32))),
        control_frame(Op.PROOF, body=b"\x80"),
        control_frame(Op.PROOF),
        control_frame(Op.READ),
        control_frame(Op.DONE),
    ],
)
def test_nothing_but_the_proof_ends_the_hello_and_there_is_one_try(frame: bytes) -> None:
    client, server = greeting(SECRET.encode())
    proof = client.receive(*split(server.receive(*split(client.first()))))
    with pytest.raises((Unauthorized, FrameInvalid)):
        server.receive(*split(frame))
    assert server.refused
    with pytest.raises(AssertionError):
        server.receive(*split(proof))
    assert not server.ready


async def test_a_refused_peer_has_no_second_try_on_its_connection() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=SECRET)
        handshake = ClientHandshake(SECRET.encode(), "raw", owner.incarnation, b"n" * 16)
        async with RawClient(owner) as raw:
            await raw.send(handshake.first())
            proof = handshake.receive(*await raw.frame())
            await raw.send(control_frame(Op.PROOF, body=ProofBody(bytes(32))))
            await raw.send(proof)
            await refused(raw)


async def test_a_client_without_a_proof_is_not_spoken_to_by_one_that_has_a_secret() -> None:
    """A server without the secret gets the client's hello and not one byte of a request."""
    async with checked_engines("tcp") as engines:
        user = await engines.make(cluster_secret=SECRET)
        for secret in (b"", OTHER.encode()):
            async with RawServer(never, secret=secret) as evil:
                local = lend(user, 64, 5)
                with pytest.raises(Unauthorized):
                    await user.read(evil.token(64), whole(64), into=local, deadline_s=soon())
                with pytest.raises(Unauthorized):
                    await user.write(evil.token(64), whole(64), source=local, deadline_s=soon())
                assert local.view == b"\x05" * 64


def test_curve_keys_come_from_the_secret_and_from_nothing_else() -> None:
    keys = [zmq_network._curve_keys(secret) for secret in (SECRET, SECRET, OTHER)]
    assert keys[0] == keys[1] != keys[2]
    public, private = keys[0]
    assert public == zmq.curve_public(private)
    assert SECRET.encode() not in public + private


# ── the secret is never shown ───────────────────────────────────────────────────────────────────


def shown(thing: Any) -> Iterator[str]:
    yield from (repr(thing), str(thing), f"{thing!r:s}")
    if hasattr(thing, "model_dump"):
        yield from (str(thing.model_dump()), thing.model_dump_json())


async def test_no_representation_no_log_and_no_error_shows_the_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    config = TransferConfig(transport="tcp", cluster_secret=SecretStr(SECRET))
    errors: list[str] = []
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(cluster_secret=SECRET), await engines.make()
        local = lend(user, 64, 0)
        token = lend(owner, 64, 0).export("r")
        with pytest.raises(TransferError) as caught:
            await user.read(token, whole(64), into=local, deadline_s=soon())
        errors += [str(caught.value), repr(owner), repr(owner.config), token.hex()]
        network = ZmqNetwork(secret=SECRET)
        errors += [repr(network)]
        await network.close()
    with pytest.raises(ValueError, match="wildcard") as refused_:
        TransferConfig(host="0.0.0.0", cluster_secret=SecretStr(SECRET))
    texts = [*shown(config), *errors, str(refused_.value), caplog.text]
    assert not [text for text in texts if SECRET in text or SECRET.encode().hex() in text]


def test_children_get_the_secret_by_file_or_environment_and_never_by_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    monkeypatch.setenv(SECRET_VARIABLE, OTHER)
    options = UpOptions.of(secret_file=str(file), model="fake", port=1, join_port=2)
    for child in plan(options):
        words = " ".join(child.argv)
        assert f"--secret-file {file}" in words
        assert SECRET not in words
        assert OTHER not in words
        assert SECRET not in repr(child)


def test_secrets_proofs_and_capabilities_are_compared_in_constant_time() -> None:
    """Nowhere in transfer is one of them compared by an operator."""
    guarded = {"proof", "capability", "secret", "known", "wanted"}
    found = []
    for path in sorted((ROOT / "transfer").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            operands = [node.left, *node.comparators]
            names = {getattr(each, "attr", getattr(each, "id", "")) for each in operands}
            equality = any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
            constant = any(isinstance(each, ast.Constant) for each in operands)
            if equality and names & guarded and not constant:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found
    source = (ROOT / "transfer" / "tcp_handshake.py").read_text()
    assert source.count("compare_digest") >= 2, "the proofs of both sides"


# ── capabilities ────────────────────────────────────────────────────────────────────────────────


def test_capabilities_are_16_random_bytes_one_for_each_region_and_rights() -> None:
    table = RegionTable(lambda region, rights, capability: capability)
    regions = [table.register(bytearray(8)) for _ in range(100)]
    made = [region.export(rights) for region in regions for rights in ("r", "w", "rw")]
    assert {len(capability) for capability in made} == {CAPABILITY_NBYTES} == {16}
    assert len(set(made)) == 300
    bits = [sum(byte >> bit & 1 for capability in made for byte in capability) for bit in range(8)]
    assert all(2100 < count < 2700 for count in bits), "4800 coins, 2400 expected: 8 sigma"
    assert regions[0].export("r") == made[0], "equal rights give equal tokens"


def test_a_guess_does_not_learn_which_regions_exist() -> None:
    table = RegionTable(lambda region, rights, capability: capability)
    region = table.register(bytearray(8))
    region.export("rw")
    told = set()
    for region_id in (region.region_id, region.region_id + (1 << 16), region.region_id + 1, 0):
        with pytest.raises((Unauthorized, RegionRevoked)) as caught:
            table.authorize(region_id, b"g" * 16, "r")
        if caught.type is Unauthorized:
            told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
async def test_the_owner_checks_rights_and_bounds_whatever_the_client_believes(op: Op) -> None:
    """By hand: no client-side check is in the way."""
    async with checked_engines("tcp") as engines:
        owner = await engines.make()
        region = owner.allocate(64)
        region.view[:] = pattern(64).data
        wrong = region.export("w" if op is Op.READ else "r")
        right = region.export("rw")
        beyond = [[(0, 65)], [(64, 1)], [(1 << 63, 1 << 63)], [(0, 0)], [(0, 8), (60, 5)]]
        asked = [(wrong, [(0, 8)]), *((right, spans) for spans in beyond)]
        for token, spans in asked:
            async with RawClient(owner) as raw:
                await raw.hello()
                await raw.send(request_frame(op, token, spans))
                header, _ = await raw.frame()
                assert (header.op, header.status != 0) == (Op.DONE, True)
        assert region.view == pattern(64).data


async def test_tokens_of_an_earlier_life_open_nothing() -> None:
    async with checked_engines("tcp") as engines:
        first = await engines.make()
        port = int(first.address.rpartition(":")[2])
        old = lend(first, 64, 1).export("rw")
        await first.close()
        second = await engines.make(port=port)
        assert isinstance(second, TransferEngine)
        new = lend(second, 64, 2)
        assert decode_token(new.export("rw")).capability != decode_token(old).capability
        async with RawClient(second) as raw:  # the incarnation is not asked for: the capability is
            await raw.hello()
            await raw.send(request_frame(Op.READ, old, [(0, 64)]))
            header, _ = await raw.frame()
            assert (header.op, header.status != 0) == (Op.DONE, True)
        assert second.incarnation != INCARNATION
