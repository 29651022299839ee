"""What all seats kept by a task have in common: how they begin, end, and are refused.

Owns the task, what may be known of it (``connected``, ``superseded``, ``alive``), and the future
that ``join`` waits for. Knows neither where members are kept nor how a seat is kept there: that is
``_run`` of who inherits (``registry_client.py``, ``etcd/membership.py``).

::

            _start: the task runs            _seat_taken
      new ──────────────────────▶ joining ─────────────────▶ seated
                                     │ refused: _start raises    │ superseded, left, or a bug
                                     ▼                           ▼
                                    ended ◀──────────────────── ended
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from transfer.errors import PeerClosed, PeerUnreachable, TransferError
from transfer.identity import Identity
from transfer.membership import Subscribers, Superseded

logger = logging.getLogger(__name__)


class KeptSeat(ABC):
    """See the module's docstring. ``place`` says in messages who has to answer."""

    def __init__(self, identity: Identity, place: str) -> None:
        self._identity = identity
        self._place = place
        self._subscribers = Subscribers()
        self._task: asyncio.Task[None] | None = None
        self._seated: asyncio.Future[None] | None = None
        self._connected = False
        self._superseded = False
        self._left = False
        self._stopping = False  # a cancellation alone is lost when a connection fails meanwhile

    @abstractmethod
    async def _run(self) -> None:
        """Keep the seat until ``_stopping``, through whatever the world does."""

    @abstractmethod
    def _remedy(self) -> str:
        """How to start what does not answer."""

    def _end(self) -> None:
        """The seat is kept no more, whyever: nobody may think so. Idempotent."""
        self._connected = False

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def superseded(self) -> bool:
        return self._superseded

    @property
    def alive(self) -> bool:
        """False when nobody keeps the seat and the view any more."""
        return self._task is not None and not self._task.done() and not self._stopping

    async def watch_only(self, *, deadline_s: float | None = None) -> None:
        """Follow the cluster without being listed in it; returns with the first view.

        Raises:
            PeerUnreachable: nobody answered by ``deadline_s`` (None waits without limit).
            Unauthorized: who answers knows no such user.
        """
        try:
            async with asyncio.timeout_at(deadline_s) as scope:
                await self._start()
        except TimeoutError as error:
            assert scope.expired(), "nothing below raises TimeoutError"
            text = f"no {self._place} before the deadline; {self._remedy()}"
            raise PeerUnreachable(text) from error

    def abort(self) -> None:
        """Stop at once, without giving the seat up: the lease runs out. Idempotent."""
        self._left = self._stopping = True
        self._end()
        if self._task is not None:
            self._task.cancel()

    async def _start(self) -> None:
        assert self._task is None, "a membership is joined once"
        assert not self._left, "a membership that was left is not joined again"
        loop = asyncio.get_running_loop()
        self._seated = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"seat of {self._identity.node_id}")
        self._task.add_done_callback(self._ended)
        try:
            await self._seated
        except BaseException:
            await self._stop()
            raise

    async def _stop(self) -> None:
        self._stopping = True
        self._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _was_seated(self) -> bool:
        """``join`` has returned: the seat has been ours."""
        return self._seated is not None and self._seated.done()

    def _seat_taken(self) -> None:
        """There is a view: ``join`` returns."""
        self._connected = True
        if self._seated is not None and not self._seated.done():
            self._seated.set_result(None)

    def _give_up(self, error: TransferError) -> bool:
        """Hand a refusal to ``join`` if it still waits; True when it is for good."""
        seated = self._seated
        assert seated is not None
        self._superseded = isinstance(error, Superseded)
        if not seated.done():
            seated.set_exception(error)
            return True
        if self._superseded:
            logger.error("%s", error)
        else:
            logger.error("registration is refused, trying again: %s", error)
        return self._superseded

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody may go on waiting for the seat."""
        self._end()
        failure = None if task.cancelled() else task.exception()
        if self._seated is not None and not self._seated.done():
            self._seated.set_exception(failure or PeerClosed(f"left, and no {self._place} yet"))
        elif failure is not None:
            logger.error("%s is no longer a member", self._identity.node_id, exc_info=failure)


def first_failure(
    errors: BaseExceptionGroup[TransferError], *telling: type[TransferError]
) -> TransferError:
    """Return the failure that says most: of a kind in ``telling`` if there is one, or any."""
    found: list[TransferError] = []
    groups: list[BaseExceptionGroup[TransferError]] = [errors]
    while groups:
        for error in groups.pop().exceptions:
            if isinstance(error, BaseExceptionGroup):
                groups.append(error)
            else:
                found.append(error)
    return min(found, key=lambda error: not isinstance(error, telling))
