"""One Mooncake cluster for all tests, and stores in it that share nothing with other tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from kvstore.mooncake import MooncakeConfig, MooncakeStore
from tests.kvstore.contract import Stores
from tests.kvstore.mooncake.cluster import MooncakeCluster, require_library, running
from tests.kvstore.mooncake.raw import KeptClients, RawClient, raw_client
from tests.kvstore.pages import SPEC
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.interface import deadline_after

OpenStore = Callable[[], Awaitable[MooncakeStore]]
_NUMBERS = itertools.count()
PATIENT_S = 20.0  # a busy machine is no loss of the master


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    require_library()
    with running(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def clients(mooncake: MooncakeCluster) -> Iterator[KeptClients]:
    kept = KeptClients()
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def raw(mooncake: MooncakeCluster) -> Iterator[RawClient]:
    with raw_client(mooncake.master) as client:
        yield client


@pytest.fixture
async def open_store(mooncake: MooncakeCluster, clients: KeptClients) -> AsyncIterator[OpenStore]:
    """Makes connected clients whose keys no other test sees."""
    prefix = f"test-{next(_NUMBERS)}"
    config = MooncakeConfig(master=mooncake.master, prefix=prefix, ask_s=PATIENT_S)
    stores: list[MooncakeStore] = []

    async def open_one() -> MooncakeStore:
        store = MooncakeStore(config, spec=SPEC, library=clients)
        stores.append(store)
        assert await store.connected(deadline_s=deadline_after(20)), mooncake.logs()
        return store

    yield open_one
    await asyncio.gather(*(store.close() for store in stores))


@pytest.fixture
async def transfer() -> AsyncIterator[TransferEngine]:
    """What the regions of a test are allocated from."""
    engine = TransferEngine(TransferConfig(transport="loopback"))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def stores(open_store: OpenStore, transfer: TransferEngine) -> Stores:
    return Stores(open_store, transfer)
