"""What every role process is built on: its heartbeats say what its transfers count."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launch.config import StoreOptions
from launch.parts import Parts
from transfer.errors import TransferError
from transfer.identity import Role
from transfer.interface import Range, deadline_after
from transfer.membership import NodeInfo, NodeStatus
from transfer.registry_client import RegistryMembership


async def test_a_heartbeat_says_what_the_transfers_have_counted_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Callable[[], NodeStatus]] = []

    async def join(
        self: RegistryMembership, info: NodeInfo, status: Callable[[], NodeStatus]
    ) -> None:
        given.append(status)

    monkeypatch.setattr(RegistryMembership, "join", join)
    parts = Parts(Role.STORE, StoreOptions.of(transfer="loopback"))
    await parts.start()
    try:
        own = NodeStatus(draining=True, gauges={"num_pages": 3.0})
        await parts.membership.join(NodeInfo(identity=parts.identity, address=""), lambda: own)
        (status,) = given
        assert set(status().counters.values()) == {0.0}
        region = parts.transfer.allocate(4096)
        pages = [Range(64 * i, 64 * i, 64) for i in range(8)]
        into = parts.transfer.allocate(4096)
        deadline_s = deadline_after(30)
        await parts.transfer.read(region.export("r"), pages, into=into, deadline_s=deadline_s)
        with pytest.raises(TransferError):
            await parts.transfer.read(b"no token", pages, into=into, deadline_s=deadline_s)
        said = status()
        assert (said.draining, said.gauges) == (True, own.gauges)
        assert said.counters["transfer_bytes_read"] == 512
        assert said.counters["transfer_operations"] == 2
        assert said.counters["transfer_errors"] == 1
        assert (said.counters["transfer_ranges_asked"], said.counters["transfer_ranges_sent"]) == (
            16,
            1,
        )
    finally:
        await parts.transfer.close()
        await parts.network.close()
