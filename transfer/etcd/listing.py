"""All keys of one cluster in etcd, as of one revision; and how long ago its members were heard.

Owns the two questions. Knows no view.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from transfer.etcd import wire
from transfer.etcd.client import EtcdClient
from transfer.etcd.records import Keys
from transfer.identity import NodeId

MAX_AGES_AT_ONCE = 32  # requests for the ages of leases


class Listing(NamedTuple):
    """What ``list_keys`` found.

    Attributes:
        joins_revision: when somebody joined last; 0: nobody has ever.
    """

    revision: int
    kvs: tuple[wire.KeyValue, ...]
    joins_revision: int


async def list_keys(client: EtcdClient, keys: Keys) -> Listing:
    """Return all keys of the cluster."""
    body = {"key": keys.prefix, "range_end": wire.prefix_end(keys.prefix)}
    answer = await client.call("kv/range", body, wire.RangeAnswer)
    joins = next((kv.mod_revision for kv in answer.kvs if kv.key == keys.joins), 0)
    return Listing(answer.header.revision, answer.kvs, joins)


async def ages_s(client: EtcdClient, keys: Keys, listing: Listing) -> dict[NodeId, float]:
    """Return how long ago each member renewed its lease, to the second."""
    leases = {
        node_id: kv.lease
        for kv in listing.kvs
        if kv.lease and (node_id := keys.node_of(kv.key)) is not None
    }
    ages: dict[NodeId, float] = {}
    names = sorted(leases)
    for start in range(0, len(names), MAX_AGES_AT_ONCE):
        some = names[start : start + MAX_AGES_AT_ONCE]
        bodies = [{"ID": str(leases[name])} for name in some]
        asked = [client.call("lease/timetolive", body, wire.LeaseState) for body in bodies]
        states = await asyncio.gather(*asked, return_exceptions=True)  # none is left behind
        for name, state in zip(some, states, strict=True):
            if isinstance(state, BaseException):
                raise state
            ages[name] = float(max(0, state.grantedTTL - state.TTL))
    return ages
