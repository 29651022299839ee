"""What the tests of a breaking store share: quick settings, one prompt in and out, raw channels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.store import GetOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import Stores
from tests.kvstore.fakes import FakeNetwork
from tests.kvstore.pages import SPEC, empty, holds, sequence
from transfer.channel import Channel, Hello
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

# 256 operations at once in one process, on a busy machine
PATIENT = StoreClientConfig(op_timeout_s=20.0)
FAST = StoreClientConfig(op_timeout_s=1.0, poll_s=0.2, backoff_s=0.2, backoff_max_s=0.4)


def small(num_pages: int, *, lease_s: float = 0.5) -> StoreConfig:
    """A node of few pages with quick leases and no watermark."""
    return StoreConfig(
        segment_nbytes=num_pages * SPEC.page_nbytes,
        lease_s=lease_s,
        lease_grace_s=0.0,
        tick_s=0.02,
        high_watermark=1.0,
        low_watermark=1.0,
    )


async def get_all(
    stores: Stores, store: StoreClient, tokens: list[int] | range, *, wait: bool = False
) -> list[GetOutcome]:
    into, gets = empty(stores.transfer, sequence(tokens))
    result = await store.get(gets, into=into, deadline_s=deadline_after(5), wait=wait)
    for page, outcome in zip(gets, result.outcomes, strict=True):
        assert outcome is not GetOutcome.READ or holds(into, page)
    return result.outcomes


async def open_client(stores: Stores) -> StoreClient:
    client = await stores.open()
    assert isinstance(client, StoreClient)
    return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)


async def raw_channel(cluster: StoreCluster, address: str) -> Channel:
    hello = Hello(identity=new_identity(Role.DECODE))
    return await FakeNetwork(cluster.world).connect(address, hello, deadline_s=deadline_after(1))
