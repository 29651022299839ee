"""A store node that becomes another incarnation while it lives: others have seen it leave."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.messages import CommitPages, OpenStore, PageCommit, PagesCommitted, StoreOpened
from kvstore.page import PageKey
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.faulty import get_all, open_client, raw_channel
from transfer.errors import RemoteFailed
from transfer.identity import Incarnation
from transfer.interface import deadline_after


async def test_grants_of_before_are_refused_and_the_pages_stay(cluster: StoreCluster) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    assert set(await put_all(stores, client, range(4))) == {PutOutcome.STORED}
    before = node.identity
    node.renew(msgspec.structs.replace(before, incarnation=Incarnation("other")))
    channel = await raw_channel(cluster, node.address)
    commit = PageCommit(PageKey(b"k" * 32), 7, b"c" * 16)
    with pytest.raises(RemoteFailed, match="stale_incarnation"):
        await channel.request(
            CommitPages(incarnation=before.incarnation, pages=(commit,)),
            PagesCommitted,
            deadline_s=deadline_after(1),
        )
    opened = await channel.request(OpenStore(), StoreOpened, deadline_s=deadline_after(1))
    assert opened.incarnation == node.identity.incarnation == "other"
    other = await open_client(await cluster.stores())
    assert set(await get_all(stores, other, range(4))) == {GetOutcome.READ}
