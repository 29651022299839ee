"""Telling a decode leg what became of its prefill leg.

Owns the delivery of ``PrefillUpdate``: cumulative, each state once, again until the node answers
that it knows the request. Part of the shell; ``gateway/legs.py`` decides what the news are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.request import Ack, PrefillUpdate
from gateway.config import DispatcherConfig
from transfer.channel import Channel
from transfer.errors import DeadlineExceeded, TransferError
from transfer.interface import deadline_after


class NewsTeller:
    """The news of one generation; every decode leg that expects prefill is told by ``tell``."""

    def __init__(
        self,
        config: DispatcherConfig,
        news: Callable[[], PrefillUpdate | None],
        deadline_s: float,
    ) -> None:
        self._config = config
        self._news = news
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """There is something new to tell."""
        self._changed.set()

    async def tell(self, channel: Channel) -> bool:
        """Tell one leg every state until the last; False when it cannot be told."""
        told: PrefillUpdate | None = None
        while told is None or not (told.failed or told.published is not None):
            self._changed.clear()
            news = self._news()
            if news is None or news == told:
                await self._changed.wait()
                continue
            if not await self._deliver(channel, news):
                return False
            told = news
        return True

    async def _deliver(self, channel: Channel, news: PrefillUpdate) -> bool:
        """``known`` False: the node keeps early news, but may lose them, so it is told again until
        its leg knows or has ended."""
        pause_s = self._config.update_retry_s
        for _ in range(self._config.update_attempts_max):
            deadline_s = min(self._deadline_s, deadline_after(self._config.update_timeout_s))
            try:
                if (await channel.request(news, Ack, deadline_s=deadline_s)).known:
                    return True
            except DeadlineExceeded:
                continue  # the answer was late; repeats are ignored by the node
            except TransferError:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.update_timeout_s)
        return False
