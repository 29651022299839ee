"""Page geometries: a node knows those of its pages; one that is refused leaves nothing behind."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.messages import PagesReserved, ReadStats, ReservePages, ReserveStatus, StoreStats
from kvstore.page import PageSpec
from kvstore.server import page_table
from kvstore.server.directory import Directory
from kvstore.server.page_table import SPECS_MAX, PageTable
from kvstore.server.segment import Segment
from kvstore.server.tier import TierPage
from kvstore.store import DEFAULT_POLICY, PageIdentity, PageRecord, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.directories import CHECKSUM, directory, match, single, store
from tests.kvstore.faulty import open_client, raw_channel
from tests.kvstore.pages import SPEC
from transfer.interface import deadline_after

HUGE = PageSpec(num_layers=2**40, num_kv_heads=2**20, head_dim=64, page_size=4)


def of_model(number: int) -> PageSpec:
    """Geometries of as many bytes as ``SPEC`` has at the most."""
    return PageSpec(num_layers=1, num_kv_heads=1, head_dim=number, page_size=4, dtype="uint8")


def kept(page: PageIdentity, spec: PageSpec, nbytes: int | None = None) -> TierPage:
    """A page as a life before has stored it."""
    record = PageRecord(
        key=page.key,
        parent=page.parent,
        depth=page.depth,
        tokens=page.tokens,
        checksum=CHECKSUM,
        page_nbytes=spec.page_nbytes if nbytes is None else nbytes,
    )
    return TierPage(record, spec, b"", 35, 1.0)


def put(d: Directory, page: PageIdentity, spec: PageSpec) -> ReserveStatus:
    reserved = d.reserve([page], spec, 0.0, DEFAULT_POLICY)[0]
    if reserved.slot is not None:
        assert d.commit(page.key, reserved.slot.generation, CHECKSUM)
    d.check()
    return reserved.status


def test_a_refused_reservation_leaves_no_geometry_behind() -> None:
    d = directory(4)
    store(d, [single(0)])
    for number in range(SPECS_MAX + 10):
        spec = PageSpec(num_layers=10**6, num_kv_heads=1, head_dim=number + 1, page_size=4)
        assert put(d, single(1), spec) is ReserveStatus.REFUSED
    assert put(d, single(1), HUGE) is ReserveStatus.REFUSED
    assert d.last_page_nbytes == SPEC.page_nbytes
    usage = d.usage()
    for _ in usage.steps():
        pass
    assert [one.memory_nbytes for one in usage.largest(10)] == [SPEC.page_nbytes]
    assert put(d, single(1), of_model(1)) is ReserveStatus.GRANTED


def test_a_geometry_whose_pages_have_gone_makes_way_for_another() -> None:
    d = directory(4)
    for number in range(SPECS_MAX + 10):
        assert put(d, single(1), of_model(number % 32 + 1)) is ReserveStatus.GRANTED
        assert d.page_nbytes(single(1).key) == of_model(number % 32 + 1).page_nbytes
        assert sum(d.clearing(None)) == 1
    d.check()


def test_more_geometries_than_there_are_numbers_are_refused_until_one_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_table, "SPECS_MAX", 3)
    d = Directory(Segment(1 << 20), lease_s=5.0, high=1 << 20, low=1 << 20)
    pages = [single(number) for number in range(6)]
    for number in range(3):
        assert put(d, pages[number], of_model(number + 1)) is ReserveStatus.GRANTED
    assert put(d, pages[3], of_model(4)) is ReserveStatus.REFUSED
    assert put(d, pages[4], of_model(2)) is ReserveStatus.GRANTED
    grant = d.find(pages[0].key, 1)
    assert grant is not None
    assert d.drop(pages[0].key, 1)
    assert put(d, pages[3], of_model(4)) is ReserveStatus.GRANTED
    assert match(d, pages) == [PageState.ABSENT, *[PageState.READY] * 4, PageState.ABSENT]
    sizes = [d.page_nbytes(page.key) for page in pages[1:5]]
    assert sizes == [of_model(number).page_nbytes for number in (2, 3, 4, 2)]


def test_a_geometry_keeps_its_number_when_its_last_page_goes_for_the_next() -> None:
    d = directory(1)
    for number in range(3):
        assert put(d, single(number), SPEC) is ReserveStatus.GRANTED
    assert d.counters["evicted"] == 2


def test_a_number_belongs_to_one_geometry_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "SPECS_MAX", 2)
    table = PageTable()
    assert table.known_spec(of_model(1)) is None
    assert [table.spec_id(of_model(n)) for n in (1, 2)] == [0, 1]
    row = table.add(single(0), 0, b"")
    assert table.spec_id(of_model(3)) == 1, "no page had it"
    assert table.known_spec(of_model(2)) is None
    table.add(single(1), 1, b"")
    assert table.spec_id(of_model(4)) is None
    assert not table.takes_spec(of_model(4))
    table.unlink(row)
    table.free(row)
    assert table.spec_id(of_model(4)) == 0
    assert table.specs == [of_model(4), of_model(3)]


def test_a_page_that_the_ssd_kept_and_cannot_be_here_leaves_no_geometry_behind() -> None:
    d = directory(4)
    strange = [
        kept(single(0), PageSpec(num_layers=10**6, num_kv_heads=1, head_dim=1, page_size=4)),
        kept(single(1), HUGE),
        kept(msgspec.structs.replace(single(2), parent=single(2).key), of_model(1)),
        kept(single(3), of_model(1), nbytes=1),
    ]
    adopted = d.spilling.adopt_many([*strange, kept(single(4), of_model(2))])
    assert adopted == (1, [page.record.key for page in strange])
    d.check()
    usage = d.usage()
    for _ in usage.steps():
        pass
    assert [one.ssd_nbytes for one in usage.largest(10)] == [of_model(2).page_nbytes]


@pytest.mark.parametrize("spec", [HUGE, of_model(10**6)])
async def test_a_page_larger_than_the_node_is_refused_and_the_numbers_go_on(
    cluster: StoreCluster, spec: PageSpec
) -> None:
    """Refused, not an error: whoever owes a copy to a smaller node does not offer it for ever."""
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, range(4)) == [PutOutcome.STORED]
    channel = await raw_channel(cluster, node.address)
    reserved = await channel.request(
        ReservePages(spec=spec, pages=(single(9),)), PagesReserved, deadline_s=deadline_after(1)
    )
    assert [grant.status for grant in reserved.grants] == [ReserveStatus.REFUSED]
    stats = await channel.request(ReadStats(5), StoreStats, deadline_s=deadline_after(1))
    assert [one.memory_nbytes for one in stats.namespaces] == [SPEC.page_nbytes]
