"""Seats in a real etcd: joining, leaving, pauses, outages, contracts.

``KVFERRY_TEST_OUTAGE_S`` is how long etcd stands still (60: the minute that users are promised).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.etcd_server import EtcdServer, needs_etcd, running_etcd
from transfer.channel import Hello
from transfer.errors import HelloRefused, PeerClosed, PeerUnreachable, Unauthorized
from transfer.etcd import EtcdAccess, EtcdAddress, EtcdMembership, parse_address
from transfer.etcd.records import Keys
from transfer.etcd.seat import LEASE_TTL_S
from transfer.etcd.table import GRACE_S
from transfer.identity import Identity, NodeId, Role, new_identity
from transfer.membership import MembershipView, NodeInfo, NodeStatus
from transfer.zmq_network import ZmqNetwork

pytestmark = [pytest.mark.net, needs_etcd]

ROOT = Path(__file__).resolve().parents[2]
OUTAGE_S = float(os.environ.get("KVFERRY_TEST_OUTAGE_S", LEASE_TTL_S + 2.0))
SEEN_WITHIN_S = 15.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path) as server:
        yield server


async def until(condition: Callable[[], bool], within_s: float = SEEN_WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - polled: a view has no event
            await asyncio.sleep(0.01)


class Member:
    """A seat, and all views that it saw."""

    def __init__(
        self, etcd: EtcdServer, name: str, address: EtcdAddress | None = None, **contract: str
    ) -> None:
        self.identity = new_identity(Role.STORE, name)
        self.info = NodeInfo(identity=self.identity, address=f"tcp://{name}:1", contract=contract)
        self.status = NodeStatus()
        self.renewals: list[Identity] = []
        self.views: list[MembershipView] = []
        self.seat = EtcdMembership(
            address or etcd.address, self.identity, renewed=self.renewals.append
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


async def test_members_see_each_other_come_and_go(etcd: EtcdServer) -> None:
    async with members(etcd, "b", "a", "c") as (b, a, c):
        assert all(m.seat.connected and m.seat.alive for m in (a, b, c))
        await a.seat.leave()
        await a.seat.leave()
        await until(lambda: b.names() == c.names() == ["b", "c"], within_s=LEASE_TTL_S - 1)
        assert not a.seat.connected
        versions = [view.version for view in b.views]
        assert versions == sorted(versions)


async def test_what_a_member_says_reaches_the_others(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b") as (a, b):
        a.status = NodeStatus(draining=True, gauges={"num_pages": 7.0}, counters={"n": 1.0})

        def heard() -> bool:
            member = b.seat.view.get(NodeId("a"))
            return member is not None and member.status == a.status

        await until(heard)
        assert b.seat.view.members[0].heartbeat_age_s < 5.0


async def test_who_only_watches_is_not_listed(etcd: EtcdServer) -> None:
    async with members(etcd, "a") as (a,):
        watcher = EtcdMembership(etcd.address, new_identity(Role.OBSERVER))
        await watcher.watch_only(deadline_s=asyncio.get_running_loop().time() + 10)
        assert [m.node_id for m in watcher.view.members] == ["a"]
        assert watcher.view.members[0].heartbeat_age_s <= LEASE_TTL_S
        await watcher.leave()
        assert a.names() == ["a"]


async def test_a_member_that_ended_without_a_word_is_gone_after_its_lease(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b") as (a, b):
        a.seat.abort()
        assert b.names() == ["a", "b"]
        await until(lambda: b.names() == ["b"], within_s=2 * LEASE_TTL_S + 2)


async def test_clusters_with_other_names_are_strangers(etcd: EtcdServer) -> None:
    async with members(etcd, "a") as (a,):
        other = EtcdMembership(parse_address(f"{etcd.url}-2"), new_identity(Role.OBSERVER))
        await other.watch_only()
        assert other.view.members == ()
        await other.leave()
        assert a.names() == ["a"]


async def test_a_node_that_differs_is_refused_with_both_sides(etcd: EtcdServer) -> None:
    first, second = Member(etcd, "a", page_size="16"), Member(etcd, "b", page_size="32")
    await first.join()
    with pytest.raises(HelloRefused, match=r"store b \(page_size=32\) against store a \(page_siz"):
        await second.join()
    assert first.names() == ["a"]
    await first.seat.leave()
    third = Member(etcd, "c", page_size="32")
    await third.join()
    assert third.names() == ["c"], "the fact left with the last member that stated it"
    await third.seat.leave()
    await second.seat.leave()


async def test_of_nodes_that_differ_and_join_at_once_only_one_kind_gets_in(
    etcd: EtcdServer,
) -> None:
    for round_ in range(3):
        seats = [Member(etcd, f"{n}-{round_}", page_size=str(16 << n % 2)) for n in range(8)]
        random.Random(round_).shuffle(seats)
        ends = await asyncio.gather(*(seat.join() for seat in seats), return_exceptions=True)
        joined = [seat for seat, end in zip(seats, ends, strict=True) if end is None]
        assert len(joined) == 4
        assert len({seat.info.contract["page_size"] for seat in joined}) == 1
        assert sum(isinstance(end, HelloRefused) for end in ends) == 4
        await asyncio.gather(*(seat.seat.leave() for seat in seats))


async def test_the_last_process_with_a_node_id_has_the_seat(etcd: EtcdServer) -> None:
    async with members(etcd, "twin", "other") as (first, other):
        second, seen = Member(etcd, "twin"), len(other.views)
        await second.join()
        await until(lambda: first.seat.superseded)
        assert not second.seat.superseded
        await until(lambda: not first.seat.alive)
        await first.seat.leave()
        await until(
            lambda: (
                [m.info.identity for m in other.seat.view.members]
                == [other.identity, second.identity]
            )
        )
        assert all("twin" in names for names in other.ever_seen()[seen:]), "it was never empty"
        await second.seat.leave()


# ---- a process that stood still


class Child:
    """``etcd_member`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, url: str, node_id: str) -> Child:
        argv = [sys.executable, "-m", "tests.transfer.etcd_member", url, node_id]
        return cls(
            await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        )

    async def says(self, event: str) -> str:
        """The incarnation of the next line, which is of this event."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SEEN_WITHIN_S):
            line: dict[str, Any] = json.loads(await self.process.stdout.readline())
        assert line["event"] == event
        return str(line["incarnation"])

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def test_a_process_that_stood_still_beyond_its_lease_comes_back_as_another_incarnation(
    etcd: EtcdServer,
) -> None:
    child = await Child.start(etcd.url, "sleeper")
    network = ZmqNetwork()
    try:
        async with members(etcd, "watcher") as (watcher,):
            before = await child.says("joined")
            await until(lambda: watcher.names() == ["sleeper", "watcher"])
            child.process.send_signal(signal.SIGSTOP)
            await until(lambda: watcher.names() == ["watcher"])
            child.process.send_signal(signal.SIGCONT)
            after = await child.says("renewed")
            assert after != before
            await until(lambda: watcher.names() == ["sleeper", "watcher"])
            found = watcher.seat.view.members[0].info
            assert found.identity.incarnation == after
            deadline_s = asyncio.get_running_loop().time() + 5
            hello = Hello(identity=watcher.identity)
            channel = await network.connect(found.address, hello, deadline_s=deadline_s)
            assert channel.peer == found.identity, "it answers to what it is listed as"
            await channel.close()
    finally:
        await network.close()
        await child.end()


async def test_a_process_whose_seat_was_taken_while_it_stood_still_does_not_take_it_back(
    etcd: EtcdServer,
) -> None:
    child = await Child.start(etcd.url, "twin")
    try:
        before = await child.says("joined")
        child.process.send_signal(signal.SIGSTOP)
        async with members(etcd, "twin") as (second,):
            child.process.send_signal(signal.SIGCONT)
            assert await child.says("superseded") == before
            assert second.seat.view.members[0].info.identity == second.identity
    finally:
        await child.end()


async def test_a_pause_shorter_than_the_lease_changes_nothing(etcd: EtcdServer) -> None:
    child = await Child.start(etcd.url, "sleeper")
    try:
        async with members(etcd, "watcher") as (watcher,):
            before = await child.says("joined")
            await until(lambda: watcher.names() == ["sleeper", "watcher"])
            seen = len(watcher.views)
            child.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)
            child.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert len(watcher.views) == seen
            assert watcher.seat.view.members[0].info.identity.incarnation == before
    finally:
        await child.end()


class Detour:
    """A way to etcd that can be cut, while others reach it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.cut = False

    async def open(self) -> EtcdAddress:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return parse_address(f"etcd://127.0.0.1:{port}/test")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.cut:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
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


async def test_a_node_that_alone_was_cut_off_comes_back_as_another_incarnation(
    etcd: EtcdServer,
) -> None:
    detour = Detour(etcd.port)
    lone = Member(etcd, "lone", address=await detour.open())
    async with members(etcd, "a", "b") as (a, b):
        await lone.join()
        await until(lambda: a.names() == ["a", "b", "lone"])
        detour.cut = True
        detour.drop_all()
        await until(lambda: a.names() == b.names() == ["a", "b"])
        assert lone.names() == ["a", "b", "lone"], "its own view stays"
        detour.cut = False
        await until(lambda: a.names() == b.names() == ["a", "b", "lone"])
        (renewed,) = lone.renewals
        assert a.seat.view.members[2].info.identity == renewed != lone.identity
        await lone.seat.leave()
    await detour.close()


# ---- etcd that is away


async def nothing_changes(seats: list[Member], during_s: float) -> None:
    """Wait, and see that no member notices anything."""
    seen = [len(seat.views) for seat in seats]
    await asyncio.sleep(during_s)
    assert [len(seat.views) for seat in seats] == seen, [seat.ever_seen() for seat in seats]


@pytest.mark.timeout(OUTAGE_S + 90)
async def test_an_etcd_that_stands_still_beyond_all_leases_stops_nothing(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "transfer.etcd")
    async with members(etcd, "a", "b", "c") as seats:
        etcd.stand_still()
        await nothing_changes(seats, OUTAGE_S)
        assert not any(seat.seat.connected for seat in seats)
        assert all(seat.names() == ["a", "b", "c"] for seat in seats)
        etcd.go_on()
        await until(lambda: all(seat.seat.connected for seat in seats))
        await nothing_changes(seats, GRACE_S + 1)
        assert all(seat.names() == ["a", "b", "c"] and not seat.renewals for seat in seats)
    away = [r for r in caplog.records if "etcd is away" in r.getMessage()]
    assert len(away) == 3, "each says it once"


async def test_an_etcd_that_is_restarted_with_its_data_changes_nothing(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b") as seats:
        etcd.kill()
        await until(lambda: not any(seat.seat.connected for seat in seats))
        await asyncio.to_thread(etcd.start)
        await until(lambda: all(seat.seat.connected for seat in seats))
        await nothing_changes(seats, 2.0)
        assert all(seat.names() == ["a", "b"] and not seat.renewals for seat in seats)


async def test_an_etcd_that_lost_everything_finds_its_members_again(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b", "c") as seats:
        etcd.lose_everything()
        await until(lambda: not any(seat.seat.connected for seat in seats))
        await asyncio.to_thread(etcd.start)
        await until(lambda: all(seat.seat.connected for seat in seats))
        await nothing_changes(seats, GRACE_S + 1)
        assert all(seat.names() == ["a", "b", "c"] and not seat.renewals for seat in seats)
        newcomer = Member(etcd, "d")
        await newcomer.join()
        assert newcomer.names() == ["a", "b", "c", "d"]
        await newcomer.seat.leave()


async def test_who_died_while_etcd_was_away_is_gone_after_the_grace(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b") as (a, b):
        etcd.lose_everything()
        await until(lambda: not a.seat.connected and not b.seat.connected)
        a.seat.abort()
        await asyncio.to_thread(etcd.start)
        await until(lambda: b.seat.connected)
        assert b.names() == ["a", "b"]
        await until(lambda: b.names() == ["b"], within_s=GRACE_S + 5)


async def test_a_compacted_history_is_listed_anew(etcd: EtcdServer) -> None:
    """A watcher that was cut off comes back to a revision that is no more."""
    async with members(etcd, "a") as (a,):
        etcd.stand_still()
        await until(lambda: not a.seat.connected)
        etcd.go_on()
        await until(lambda: a.seat.connected)
        async with _joined(etcd, "b") as b:
            await until(lambda: a.names() == b.names() == ["a", "b"])
            answer = etcd.call("kv/range", key="Lw==")
            header: Any = answer["header"]
            etcd.call("kv/compaction", revision=header["revision"], physical=True)
            async with _joined(etcd, "c"):
                await until(lambda: a.names() == ["a", "b", "c"])


@asynccontextmanager
async def _joined(etcd: EtcdServer, name: str) -> AsyncIterator[Member]:
    member = Member(etcd, name)
    await member.join()
    try:
        yield member
    finally:
        await member.seat.leave()


async def test_nobody_answers_and_it_says_how_to_start_etcd(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.kill()
    watcher = EtcdMembership(etcd.address, new_identity(Role.OBSERVER))
    with pytest.raises(PeerUnreachable, match="etcd --listen-client-urls http://127"):
        await watcher.watch_only(deadline_s=asyncio.get_running_loop().time() + 1.0)
    early = Member(etcd, "early")
    joining = asyncio.create_task(early.join())
    await until(lambda: "early waits for etcd at" in caplog.text)
    await asyncio.to_thread(etcd.start)
    await joining
    assert early.names() == ["early"]
    await early.seat.leave()


async def test_a_membership_that_is_left_while_it_waits_says_so(etcd: EtcdServer) -> None:
    etcd.kill()
    early = Member(etcd, "early")
    joining = asyncio.create_task(early.join())
    await asyncio.sleep(0)
    early.seat.abort()
    with pytest.raises(PeerClosed):
        await joining


async def test_another_server_of_the_same_etcd_is_asked_when_one_is_dead(etcd: EtcdServer) -> None:
    two = parse_address(f"etcd://127.0.0.1:9,127.0.0.1:{etcd.port}/test")
    watcher = EtcdMembership(two, new_identity(Role.OBSERVER))
    await watcher.watch_only(deadline_s=asyncio.get_running_loop().time() + 10)
    assert watcher.connected
    await watcher.leave()


async def test_a_stranger_s_record_is_passed_over(etcd: EtcdServer) -> None:
    async with members(etcd, "a") as (a,):
        key = Keys(etcd.address).member(NodeId("z"))
        encoded = base64.b64encode(key).decode()
        etcd.call("kv/put", key=encoded, value=base64.b64encode(b"who knows").decode())
        async with _joined(etcd, "b") as b:
            await until(lambda: a.names() == b.names() == ["a", "b"])


async def test_etcd_with_users_lets_in_who_has_the_password(etcd: EtcdServer) -> None:
    etcd.call("auth/user/add", name="root", password="sesame")
    etcd.call("auth/user/grant", user="root", role="root")
    etcd.call("auth/enable")
    nobody = Member(etcd, "nobody")
    with pytest.raises(Unauthorized, match="KVFERRY_ETCD_USER"):
        await nobody.join()
    wrong = EtcdMembership(
        etcd.address, new_identity(Role.OBSERVER), access=EtcdAccess("root", "open")
    )
    with pytest.raises(Unauthorized, match="KVFERRY_ETCD_PASSWORD"):
        await wrong.watch_only()
    identity = new_identity(Role.STORE, "ali")
    ali = EtcdMembership(etcd.address, identity, access=EtcdAccess("root", "sesame"))
    await ali.join(NodeInfo(identity=identity, address="tcp://ali:1"), NodeStatus)
    assert [m.node_id for m in ali.view.members] == ["ali"]
    for left in (ali, wrong, nobody.seat):
        await left.leave()
