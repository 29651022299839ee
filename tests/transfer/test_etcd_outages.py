"""Seats in a real etcd that is away, full, compacted, locked, or holds what strangers wrote.

``KVFERRY_TEST_OUTAGE_S`` is how long etcd stands still (60: the minute that users are promised).
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.transfer.etcd_seats import Detour, Member, coded, joined, members, nothing_changes, until
from tests.transfer.etcd_server import EtcdServer, needs_etcd
from transfer.errors import PeerClosed, PeerUnreachable, Unauthorized
from transfer.etcd import EtcdAccess, EtcdMembership, parse_address, wire
from transfer.etcd.client import EtcdClient
from transfer.etcd.lease import STANDSTILL_S
from transfer.etcd.records import Keys
from transfer.etcd.seat import LEASE_TTL_S
from transfer.identity import Identity, NodeId, Role, new_identity
from transfer.membership import NodeStatus

pytestmark = [pytest.mark.net, needs_etcd]

OUTAGE_S = float(os.environ.get("KVFERRY_TEST_OUTAGE_S", LEASE_TTL_S + 2.0))
GRACE_S = 5.0  # in these tests: half of what it is
NOWHERE = parse_address("etcd://127.0.0.1:9/test")
ROOT_USER = EtcdAccess("root", "sesame")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.etcd.table.GRACE_S", GRACE_S)


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


# ---- it is away


@pytest.mark.timeout(OUTAGE_S + 90)
async def test_an_etcd_that_stands_still_beyond_all_leases_stops_nothing(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(etcd, "a", "b", "c") as seats:
        etcd.stand_still()
        await nothing_changes(seats, OUTAGE_S)
        assert not any(seat.seat.connected for seat in seats)
        assert all(seat.names() == ["a", "b", "c"] for seat in seats)
        etcd.go_on()
        await until(lambda: all(seat.seat.connected for seat in seats))
        await nothing_changes(seats, GRACE_S + 1)
        assert all(seat.names() == ["a", "b", "c"] and not seat.renewals for seat in seats)
    assert said(caplog, "etcd is away") == 3, "each says it once"


async def test_an_etcd_that_is_restarted_with_its_data_changes_nothing(
    own_etcd: EtcdServer,
) -> None:
    async with members(own_etcd, "a", "b") as seats:
        own_etcd.kill()
        await until(lambda: not any(seat.seat.connected for seat in seats))
        await asyncio.to_thread(own_etcd.start)
        await until(lambda: all(seat.seat.connected for seat in seats))
        await nothing_changes(seats, 1.0)
        assert all(seat.names() == ["a", "b"] and not seat.renewals for seat in seats)


async def test_an_etcd_that_lost_everything_finds_all_but_the_dead_again(
    own_etcd: EtcdServer,
) -> None:
    async with members(own_etcd, "a", "b", "dead") as (a, b, dead):
        seen = len(a.views), len(b.views)
        own_etcd.lose_everything()
        await until(lambda: not any(m.seat.connected for m in (a, b, dead)))
        dead.seat.abort()
        await asyncio.to_thread(own_etcd.start)
        await until(lambda: a.seat.connected and b.seat.connected)
        assert a.names() == b.names() == ["a", "b", "dead"], "held for the grace"
        await until(lambda: a.names() == b.names() == ["a", "b"])
        assert (len(a.views), len(b.views)) == (seen[0] + 1, seen[1] + 1), "no view before"
        assert not a.renewals + b.renewals
        async with joined(own_etcd, "d") as newcomer:
            assert newcomer.names() == ["a", "b", "d"]


async def test_an_outage_that_begins_while_a_process_stands_still_is_an_outage(
    own_etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failure after a pause may be the pause's own doing; those after it are etcd's."""
    async with members(own_etcd, "a", "dead") as (a, dead):
        assert a.seat._seat is not None
        now_s = asyncio.get_running_loop().time()
        a.seat._seat.history.timer_fired(now_s + 3600.0, STANDSTILL_S)  # and no answer since
        own_etcd.lose_everything()
        await until(lambda: said(caplog, "a: etcd is away") == 1)
        dead.seat.abort()
        await asyncio.to_thread(own_etcd.start)
        await until(lambda: a.seat.connected)
        assert a.names() == ["a", "dead"], "nobody is gone because etcd has forgotten"


async def test_nobody_answers_and_it_says_how_to_start_etcd(
    own_etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_etcd.kill()
    watcher = EtcdMembership(own_etcd.address, new_identity(Role.OBSERVER))
    with pytest.raises(PeerUnreachable, match="etcd --listen-client-urls http://127"):
        await watcher.watch_only(deadline_s=asyncio.get_running_loop().time() + 0.5)
    early = Member(own_etcd, "early")
    joining = asyncio.create_task(early.join())
    await until(lambda: "early waits for etcd at" in caplog.text)
    await asyncio.to_thread(own_etcd.start)
    await joining
    assert early.names() == ["early"]
    await early.seat.leave()


async def test_a_membership_that_is_left_while_it_waits_says_so() -> None:
    early = EtcdMembership(NOWHERE, new_identity(Role.OBSERVER))
    waiting = asyncio.create_task(early.watch_only())
    await asyncio.sleep(0)
    early.abort()
    with pytest.raises(PeerClosed):
        await waiting


# ---- several servers


async def test_another_server_of_the_same_etcd_is_asked_when_one_is_dead(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goodbye too goes to the one that answers: no lease has to run out."""
    monkeypatch.setattr("transfer.etcd.seat.LEASE_TTL_S", 600)
    two = parse_address(f"etcd://127.0.0.1:9,127.0.0.1:{etcd.port}/{etcd.address.name}")
    leaver = Member(etcd, "leaver", two)
    async with members(etcd, "a") as (a,):
        await leaver.join()
        await until(lambda: a.names() == ["a", "leaver"])
        await leaver.seat.leave()
        await until(lambda: a.names() == ["a"])


# ---- it is there, but


async def test_an_etcd_that_takes_no_writes_costs_nobody_the_seat_or_the_view(
    own_etcd: EtcdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.etcd.table.GRACE_S", 0.5)  # no lease ends here
    detour = Detour(own_etcd)
    a = Member(own_etcd, "a", await detour.open())
    async with members(own_etcd, "b", "c") as (b, c):
        await a.join()
        await until(lambda: b.names() == ["a", "b", "c"])
        header = own_etcd.call("kv/range", key="Lw==")["header"]
        assert isinstance(header, dict)
        alarm = {"memberID": header["member_id"], "alarm": "NOSPACE"}
        own_etcd.call("maintenance/alarm", action="ACTIVATE", **alarm)
        a.status = NodeStatus(gauges={"num_pages": 1.0})
        await until(lambda: said(caplog, "a: etcd does not take the status") == 1)
        detour.drop_all()
        await until(lambda: not a.seat.connected)
        await until(lambda: a.seat.connected)
        await c.seat.leave()
        await until(lambda: b.names() == ["a", "b"])
        await until(lambda: a.names() == ["a", "b"])
        assert said(caplog, "a: etcd does not take the status") == 1, "it says so once"
        own_etcd.call("maintenance/alarm", action="DEACTIVATE", **alarm)
        await until(lambda: b.seat.view.members[0].status == a.status)
        await a.seat.leave()
    await detour.close()


async def test_a_watcher_whose_history_was_compacted_lists_anew_and_it_is_no_outage(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing happened in its cluster for long, and much in others'."""
    monkeypatch.setattr("transfer.etcd.client.WATCH_SILENCE_S", 0.2)
    watcher = EtcdMembership(etcd.address, new_identity(Role.OBSERVER))
    await watcher.watch_only()
    listings = []
    real = EtcdMembership._take_view

    async def take_view(self: EtcdMembership, client: EtcdClient) -> int:
        listings.append(self)
        return await real(self, client)

    monkeypatch.setattr(EtcdMembership, "_take_view", take_view)
    for _ in range(3):
        header = etcd.call("kv/put", key=coded(b"/others/x"), value="")["header"]
    assert isinstance(header, dict)
    etcd.call("kv/compaction", revision=header["revision"], physical=True)
    await until(lambda: bool(listings))
    assert watcher.connected
    async with joined(etcd, "a"):
        await until(lambda: [m.node_id for m in watcher.view.members] == ["a"])
    await until(lambda: not watcher.view.members, within_s=GRACE_S - 1)  # nobody is held
    assert said(caplog, "etcd is away") == 0
    await watcher.leave()


async def test_who_is_deleted_from_etcd_learns_of_it_by_the_watch_and_is_back(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEEP_EVERY_S", "REFRESH_S"):
        monkeypatch.setattr(f"transfer.etcd.membership.{name}", 3600.0)
    monkeypatch.setattr("transfer.etcd.seat.LEASE_TTL_S", 600)
    async with members(etcd, "a", "b") as (a, b):
        etcd.call("kv/deleterange", key=coded(Keys(etcd.address).member(NodeId("a"))))
        await until(lambda: bool(a.renewals))  # others can have seen it leave

        def seen_by_b() -> list[Identity]:
            return [member.info.identity for member in b.seat.view.members]

        await until(lambda: seen_by_b() == [a.seat.identity, b.identity])
        assert a.seat.identity == a.renewals[-1] != a.identity


@pytest.mark.parametrize("name", [b"z", b"\xff\xfe", b"%7A", b""])
async def test_a_stranger_s_record_is_passed_over(etcd: EtcdServer, name: bytes) -> None:
    async with members(etcd, "a") as (a,):
        key = Keys(etcd.address).members + name
        etcd.call("kv/put", key=coded(key), value=coded(b"who knows"))
        async with joined(etcd, "b") as b:
            await until(lambda: a.names() == b.names() == ["a", "b"])
        assert a.seat.alive


# ---- users


async def test_etcd_with_users_lets_in_who_has_the_password(own_etcd: EtcdServer) -> None:
    own_etcd.lock(password="sesame")
    nobody = Member(own_etcd, "nobody")
    with pytest.raises(Unauthorized, match="KVFERRY_ETCD_USER"):
        await nobody.join()
    wrong = Member(own_etcd, "wrong", access=EtcdAccess("root", "open"))
    with pytest.raises(Unauthorized, match="KVFERRY_ETCD_PASSWORD"):
        await wrong.join()
    right = Member(own_etcd, "right", access=ROOT_USER)
    await right.join()
    assert right.names() == ["right"]
    async with EtcdClient.factory(own_etcd.address, ROOT_USER)() as client:
        client._token = "a token of before, as after an etcd that was restarted"
        answer = await client.call(
            "kv/range", {"key": Keys(own_etcd.address).joins}, wire.RangeAnswer
        )
        assert len(answer.kvs) == 1, "a token that etcd takes no more is renewed by the way"
    for member in (right, wrong, nobody):
        await member.seat.leave()
