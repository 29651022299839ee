"""The distributed store keeps the contract, on one node and on three, over every wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import PageStoreContract, Stores
from tests.kvstore.fakes import World
from tests.kvstore.faulty import PATIENT
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.zmq_network import ZmqNetwork


@pytest.mark.parametrize("num_nodes", [1, 3])
class TestInProcess(PageStoreContract):
    @pytest.fixture
    async def stores(self, num_nodes: int) -> AsyncIterator[Stores]:
        cluster = StoreCluster(World(), client_config=PATIENT)
        for i in range(num_nodes):
            await cluster.node(f"store-{i}")
        yield await cluster.stores()
        await cluster.close()


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
class TestOverRealWires(PageStoreContract):
    @pytest.fixture
    async def stores(self, transport: str) -> AsyncIterator[Stores]:
        cluster = StoreCluster(
            World(),
            network=ZmqNetwork,
            transfer=lambda: TransferEngine(TransferConfig(transport=transport)),
            client_config=PATIENT,
        )
        for i in range(2):
            await cluster.node(f"store-{i}")
        yield await cluster.stores()
        await cluster.close()
