"""One generation, performed: the shell around ``RequestCore``.

Owns the tasks of both legs and their ends. Decides nothing but which error of a node means what.
Knows no HTTP.

Legs post *steps* (calls into the core) to one queue; ``items`` takes them one by one and performs
the actions they return. The queue holds at most the tokens of one request. Every action but
``Emit`` is performed before a token is yielded, so a slow client delays no leg.

Who ends what: a leg of an unfinished generation is cancelled and awaited in ``close``; legs of a
finished one are handed to the dispatcher to linger, so that pages still being pushed arrive. That
a text ended (a stop string) is asked after every token; it finishes the generation like any other
end, except that decode is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from engine.request import (
    DecodeEvent,
    ErrorCode,
    FinishReason,
    FirstToken,
    GenerateRequest,
    PrefillEvent,
    PrefillRequest,
    TokenOut,
)
from gateway.config import DispatcherConfig
from gateway.errors import (
    GatewayError,
    GenerationFailed,
    InvalidRequest,
    NoCapacity,
    TimedOut,
    TooManyRequests,
)
from gateway.legs import (
    Action,
    AwaitFacts,
    Emit,
    Finish,
    GiveUp,
    LegState,
    Phase,
    RequestCore,
    StartDecode,
    StartPrefill,
    TellDecode,
)
from gateway.links import Link
from gateway.news import NewsTeller
from gateway.placement import Placement, Seat
from gateway.router import Query
from gateway.stats import DispatchStats
from gateway.trace import GenerationDone, GenerationTrace
from transfer.channel import Channel
from transfer.errors import DeadlineExceeded, RemoteFailed, TransferError
from transfer.identity import Role
from transfer.interface import deadline_after

REFUSAL_CODES = (ErrorCode.TOO_LONG, ErrorCode.INVALID_REQUEST)  # a larger node may still accept
BUSY_CODES = (ErrorCode.OVERLOADED, ErrorCode.DRAINING)  # another node may

Step = Callable[[], list[Action]]


class Generation:
    """Runs one request over the cluster. Use once: iterate ``items``, then ``close``."""

    def __init__(
        self,
        request: GenerateRequest,
        query: Query,
        *,
        placement: Placement,
        config: DispatcherConfig,
        stats: DispatchStats,
        trace: GenerationTrace,
        deadline_s: float,
        text_ended: Callable[[], bool],
    ) -> None:
        self._request = request
        self._text_ended = text_ended
        self._query = query
        self._placement = placement
        self._config = config
        self._stats = stats
        self._trace = trace
        self._deadline_s = deadline_s
        self._core = RequestCore(
            request,
            trace,
            prefill_attempts_max=config.prefill_attempts_max,
            decode_attempts_max=config.decode_attempts_max,
        )
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._teller = NewsTeller(config, self._core.news, deadline_s)
        self._prefill_task: asyncio.Task[None] | None = None
        self._decode_task: asyncio.Task[None] | None = None
        self._replaced: list[asyncio.Task[None]] = []
        self._tried_prefill: list[Link] = []
        self._tried_decode: list[Link] = []
        self._all_busy = True  # every decode node that was tried declined for being busy
        self._refused: dict[Link, RemoteFailed] = {}  # decode nodes that will never take it
        self._timers: list[asyncio.TimerHandle] = []
        self._gave_up = False

    async def items(self) -> AsyncGenerator[TokenOut | GenerationDone, None]:
        """Yield tokens in order, then ``GenerationDone``.

        Raises:
            NoCapacity, TooManyRequests, InvalidRequest, TimedOut, GenerationFailed.
        """
        loop = asyncio.get_running_loop()
        started_s, num_given = loop.time(), 0
        self._timers.append(loop.call_at(self._deadline_s, self.fail, self._timed_out()))
        actions = self._core.begin(with_prefill=await self._wait_for_nodes())
        while True:
            finish = self._perform(actions)
            for action in actions:
                if isinstance(action, Emit):
                    if self._trace.ttft_s is None:
                        self._trace.ttft_s = loop.time() - started_s
                    self._stats.output_tokens += 1
                    num_given += 1
                    yield action.output
                    if self._text_ended():
                        break  # what came after it is nobody's
            if self._core.phase is Phase.OPEN and self._core.num_emitted and self._text_ended():
                actions = self._core.stop_text()
                continue
            if finish is not None:
                yield GenerationDone(finish, num_given, self._trace)
                return
            step = await self._steps.get()
            actions = step()

    def fail(self, error: GatewayError) -> None:
        """End the generation with ``error`` at its next step."""

        def step() -> list[Action]:
            raise error

        self._steps.put_nowait(step)

    async def close(self) -> list[asyncio.Task[None]]:
        """End the legs; return those of a finished generation that may still push pages."""
        for timer in self._timers:
            timer.cancel()
        finished = self._core.phase is Phase.DONE and self._core.num_emitted > 0
        tasks = [t for t in (self._prefill_task, self._decode_task) if t and not t.done()]
        lingering = tasks if finished and not self._gave_up else []
        ending = self._replaced + [task for task in tasks if task not in lingering]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        return lingering

    def abort(self) -> None:
        """Cancel the legs at once."""
        for task in (self._prefill_task, self._decode_task, *self._replaced):
            if task is not None:
                task.cancel()

    def _perform(self, actions: Sequence[Action]) -> FinishReason | None:
        for action in actions:
            match action:
                case StartPrefill(leg):
                    self._stats.prefill_failovers += leg > 1
                    self._prefill_task = self._replace(
                        self._prefill_task, self._prefill_leg(leg), "prefill"
                    )
                case StartDecode(leg):
                    self._stats.decode_failovers += leg > 1
                    self._decode_task = self._replace(
                        self._decode_task, self._decode_leg(leg), "decode"
                    )
                case TellDecode():
                    self._teller.changed()
                case AwaitFacts():
                    self._drop_needless_decode()
                    loop = asyncio.get_running_loop()
                    grace = self._core.grace_over
                    self._timers.append(
                        loop.call_later(self._config.finish_grace_s, self._steps.put_nowait, grace)
                    )
                case GiveUp(message):
                    self._gave_up = True
                    raise GenerationFailed(message)
                case Finish(reason):
                    self._drop_needless_decode()
                    return reason
                case Emit():
                    pass  # yielded by ``items`` when all else is under way
        return None

    def _replace(
        self, old: asyncio.Task[None] | None, run: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        if old is not None and not old.done():
            old.cancel()
            self._replaced.append(old)
        loop = asyncio.get_running_loop()
        return loop.create_task(run, name=f"{name} leg of {self._request.request_id}")

    def _drop_needless_decode(self) -> None:
        task = self._decode_task
        if task is not None and not task.done() and self._core.decode is LegState.OVER:
            task.cancel()
            self._replaced.append(task)
            self._decode_task = None

    def _post(self, step: Step) -> None:
        self._steps.put_nowait(step)

    def _is_late(self, error: RemoteFailed) -> bool:
        """Fail the generation when its deadline has passed on the node; else another may serve."""
        if error.code == ErrorCode.DEADLINE_EXCEEDED:
            self.fail(self._timed_out())
            return True
        return False

    def _timed_out(self) -> TimedOut:
        return TimedOut("the request did not complete before its deadline")

    # ── waiting for nodes ────────────────────────────────────────────────────────────────────

    async def _wait_for_nodes(self) -> bool:
        """Return whether a prefill node shall take the request; raise when nothing can serve it.

        Without a store no page would reach decode, which would compute the prompt again.
        """
        if self._request.sampling.max_tokens > 1 and not self._placement.has_store:
            await self._wait_for_decode()
            return False
        links = self._placement.links
        connecting = [link for link in links.of_role(Role.PREFILL) if link.connecting_first]
        if not links.usable(Role.PREFILL) and connecting:
            await self._placement.wait_until(
                lambda: (
                    bool(links.usable(Role.PREFILL))
                    or not any(link.connecting_first for link in connecting)
                ),
                min(self._deadline_s, deadline_after(self._config.prefill_wait_s)),
            )
        with_prefill = bool(links.usable(Role.PREFILL))
        if self._request.sampling.max_tokens > 1 or not with_prefill:
            await self._wait_for_decode()
        return with_prefill

    async def _wait_for_decode(self) -> None:
        links = self._placement.links
        if links.usable(Role.DECODE):
            return
        if self._core.num_emitted:
            deadline_s = self._deadline_s
        elif links.of_role(Role.DECODE):
            deadline_s = min(self._deadline_s, deadline_after(self._config.capacity_wait_s))
        else:
            raise self._no_capacity("no decode node is in the cluster; start `kvferry decode`")
        if not await self._placement.wait_until(
            lambda: bool(links.usable(Role.DECODE)), deadline_s
        ):
            raise self._no_capacity("no decode node is reachable and takes new work")

    def _no_capacity(self, message: str) -> NoCapacity:
        return NoCapacity(message, retry_after_s=self._config.retry_after_s)

    # ── prefill leg ──────────────────────────────────────────────────────────────────────────

    async def _prefill_leg(self, leg: int) -> None:
        seat = self._placement.take(Role.PREFILL, self._query, self._tried_prefill)
        if seat is None:
            self._post(lambda: self._core.prefill_unavailable(leg))
            return
        channel = seat.link.channel
        assert channel is not None, "a usable link has a channel"
        self._trace.num_prefill_legs += 1
        self._trace.expected_cached_tokens = seat.dispatch.cached_tokens
        try:
            message = PrefillRequest(request=self._request)
            async for event in self._stream(channel, message, PrefillEvent):
                self._on_prefill_event(leg, seat, event)
            self._lost_prefill(leg, seat.link)
        except DeadlineExceeded:
            self.fail(self._timed_out())
        except RemoteFailed as error:
            if not self._is_late(error):
                self._lost_prefill(leg, seat.link)
        except TransferError:
            self._lost_prefill(leg, seat.link)
        finally:
            self._placement.release(seat)

    def _on_prefill_event(self, leg: int, seat: Seat, event: PrefillEvent) -> None:
        if isinstance(event, FirstToken):
            self._placement.computed(seat)
            if leg == self._core.prefill_leg and self._core.prefill is LegState.COMPUTING:
                self._trace.prefill_node = seat.link.name
                self._trace.transport = self._trace.transport or seat.link.member.info.transport
        self._post(lambda: self._core.on_prefill(leg, event))

    def _lost_prefill(self, leg: int, link: Link) -> None:
        self._tried_prefill.append(link)
        self._post(lambda: self._core.on_prefill_lost(leg))

    # ── decode leg ───────────────────────────────────────────────────────────────────────────

    async def _decode_leg(self, leg: int) -> None:
        try:
            seat = await self._decode_seat()
        except GatewayError as error:
            self.fail(error)
            return
        self._trace.num_decode_legs += 1
        self._trace.decode_node = seat.link.name
        self._trace.transport = seat.link.member.info.transport
        channel = seat.link.channel
        assert channel is not None, "a usable link has a channel"
        request = self._core.decode_request()
        teller = None
        if request.expect_prefill:
            loop = asyncio.get_running_loop()
            teller = loop.create_task(self._tell(leg, channel), name="tell decode")
        try:
            async for event in self._stream(channel, request, DecodeEvent):
                self._placement.computed(seat)
                self._all_busy = False
                self._post_decode(leg, event)
            self._lost_decode(leg, seat.link)
        except DeadlineExceeded:
            self.fail(self._timed_out())
        except RemoteFailed as error:
            if not self._is_late(error):
                if error.code in REFUSAL_CODES:
                    self._refused[seat.link] = error
                declined = error.code in (*BUSY_CODES, *REFUSAL_CODES)
                self._lost_decode(leg, seat.link, fault=not declined)
        except TransferError:
            self._lost_decode(leg, seat.link)
        finally:
            self._placement.release(seat)
            if teller is not None:
                teller.cancel()
                await asyncio.wait([teller])

    def _post_decode(self, leg: int, event: DecodeEvent) -> None:
        self._post(lambda: self._core.on_decode(leg, event))

    def _lost_decode(self, leg: int, link: Link, *, fault: bool = True) -> None:
        self._tried_decode.append(link)
        self._all_busy = self._all_busy and not fault
        self._post(lambda: self._core.on_decode_lost(leg, fault=fault))

    async def _decode_seat(self) -> Seat:
        """Take a decode node, an untried one first, never one that refused the request."""
        while True:
            await self._wait_for_decode()
            excluded = [*self._tried_decode, *self._refused]
            seat = self._placement.take(Role.DECODE, self._query, excluded)
            if seat is not None:
                return seat
            usable = self._placement.links.usable(Role.DECODE)
            if usable and all(link in self._refused for link in usable):
                refusal = self._refused[usable[0]]
                raise InvalidRequest(refusal.message, code=refusal.code)
            if self._all_busy and not self._core.num_emitted:
                raise TooManyRequests(
                    "every decode node is at capacity", retry_after_s=self._config.retry_after_s
                )
            await asyncio.sleep(self._config.overload_retry_s)
            self._tried_decode.clear()

    async def _tell(self, leg: int, channel: Channel) -> None:
        if not await self._teller.tell(channel):
            self._stats.updates_lost += 1
            self._post(lambda: self._core.on_decode_lost(leg))

    async def _stream(
        self, channel: Channel, message: msgspec.Struct, item: Any
    ) -> AsyncIterator[Any]:
        stream = channel.stream(message, item, deadline_s=self._deadline_s)
        async with aclosing(cast("AsyncGenerator[Any, None]", stream)) as items:
            async for event in items:
                yield event
