"""A small store cluster for tests: nodes and clients over any network, transfer and membership."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.page import PageSpec
from kvstore.server.node import StoreNode
from tests.kvstore.contract import Stores
from tests.kvstore.fakes import FakeMembership, FakeNetwork, FakeTransfer, World
from tests.kvstore.pages import SPEC
from transfer.channel import Network
from transfer.identity import Role, new_identity
from transfer.interface import Transfer

PATIENT_LEASE_S = 30.0  # a test process may stand still for seconds on a busy machine


class StoreCluster:
    """Owns what it made; ``close`` checks the nodes' invariants and closes everything.

    Args:
        network: makes one network per process; ``transfer``: likewise.
    """

    def __init__(
        self,
        world: World,
        *,
        network: Callable[[], Network] | None = None,
        transfer: Callable[[], Transfer] | None = None,
        client_config: StoreClientConfig | None = None,
    ) -> None:
        self.world = world
        self.client_config = client_config or StoreClientConfig()
        self.nodes: list[StoreNode] = []
        self.clients: list[StoreClient] = []
        self._make_network = network or (lambda: FakeNetwork(world))
        self._make_transfer = transfer or (lambda: FakeTransfer(world))
        self._networks: list[Network] = []
        self._transfers: list[Transfer] = []

    async def transfer(self) -> Transfer:
        """The transfer of one more process, started."""
        transfer = self._make_transfer()
        await transfer.start()
        self._transfers.append(transfer)
        return transfer

    def always_write(self) -> None:
        """Clients made from now on write their pages, also few of them."""
        off = {"offer_nbytes_max": 0}
        self.client_config = self.client_config.model_copy(update=off)

    def network(self) -> Network:
        network = self._make_network()
        self._networks.append(network)
        return network

    async def node(self, name: str = "store-0", config: StoreConfig | None = None) -> StoreNode:
        """Start one store node."""
        node = StoreNode(
            config or StoreConfig(segment_nbytes=4096 * SPEC.page_nbytes, lease_s=PATIENT_LEASE_S),
            identity=new_identity(Role.STORE, name),
            network=self.network(),
            transfer=await self.transfer(),
            membership=FakeMembership(self.world),
        )
        await node.start()
        self.nodes.append(node)
        return node

    async def client(
        self, transfer: Transfer, *, spec: PageSpec = SPEC, network: Network | None = None
    ) -> StoreClient:
        """One more client, with the transfer that its regions are of."""
        client = StoreClient(
            identity=new_identity(Role.DECODE),
            network=network or self.network(),
            transfer=transfer,
            membership=FakeMembership(self.world),
            spec=spec,
            config=self.client_config,
        )
        self.clients.append(client)
        return client

    async def stores(self) -> Stores:
        """The cluster as the contract suite sees it: clients of one process."""
        transfer, network = await self.transfer(), self.network()

        async def open_client() -> StoreClient:
            return await self.client(transfer, network=network)

        return Stores(open_client, transfer)

    def kill(self, node: StoreNode) -> None:
        """The process is gone at once, and so is its seat in the membership."""
        node.abort()
        self.world.cut(node.identity.node_id)
        self.world.unlist(node.identity.node_id)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for node in self.nodes:
            node.check()
            await node.close()
            await node.close()
        for transfer in self._transfers:
            await transfer.close()
        for network in self._networks:
            await network.close()
