"""The older binding, ``ucp``: engines over a stand-in for it, since it cannot be installed here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.transfer import fake_ucp
from tests.transfer.bulk_harness import MIB, pattern, soon, until, whole
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import HelloRefused, PeerClosed, PeerLost, PeerUnreachable, RegionRevoked
from transfer.interface import Range

Pair = tuple[TransferEngine, TransferEngine]


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    fake_ucp.install(monkeypatch)
    owner = TransferEngine(TransferConfig(transport="ucx"))
    peer = TransferEngine(TransferConfig(transport="ucx"))
    await owner.start()
    await peer.start()
    yield owner, peer
    await peer.close()
    await owner.close()


async def test_engines_say_that_they_use_it(pair: Pair) -> None:
    assert pair[0].describe().startswith("ucx 1.15.0 (ucp 0.37) over UCX_TLS=fake; ")


@pytest.mark.parametrize("nbytes", [1, 8192, 8193, 5 * MIB + 3])
async def test_reads_and_writes_move_every_byte(pair: Pair, nbytes: int) -> None:
    owner, peer = pair
    remote, local = owner.allocate(nbytes), peer.allocate(nbytes)
    remote.view[:] = pattern(nbytes).data
    await peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert local.view == remote.view
    local.view[:] = pattern(nbytes, 2).data
    await peer.write(remote.export("w"), whole(nbytes), source=local, deadline_s=soon())
    assert remote.view == local.view
    assert peer.counters().fallbacks == 0


async def test_many_operations_at_once_keep_every_byte(pair: Pair) -> None:
    owner, peer = pair
    remote, local = owner.allocate(MIB), peer.allocate(MIB)
    remote.view[:] = pattern(MIB).data
    token, share = remote.export("r"), MIB // 64
    async with asyncio.TaskGroup() as group:
        for start in range(0, MIB, share):
            ranges = [Range(start, MIB - start - share, share)]
            group.create_task(peer.read(token, ranges, into=local, deadline_s=soon()))
    for start in range(0, MIB, share):
        assert local.view[MIB - start - share : MIB - start] == remote.view[start : start + share]


async def test_what_the_owner_refuses_comes_back_as_its_error(pair: Pair) -> None:
    owner, peer = pair
    remote, local = owner.allocate(MIB), peer.allocate(MIB)
    token = remote.export("rw")
    await peer.read(token, whole(8), into=local, deadline_s=soon())
    remote.revoke()
    with pytest.raises(RegionRevoked):
        await peer.write(token, whole(MIB), source=local, deadline_s=soon())


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_an_owner_that_goes_away_ends_what_waits_for_it(pair: Pair, how: str) -> None:
    owner, peer = pair
    remote, local = owner.allocate(64 * MIB), peer.allocate(64 * MIB)
    remote.view[:] = b"\1" * remote.nbytes
    token = remote.export("r")
    task = asyncio.create_task(peer.read(token, whole(64 * MIB), into=local, deadline_s=soon()))
    await until(lambda: local.view[0])
    if how == "close":
        await owner.close()
    else:
        owner.abort()
    with pytest.raises(PeerClosed if how == "close" else PeerLost):
        await task


async def test_without_a_device_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_ucp.install(monkeypatch)
    monkeypatch.setattr("transfer.ucx_binding.options_for", lambda **_: {"TLS": "none"})
    engine = TransferEngine(TransferConfig(transport="ucx"))
    with pytest.raises(PeerUnreachable, match=r"No such device; see UCX_TLS"):
        await engine.start()


async def test_ends_that_use_different_bindings_are_refused_with_both_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, peer = pair
    assert owner._ucx is not None
    other = owner._ucx._context
    dialects = property(lambda context: "matched" if context is other else "envelope")
    monkeypatch.setattr(type(other), "dialect", dialects)
    local = peer.allocate(8)
    with pytest.raises(HelloRefused, match=r"2/envelope here, 2/matched there.*ucxx"):
        await peer.read(owner.allocate(8).export("r"), whole(8), into=local, deadline_s=soon())
