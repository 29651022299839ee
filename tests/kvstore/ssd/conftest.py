"""Tiers in a temporary directory, closed and checked when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.ssd import SsdConfig, SsdTier

MIB = 1 << 20
OpenTier = Callable[..., Awaitable[SsdTier]]


@pytest.fixture
async def open_tier(tmp_path: Path) -> AsyncIterator[OpenTier]:
    """``open_tier(nbytes=..., on_evicted=..., disk=..., flush_s=...)`` in one directory."""
    tiers: list[SsdTier] = []

    async def make(*, nbytes: int = 4 * MIB, **options: Any) -> SsdTier:
        ours = {"on_evicted", "disk", "lanes"}
        config = SsdConfig(
            path=tmp_path / "tier",
            nbytes=nbytes,
            **{name: value for name, value in options.items() if name not in ours},
        )
        given = {name: value for name, value in options.items() if name in ours}
        tier = await SsdTier.open(config, **given)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        await tier.close()
        tier.check()
