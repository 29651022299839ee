"""What decides in the membership on etcd: addresses, records, the table, why a lease was lost."""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from transfer.errors import (
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    RemoteFailed,
    TransferError,
    Unauthorized,
)
from transfer.etcd import client, wire
from transfer.etcd.address import EtcdAccess, EtcdAddress, is_etcd, parse_address
from transfer.etcd.lease import STANDSTILL_S, LeaseHistory
from transfer.etcd.records import FORMAT, Keys, Record, encode_record
from transfer.etcd.seat import LeaseLost, Seat
from transfer.etcd.table import GAUGE_INTERVAL_S, GRACE_S, MemberTable
from transfer.etcd.wire import Event, KeyValue, decode, prefix_end
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import NodeInfo, NodeStatus

ROOT = Path(__file__).resolve().parents[2]
Answer = TypeVar("Answer")
KEYS = Keys(parse_address("etcd://127.0.0.1/test"))
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


# ---- addresses


def test_an_address_names_hosts_and_cluster() -> None:
    address = parse_address("etcd://one:1234,two,[::1]:3/prod.eu-1")
    assert address == EtcdAddress(
        ("http://one:1234", "http://two:2379", "http://[::1]:3"), "prod.eu-1"
    )
    assert address.prefix == b"/kvferry/prod.eu-1/"
    assert parse_address(str(address)) == address
    assert not address.secure
    assert parse_address("etcds://one/x").endpoints == ("https://one:2379",)
    assert str(parse_address("etcds://one/x")) == "etcds://one:2379/x"


@pytest.mark.parametrize(
    "url",
    [
        "etcd://",
        "etcd://host",
        "etcd://host:2379",
        "etcd://host:2379/",
        "etcd://host:2379/a/b",
        "etcd://host:2379/a b",
        "etcd://host:2379/../b",
        "etcd://user:secret@host:2379/name",
        "etcd://host:0/name",
        "etcd://host:70000/name",
        "etcd://host:port/name",
        "etcd:///name",
        "etcd://host?x/name",
        "etcd://host#x/name",
        "etcd://a,,b/name",
        "http://host:2379/name",
        "etcd://" + ",".join(["h"] * 17) + "/name",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"write etcd://HOST:2379/NAME|name 16 at most"):
        parse_address(url)


def test_only_etcd_is_etcd() -> None:
    assert [is_etcd(u) for u in ("etcd://h/n", "etcds://h/n", "tcp://h:1", "etcd")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_password_is_never_printed() -> None:
    assert "sesame" not in repr(EtcdAccess(user="ali", password="sesame", key="k"))


# ---- wire


def test_answers_of_etcd_are_decoded_as_it_writes_them() -> None:
    text = json.dumps(
        {
            "header": {"cluster_id": "10144879847569953045", "revision": "3", "raft_term": "2"},
            "kvs": [
                {
                    "key": base64.b64encode(b"/k").decode(),
                    "create_revision": "2",
                    "mod_revision": "3",
                    "value": base64.b64encode(b"\x00v").decode(),
                    "lease": "777",
                }
            ],
            "count": "1",
        }
    )
    answer = decode(text, wire.RangeAnswer)
    assert answer.header.revision == 3
    assert answer.kvs == (KeyValue(b"/k", b"\x00v", 2, 3, 777),)
    kept = decode(b'{"result":{"header":{},"ID":"778"}}', wire.LeaseKept).result
    assert kept is not None
    assert kept.TTL == 0
    line = decode(b'{"result":{"canceled":true,"compact_revision":"3"}}', wire.WatchLine)
    assert line.result is not None
    assert (line.result.canceled, line.result.compact_revision) == (True, 3)


def test_a_prefix_ends_before_what_does_not_start_with_it() -> None:
    assert prefix_end(b"/kvferry/x/") == b"/kvferry/x0"
    assert b"/kvferry/x/\xff" < prefix_end(b"/kvferry/x/") <= b"/kvferry/x0"


# ---- records


def record(node_id: str, incarnation: str = "", **gauges: float) -> Record:
    identity = new_identity(Role.STORE, node_id)
    if incarnation:
        identity = type(identity)(
            node_id=identity.node_id, role=identity.role, incarnation=incarnation
        )  # type: ignore[arg-type]
    return Record(
        info=NodeInfo(identity=identity, address=f"tcp://{node_id}:1"),
        status=NodeStatus(gauges=gauges),
    )


def test_a_record_is_read_as_it_was_written() -> None:
    for name in ("a", "Store_1.rack-2", ".."):
        written = record(name, num_pages=3.0)
        key = KEYS.member(NodeId(name))
        assert key.startswith(KEYS.members)
        assert b"/" not in key[len(KEYS.members) :]
        assert KEYS.node_of(key) == name
        assert KEYS.record(key, encode_record(written)) == written


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"[1]",
        encode_record(record("somebody-else")),
        encode_record(record("a")).replace(b'"format":1', b'"format":2'),
        encode_record(record("a")).replace(b'"store"', b'"kettle"'),
    ],
)
def test_what_is_no_record_is_no_member_and_is_said_once(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    keys = Keys(parse_address("etcd://h/n"))
    for _ in range(3):
        assert keys.record(keys.member(A), value) is None
    assert len(caplog.records) == 1
    assert "is no member" in caplog.text
    assert FORMAT == 1


# ---- the table


def kv(record: Record, *, lease: int = 1, created: int = 1) -> KeyValue:
    key = KEYS.member(record.info.identity.node_id)
    return KeyValue(key, encode_record(record), created, created, lease)


def gone(node_id: str) -> Event:
    return Event(KeyValue(KEYS.member(NodeId(node_id))), "DELETE")


def names(table: MemberTable, now_s: float = 0.0) -> list[str]:
    return [member.node_id for member in table.view(now_s).members]


def test_members_are_sorted_and_versions_rise() -> None:
    table = MemberTable(KEYS)
    table.reset(0.0, [kv(record("b")), KeyValue(KEYS.joins, b"b")], after_outage=False)
    first = table.version
    table.apply(0.0, [Event(kv(record("c"))), Event(kv(record("a")))])
    assert names(table) == ["a", "b", "c"]
    second = table.version
    table.apply(0.0, [gone("b"), gone("never there")])
    assert names(table) == ["a", "c"]
    assert 0 < first < second < table.version


def test_a_list_without_news_is_no_new_version() -> None:
    table, listed = MemberTable(KEYS), [kv(record("a")), kv(record("b"))]
    table.reset(0.0, listed, after_outage=False)
    version = table.version
    table.reset(5.0, listed, after_outage=True)
    table.apply(5.0, [Event(listed[0])])
    table.tick(100.0)
    assert table.version == version


def test_a_list_that_lacks_a_member_removes_it() -> None:
    """After a compaction, say: etcd was there all the time."""
    table = MemberTable(KEYS)
    table.reset(0.0, [kv(record("a")), kv(record("b"))], after_outage=False)
    table.reset(1.0, [kv(record("b"))], after_outage=False)
    assert names(table) == ["b"]


def test_whom_etcd_lost_in_an_outage_is_held_until_the_grace_is_over() -> None:
    table = MemberTable(KEYS)
    stays = [kv(record("a", "1")), kv(record("b", "1")), kv(record("c", "1"))]
    table.reset(0.0, stays, after_outage=False)
    version = table.version
    table.reset(60.0, [], after_outage=True)
    assert (names(table), table.stays(), table.version) == (["a", "b", "c"], {}, version)
    table.apply(61.0, [Event(kv(record("a", "1"), lease=2, created=7))])
    assert table.version == version, "the same incarnation came back: nothing has happened"
    assert table.stays() == {A: (2, 7)}
    assert table.tick(60.0 + GRACE_S - 0.1) == []
    assert table.tick(60.0 + GRACE_S) == [B, C]
    assert names(table) == ["a"]
    assert table.version == version + 1


def test_what_etcd_deletes_just_after_an_outage_is_held_too() -> None:
    """It may wake with all leases run out, and say so only after the first list."""
    table = MemberTable(KEYS)
    stays = [kv(record("a", "1")), kv(record("b", "1"))]
    table.reset(0.0, stays, after_outage=False)
    table.reset(60.0, stays, after_outage=True)
    table.apply(60.2, [gone("a"), gone("b")])
    assert names(table) == ["a", "b"]
    table.apply(60.4, [Event(kv(record("b", "1"), lease=5))])
    assert table.tick(60.0 + GRACE_S) == [A]
    table.apply(60.1 + GRACE_S, [gone("b")])
    assert names(table) == [], "after the grace a member is gone when etcd says so"


def test_another_incarnation_is_seen_at_once() -> None:
    table = MemberTable(KEYS)
    table.reset(0.0, [kv(record("a", "1"))], after_outage=False)
    version = table.version
    table.apply(0.0, [Event(kv(record("a", "2"), lease=2))])
    assert table.version == version + 1
    assert [m.info.identity.incarnation for m in table.view(0.0).members] == ["2"]


def test_gauges_alone_are_published_with_measure_and_draining_at_once() -> None:
    table, start = MemberTable(KEYS), record("a", "1")
    table.reset(10.0, [kv(start)], after_outage=False)
    version = table.version
    for n in range(5):
        table.apply(10.0, [Event(kv(record("a", "1", n=float(n + 1))))])
    assert table.version == version
    table.tick(10.0 + GAUGE_INTERVAL_S - 0.1)
    assert table.version == version
    table.tick(10.0 + GAUGE_INTERVAL_S)
    assert table.version == version + 1
    assert table.view(11.0).members[0].status.gauges == {"n": 5.0}
    drained = Record(info=start.info, status=NodeStatus(draining=True))
    table.apply(10.6, [Event(kv(drained))])
    assert table.version == version + 2


def test_a_member_whose_record_is_not_understood_any_more_is_gone() -> None:
    """A later version under the same node id: another life, of which nothing is known here."""
    table, live = MemberTable(KEYS), kv(record("a", "1"))
    table.reset(0.0, [live, kv(record("b", "1"))], after_outage=False)
    later = msgspec.structs.replace(live, value=live.value.replace(b'"format":1', b'"format":2'))
    table.apply(1.0, [Event(later)])
    assert names(table) == ["b"]


def test_who_did_not_come_back_is_named_though_gauges_are_published_first() -> None:
    table, stays = MemberTable(KEYS), [kv(record("a", "1")), kv(record("b", "1"))]
    table.reset(0.0, stays, after_outage=False)
    table.reset(60.0, stays[:1], after_outage=True)
    end_s = 60.0 + GRACE_S
    table.apply(end_s + 0.1, [Event(kv(record("a", "1", n=1.0)))])
    assert table.tick(end_s + 0.2) == [B]


def test_ages_count_from_what_was_heard_last() -> None:
    table = MemberTable(KEYS)
    table.reset(10.0, [kv(record("a", "1"))], after_outage=False)
    table.heard_before(10.0, {A: 3.0, B: 1.0})
    assert table.view(11.0).members[0].heartbeat_age_s == 4.0
    table.apply(12.0, [Event(kv(record("a", "1")))])
    assert table.view(12.5).members[0].heartbeat_age_s == 0.5


@pytest.mark.parametrize("seed", range(40))
def test_the_table_agrees_with_a_naive_model(seed: int) -> None:
    """After a quiet grace the view is what etcd holds, and nobody is lost before."""
    rng, table, now_s = random.Random(seed), MemberTable(KEYS), 0.0
    etcd: dict[str, Record] = {}
    version = 0
    for step in range(200):
        now_s += rng.uniform(0.0, 3.0)
        name = rng.choice("abcdef")
        match rng.randrange(4):
            case 0 | 1:
                etcd[name] = record(name, str(rng.randrange(3)), n=float(step))
                table.apply(now_s, [Event(kv(etcd[name]))])
            case 2:
                etcd.pop(name, None)
                table.apply(now_s, [gone(name)])
            case 3:
                for lost in rng.sample(sorted(etcd), rng.randrange(len(etcd) + 1)):
                    del etcd[lost]
                after_outage = rng.random() < 0.7
                table.reset(now_s, [kv(r) for r in etcd.values()], after_outage=after_outage)
        table.tick(now_s)
        assert table.version >= version
        version = table.version
        assert set(etcd) <= set(names(table)), "who is in etcd is in the view"
        assert sorted(table.stays()) == sorted(etcd), "and whoever else is, is held"
        assert names(table) == sorted(names(table))
    table.tick(now_s + GRACE_S)
    assert names(table) == sorted(etcd)
    found = {m.node_id: m.info for m in table.view(now_s).members}
    assert found == {name: r.info for name, r in etcd.items()}


# ---- why a lease was lost


STAYS = {A: (1, 1), B: (2, 2), C: (3, 3)}


def test_who_stood_still_was_away() -> None:
    history = LeaseHistory()
    history.confirmed(10.0)
    history.timer_fired(10.5, STANDSTILL_S / 2)
    assert not history.stood_still
    history.timer_fired(30.0, 19.0)
    assert history.stood_still
    assert history.was_away(A, {}, {})


def test_an_answer_to_a_question_of_before_the_pause_proves_nothing() -> None:
    history = LeaseHistory()
    history.timer_fired(30.0, 19.0)
    history.confirmed(10.9)
    assert history.stood_still
    history.confirmed(31.0)
    assert not history.stood_still


LISTED: list[tuple[str, dict[NodeId, tuple[int, int]], bool]] = [
    ("etcd kept the others", {B: (2, 2), C: (3, 3)}, True),
    ("etcd kept one other", {C: (3, 3)}, True),
    ("etcd kept nobody", {}, False),
    ("the others came back under new leases", {B: (7, 9), C: (8, 10)}, False),
    ("etcd came back without its data, revisions start anew", {B: (99, 2)}, False),
    ("only its own key is there", {A: (1, 1)}, False),
    ("a stranger is there", {NodeId("d"): (2, 2)}, False),
]


@pytest.mark.parametrize(("listed", "away"), [x[1:] for x in LISTED], ids=[x[0] for x in LISTED])
def test_who_was_dropped_alone_was_away(listed: dict[NodeId, tuple[int, int]], away: bool) -> None:
    history = LeaseHistory()
    history.confirmed(10.0)
    assert history.was_away(A, STAYS, listed) is away


# ---- the client


class _Pieces:
    """A response that arrives in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def lines_of(pieces: list[bytes]) -> list[bytes]:
    response: Any = _Pieces(pieces)
    return [line async for line in client._lines(response)]


async def test_lines_are_found_wherever_the_stream_is_cut() -> None:
    rng, lines = random.Random(1), [b"", b"a", b"bb" * 40, b"", b"c"]
    text = b"\n".join(lines) + b"\nan end that is none"
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(9)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert await lines_of(pieces) == [line for line in lines if line]


async def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_WATCH_LINE_NBYTES", 100)
    assert await lines_of([b"x" * 60, b"y" * 40 + b"\n"]) == [b"x" * 60 + b"y" * 40]
    with pytest.raises(FrameInvalid, match="exceeds 100 bytes"):
        await lines_of([b"x" * 60, b"y" * 41])


REFUSALS = [
    (b'{"error":"x","message":"etcdserver: permission denied","code":7}', 403, Unauthorized),
    (b'{"error":"etcdserver: user name is empty","code":3}', 400, Unauthorized),
    (b'{"error":"etcdserver: invalid auth token","code":16}', 401, client.TokenEnded),
    (b'{"error":"etcdserver: revision of auth store is old","code":3}', 400, client.TokenEnded),
    (b'{"error":"etcdserver: no leader","code":14}', 503, PeerUnreachable),
    (b'{"error":{"grpc_code":14,"message":"etcdserver: no leader"}}', 200, PeerUnreachable),
    (b'{"error":"etcdserver: mvcc: database space exceeded","code":8}', 429, RemoteFailed),
    (b"<html>", 502, FrameInvalid),
]


@pytest.mark.parametrize(("text", "status", "kind"), REFUSALS)
def test_every_refusal_of_etcd_is_an_error_of_our_tree(
    text: bytes, status: int, kind: type[TransferError]
) -> None:
    error = client._refusal(text, status, "http://h:1")
    assert type(error) is kind
    assert "http://h:1" in str(error) or kind is RemoteFailed


class _Answers:
    """A client that gives one answer."""

    endpoint = "http://h:1"

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def call(self, path: str, body: object, kind: type[Answer]) -> Answer:
        return decode(self._answer, kind)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(b'{"result":{"ID":"7"}}', LeaseLost), (b'{"error":{"grpc_code":14}}', PeerLost)],
)
async def test_a_lease_is_lost_when_etcd_says_so_and_not_when_it_says_nothing(
    answer: bytes, error: type[TransferError]
) -> None:
    info = record("a").info
    seat = Seat(KEYS, info, NodeStatus, renewed=lambda _: None, rng=random.Random(1))
    answers: Any = _Answers(answer)
    with pytest.raises(error) as caught:
        await seat.keep(answers)
    assert type(caught.value) is error


# ---- the page, and who may know of etcd


PAGE = (ROOT / "docs" / "membership.md").read_text(encoding="utf-8")
UNITS = {"s": 1, "MiB": 1 << 20, "": 1}
LIMITS = re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+) ?(s|MiB)? \| `(\w+)` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "value", "unit", "module"), LIMITS, ids=lambda text: str(text))
def test_every_limit_on_the_page_is_that_of_the_code(
    name: str, value: str, unit: str, module: str
) -> None:
    coded = getattr(importlib.import_module(f"transfer.etcd.{module}"), name)
    assert coded == float(value) * UNITS[unit]


def test_every_maximum_of_the_code_is_on_the_page() -> None:
    stated = {(module, name) for name, _, _, module in LIMITS}
    for path in sorted((ROOT / "transfer" / "etcd").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"^(MAX_[A-Z_]+) =", text, re.MULTILINE)
        assert {(path.stem, name) for name in named} <= stated


def test_nothing_that_the_simulator_runs_knows_of_etcd() -> None:
    """And the command line does not load an HTTP client to parse an address."""
    folders = ("kvstore", "prefill_node", "decode_node", "gateway", "engine", "tests/sim")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    assert [p for p in paths if "transfer.etcd" in p.read_text(encoding="utf-8")] == []
    program = "import sys, launch.config, tests.sim.harness; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
