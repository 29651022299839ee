"""Tiers in a temporary directory, closed and checked when the test ends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.ssd import SsdConfig, SsdTier

MIB = 1 << 20
THREAD_GRACE_S = 30.0
OpenTier = Callable[..., Awaitable[SsdTier]]


@pytest.fixture
async def open_tier(tmp_path: Path) -> AsyncIterator[OpenTier]:
    """``open_tier(nbytes=..., disk=..., flush_s=...)`` in one directory."""
    tiers: list[SsdTier] = []

    async def make(*, nbytes: int = 4 * MIB, **options: Any) -> SsdTier:
        disk = options.pop("disk", None)
        config = SsdConfig(path=tmp_path / "tier", nbytes=nbytes, **options)
        tier = await SsdTier.open(config, disk=disk)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        await tier.close()
        tier.check()
    for thread in threading.enumerate():  # daemons, so that a disk that hangs keeps no process
        if thread.name.startswith("ssd-"):
            thread.join(THREAD_GRACE_S)
            assert not thread.is_alive(), f"thread left behind: {thread.name}"
