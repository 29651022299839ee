"""A store cluster in one process, with faults at will."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.server import room
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.fakes import World
from tests.kvstore.faulty import FAST


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[StoreCluster]:
    cluster = StoreCluster(world, client_config=FAST)
    yield cluster
    await cluster.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the disk is not taken to hang while somebody waits for it."""
    monkeypatch.setattr(room, "STILL_S", 60.0)
