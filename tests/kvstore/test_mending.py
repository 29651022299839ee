"""A page that is read gets the copies back that other nodes have evicted; others do not."""

from __future__ import annotations

from kvstore.config import StoreConfig
from kvstore.messages import ClearStore, StoreDone
from kvstore.placement import Placement
from kvstore.replication.duties import Duties, Nodes
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.faulty import get_all, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from transfer.identity import NodeId
from transfer.interface import deadline_after

TOKENS = range(4 * 24)
KEYS = [page.key for page in sequence(TOKENS)]


def test_only_nodes_that_rank_before_this_one_are_asked() -> None:
    names = [NodeId(name) for name in "abcd"]
    placement = Placement([(name, 1.0) for name in names])
    for own in [*names, NodeId("elsewhere")]:
        duties = Duties(own, 2)
        duties.follow(Nodes(placement, dict.fromkeys(names, "1")))
        asked = duties.asked_before(KEYS)
        for key, ranks in zip(KEYS, placement.ranks(KEYS, 2).tolist(), strict=True):
            order = [names[position] for position in ranks]
            before = order[: order.index(own)] if own in order else order
            assert {name for name in names if key in asked.get(name, [])} == set(before)


async def test_what_is_read_from_a_second_node_is_copied_back_to_the_first(
    cluster: StoreCluster,
) -> None:
    config = StoreConfig(
        segment_nbytes=64 * SPEC.page_nbytes, lease_s=PATIENT_LEASE_S, tick_s=0.02, replicas=2
    )
    nodes = [await cluster.node(f"store-{i}", config) for i in range(2)]
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * len(KEYS)
    channel = await raw_channel(cluster, nodes[0].address)
    await channel.request(ClearStore(), StoreDone, deadline_s=deadline_after(5))  # as if evicted
    assert nodes[0].numbers()["num_pages"] == 0
    placement = Placement([(node.identity.node_id, 1.0) for node in nodes])
    num_first = placement.place(KEYS).count(nodes[0].identity.node_id)
    assert 0 < num_first < len(KEYS)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * len(KEYS)
    await until(lambda: nodes[0].numbers()["num_pages"] == num_first)
    assert nodes[1].numbers()["copies_mended"] == num_first
    assert nodes[0].numbers()["copies_mended"] == 0
