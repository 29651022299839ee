"""Seats in a real etcd: joining, leaving, contracts, twins, pauses of a process."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.transfer.etcd_seats import SEEN_WITHIN_S, Detour, Member, coded, members, until
from tests.transfer.etcd_server import EtcdServer, needs_etcd
from transfer.channel import Hello
from transfer.errors import HelloRefused
from transfer.etcd import EtcdMembership, parse_address
from transfer.etcd.client import EtcdClient
from transfer.etcd.listing import Listing, list_keys
from transfer.etcd.records import Keys, Record, encode_record
from transfer.etcd.seat import LEASE_TTL_S
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import NodeStatus, SeatTaken, Superseded
from transfer.zmq_network import ZmqNetwork

pytestmark = [pytest.mark.net, needs_etcd]

ROOT = Path(__file__).resolve().parents[2]
SHORT_LEASE_S = 3  # where a test waits for the end of one


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.etcd.seat.LEASE_TTL_S", SHORT_LEASE_S)


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing that a test waits for is the end of one."""
    monkeypatch.setattr("transfer.etcd.seat.LEASE_TTL_S", 600)


@pytest.mark.usefixtures("long_leases")
async def test_members_see_each_other_come_and_go(etcd: EtcdServer) -> None:
    async with members(etcd, "b", "a", "c") as (b, a, c):
        assert all(m.seat.connected and m.seat.alive for m in (a, b, c))
        await a.seat.leave()
        await a.seat.leave()
        await until(lambda: b.names() == c.names() == ["b", "c"])
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


@pytest.mark.usefixtures("short_leases")
async def test_a_member_that_ended_without_a_word_is_gone_after_its_lease(etcd: EtcdServer) -> None:
    async with members(etcd, "a", "b") as (a, b):
        a.seat.abort()
        assert b.names() == ["a", "b"]
        await until(lambda: b.names() == ["b"])


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


def elsewhere(member: Member) -> Member:
    member.info = structs.replace(member.info, address="tcp://elsewhere:1")
    return member


async def test_a_process_with_the_node_id_of_one_that_lives_is_refused(etcd: EtcdServer) -> None:
    async with members(etcd, "twin", "other") as (first, other):
        stray, seen = elsewhere(Member(etcd, "twin")), len(other.views)
        with pytest.raises(SeatTaken, match="node id twin is taken") as refused:
            await stray.join()
        assert first.identity.incarnation in str(refused.value)
        assert first.info.address in str(refused.value)
        await stray.seat.leave()
        assert not first.seat.superseded
        found = [m.info.identity for m in other.seat.view.members]
        assert found == [other.identity, first.identity]
        assert all("twin" in names for names in other.ever_seen()[seen:]), "it was never empty"


@pytest.mark.usefixtures("short_leases")
async def test_a_process_killed_and_started_elsewhere_has_its_seat_when_its_lease_ends(
    etcd: EtcdServer,
) -> None:
    async with members(etcd, "twin", "other") as (first, other):
        first.seat.abort()
        again = elsewhere(Member(etcd, "twin"))
        await again.join()
        await until(
            lambda: (
                [m.info.identity for m in other.seat.view.members]
                == [other.identity, again.identity]
            )
        )
        await again.seat.leave()


@pytest.mark.usefixtures("long_leases")
async def test_a_process_started_again_at_its_address_has_its_seat_at_once(
    etcd: EtcdServer,
) -> None:
    async with members(etcd, "twin") as (first,):
        again = Member(etcd, "twin")
        assert again.info.address == first.info.address
        await again.join()
        await until(lambda: first.seat.superseded)
        assert not again.seat.superseded
        await again.seat.leave()


async def test_a_twin_that_comes_before_the_first_view_is_noticed_with_it(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No watch tells of it: what it wrote is in the list that the watch starts from."""
    first, twin = Member(etcd, "twin"), Member(etcd, "twin")
    key, record = (
        Keys(etcd.address).member(NodeId("twin")),
        Record(info=twin.info, status=NodeStatus()),
    )

    async def late_list(client: EtcdClient, keys: Keys) -> Listing:
        etcd.call("kv/put", key=coded(key), value=coded(encode_record(record)))
        return await list_keys(client, keys)

    monkeypatch.setattr("transfer.etcd.membership.list_keys", late_list)
    with pytest.raises(Superseded, match="another process has joined as twin"):
        await first.join()
    assert first.seat.superseded
    await first.seat.leave()


async def test_a_follower_of_the_view_that_fails_stops_no_timer(etcd: EtcdServer) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(now_s: float) -> list[NodeId]:
        raise RuntimeError("a bug of somebody who is called")

    async with members(etcd, "a") as (a,):
        a.seat._table.tick = fail  # type: ignore[method-assign]
        await until(lambda: len(reported) >= 2)


# ---- a process that stood still


class Child:
    """``etcd_member`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, url: str, node_id: str, lease_s: int = SHORT_LEASE_S) -> Child:
        argv = [sys.executable, "-m", "tests.transfer.etcd_member", url, node_id, str(lease_s)]
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
    child = await Child.start(etcd.url, "sleeper", lease_s=600)
    try:
        async with members(etcd, "watcher") as (watcher,):
            before = await child.says("joined")
            await until(lambda: watcher.names() == ["sleeper", "watcher"])
            seen = len(watcher.views)
            child.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.0)
            child.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert len(watcher.views) == seen
            assert watcher.seat.view.members[0].info.identity.incarnation == before
    finally:
        await child.end()


@pytest.mark.usefixtures("short_leases")
async def test_a_node_that_alone_was_cut_off_comes_back_as_another_incarnation(
    etcd: EtcdServer,
) -> None:
    detour = Detour(etcd)
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
