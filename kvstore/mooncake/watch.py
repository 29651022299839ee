"""Whether the master answers: nobody waits for one that does not, and one probe at a time asks it.

A call of the library to a master that is gone ends after seconds, one that stands still holds it
longer. So a call that fails for the master's sake, or lasts, is only suspicious; a probe in the
background decides. Owns the verdict, the probe and its pauses; knows no pages::

    here ──a call fails or lasts──▶ asked ──no answer in ask_s──▶ lost ◀──pause──┐
      ▲                               │                             │            │
      └───────────── answers ─────────┴───────────────◀─────────── asked ────────┘

While it is lost nothing is asked of it for a caller: all waits end at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvstore.mooncake.binding import RPC_FAILED
from kvstore.mooncake.config import MooncakeConfig
from transfer.interface import deadline_after

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MasterWatch:
    """See the module's docstring. Make it inside a running loop.

    Args:
        ask: does the master answer; may take as long as the library wants. What it raises is no
            answer.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        counters: Counter[str],
        ask: Callable[[], Coroutine[Any, Any, bool]],
    ) -> None:
        self.is_lost = False
        self._config = config
        self._counters = counters
        self._ask = ask
        self._asking: asyncio.Task[bool] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._limits: dict[asyncio.Timeout, None] = {}  # of those who wait now
        self._lost_s = 0.0
        self._closed = False

    # ---- those who wait

    async def within(self, awaitable: Awaitable[T], deadline_s: float) -> T | None:
        """Await what can be cancelled; None at the deadline, and when the master is lost."""
        limit = asyncio.timeout_at(_now_s() if self.is_lost else deadline_s)
        self._limits[limit] = None
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            return None
        finally:
            del self._limits[limit]

    async def done_by(self, future: asyncio.Future[Any], deadline_s: float) -> bool:
        """Wait for ``future`` until the deadline or a loss; True when it is done. No cancelling."""
        if not future.done():
            await self.within(asyncio.wait({future}), deadline_s)
        return future.done()

    def follow(self, call: asyncio.Future[T]) -> asyncio.Future[T]:
        """Suspect the master when ``call`` lasts or fails for its sake. Returns ``call``."""
        timer = asyncio.get_running_loop().call_later(self._config.overdue_s, self.suspect)

        def ended(done: asyncio.Future[T]) -> None:
            timer.cancel()
            codes = None if done.cancelled() or done.exception() else done.result()
            if codes == RPC_FAILED or (isinstance(codes, list) and RPC_FAILED in codes):
                self.suspect()

        call.add_done_callback(ended)
        return call

    # ---- the verdict

    def suspect(self) -> None:
        """Ask the master, unless somebody does already."""
        if not self._closed and (self._probing is None or self._probing.done()):
            self._probing = asyncio.get_running_loop().create_task(self._probe())
            self._probing.add_done_callback(_say_failed)

    async def _probe(self) -> None:
        if await self._answers(self._config.ask_s):
            return
        self.lose("it answers no more")
        pause_s = self._config.backoff_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.backoff_max_s)
            if await self._answers(None):
                self.find()
                return

    async def _answers(self, limit_s: float | None) -> bool:
        """Ask, or go on waiting for the question that is under way; False at the limit."""
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        asking = self._asking
        await asyncio.wait({asking}, timeout=limit_s)
        if not asking.done():
            return False
        self._asking = None
        if asking.cancelled():
            return False
        if (error := asking.exception()) is not None:
            logger.error("mooncake://%s: asking it failed: %r", self._config.master, error)
            return False
        return asking.result()

    def lose(self, reason: str) -> None:
        """All who wait go on without the master, which was there; says so once."""
        self._counters["master_losses"] += not self.is_lost
        self.miss(reason)

    def miss(self, reason: str) -> None:
        """Likewise when there has been none yet: that is no loss."""
        if self.is_lost:
            return
        self.is_lost, self._lost_s = True, _now_s()
        logger.error(
            "mooncake://%s: %s: pages are neither found nor kept until it answers",
            self._config.master,
            reason,
        )
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(_now_s())

    def find(self) -> None:
        """The master answers; says so if it had been lost."""
        if self.is_lost:
            self.is_lost = False
            logger.warning(
                "mooncake://%s: answers again after %.1f s: pages are found and kept",
                self._config.master,
                _now_s() - self._lost_s,
            )

    async def close(self) -> None:
        """Ask no more; what is under way ends by itself."""
        self._closed = True
        tasks = {task for task in (self._probing, self._asking) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _say_failed(probing: asyncio.Task[None]) -> None:
    """A bug of ours: the next suspicion asks anew."""
    if not probing.cancelled() and (error := probing.exception()) is not None:
        logger.error("the probe of Mooncake's master failed: %r", error, exc_info=error)


def _now_s() -> float:
    return deadline_after(0.0)
