"""The decode legs that are open: sequence, stream and deadline of each, by request id.

Owns the way of one leg from its request to its last item, and the delivery of news. Decides
nothing about pages or steps. Knows no network beyond ``Caller``.

    open ──▶ queued, pulled ──PromptReady──▶ run ──▶ ended ──last put, at most a while──▶ Finished

A request id that is opened again replaces the older leg: the gateway has given that one up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_node.leg_news import EarlyNews
from decode_node.output_stream import OutputStream
from decode_node.scheduler import Scheduler
from decode_node.sequence import ENDED, SeqState, Sequence
from decode_node.write_back import Ticket
from engine.request import (
    ErrorCode,
    Finished,
    FinishReason,
    PrefillUpdate,
    PromptReady,
    RequestId,
    TokenOut,
)
from transfer.errors import RemoteFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Leg:
    """One open decode stream."""

    seq: Sequence
    deadline_s: float
    stream: OutputStream = field(default_factory=OutputStream)
    prompt_said: bool = False
    last_put: Ticket | None = None


class Legs:
    """See the module.

    Args:
        scheduler: queues and ends sequences.
        early: news for legs that are not open yet.
        on_news: called when a sequence has news of its prefill leg.
        last_put_s: how long ``Finished`` may wait for the puts of the sequence, at that moment.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        early: EarlyNews,
        *,
        on_news: Callable[[Sequence], None],
        last_put_s: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._early = early
        self._on_news = on_news
        self._last_put_s = last_put_s
        self._by_id: dict[RequestId, Leg] = {}
        self._by_seq: dict[Sequence, Leg] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.counters = dict.fromkeys(
            ("requests", "refused", "finished", "handed_over", "aborted", "failed"), 0
        )
        others = ("tokens", "news", "news_early", "news_late", "superseded")
        self.counters.update(dict.fromkeys(others, 0))

    @property
    def num_open(self) -> int:
        return len(self._by_seq)

    # ---- a leg begins

    def open(self, seq: Sequence, deadline_s: float) -> Leg:
        """Queue ``seq`` and apply what is known of its prefill leg.

        Raises:
            RemoteFailed: too_long, overloaded.
        """
        older = self._by_id.get(seq.request_id)
        if older is not None:
            self.counters["superseded"] += 1
            self.fail([older.seq], RemoteFailed(ErrorCode.SUPERSEDED, "sent again"))
        refusal = self._scheduler.submit(seq)
        if refusal is not None:
            self.counters["refused"] += 1
            raise RemoteFailed(refusal.code, refusal.message)
        self.counters["requests"] += 1
        leg = Leg(seq, deadline_s)
        self._by_id[seq.request_id] = self._by_seq[seq] = leg
        self._empty.clear()
        now = asyncio.get_running_loop().time()
        for update in self._early.take(seq.request_id, now):
            self._apply(leg, update, now)
        if seq.num_outputs >= seq.params.max_tokens:
            self.stop(seq, FinishReason.LENGTH)
        return leg

    def close(self, leg: Leg) -> None:
        """The consumer is gone, or has everything; idempotent."""
        seq = leg.seq
        if seq.state not in ENDED:
            self.counters["aborted"] += 1
            self._scheduler.stop(seq, SeqState.ABORTED)
        if self._by_id.get(seq.request_id) is leg:
            del self._by_id[seq.request_id]
            self._early.ended(seq.request_id, asyncio.get_running_loop().time())
        if self._by_seq.pop(seq, None) is not None and not self._by_seq:
            self._empty.set()

    def deadline_of(self, seq: Sequence) -> float:
        return self._by_seq[seq].deadline_s

    # ---- news

    def update(self, update: PrefillUpdate) -> bool:
        """Take in news of a prefill leg; False when its request is not known (yet)."""
        now = asyncio.get_running_loop().time()
        leg = self._by_id.get(update.request_id)
        if leg is None:
            kept = self._early.add(update, now)
            self.counters["news_early" if kept else "news_late"] += 1
            return False
        self._apply(leg, update, now)
        return True

    def _apply(self, leg: Leg, update: PrefillUpdate, now: float) -> None:
        seq = leg.seq
        if not seq.news.apply(update, now, seq.accepts_first) or seq.state in ENDED:
            return
        self.counters["news"] += 1
        reason = seq.take_first_token()
        if reason is not None:
            self.stop(seq, reason)
            return
        if seq.state is SeqState.READY:
            seq.settle()  # failed: the first token is ours to make now
        self._on_news(seq)

    # ---- a leg ends

    def prompt_ready(self, seq: Sequence) -> None:
        """Say where the KV of the prompt came from, once it is all there; idempotent."""
        leg, stats = self._by_seq.get(seq), seq.stats
        if leg is None or leg.prompt_said or leg.stream.ended or not seq.prompt_complete:
            return
        leg.prompt_said = True
        leg.stream.prompt_ready(
            PromptReady(
                computed_tokens=stats.computed_tokens,
                computed_emitted_tokens=stats.computed_emitted_tokens,
                cached_local_tokens=stats.cached_local_tokens,
                cached_store_tokens=stats.cached_store_tokens,
                pages_pulled=stats.pages_pulled,
                bytes_pulled=stats.bytes_pulled,
                recomputed_pages=stats.recomputed_pages,
                pull_s=stats.pull_s,
            )
        )

    def output(self, seq: Sequence, output: TokenOut) -> None:
        self.prompt_ready(seq)
        leg = self._by_seq.get(seq)
        if leg is not None and not leg.stream.ended:
            self.counters["tokens"] += 1
            leg.stream.push(output)

    def stop(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a sequence outside of a step (inside of one, when it has ended)."""
        if self._scheduler.stop(seq, SeqState.FINISHED, reason):
            self.ended(seq)

    def ended(self, seq: Sequence) -> None:
        """The scheduler has ended ``seq``; send ``Finished`` when its last pages are stored."""
        leg = self._by_seq.get(seq)
        if leg is None or seq.state is not SeqState.FINISHED:
            return
        if leg.last_put is None or leg.last_put.done.is_set():
            self._finish(leg)
            return
        task = asyncio.get_running_loop().create_task(self._finish_later(leg, leg.last_put))
        self._tasks[task] = None
        task.add_done_callback(self._reap)

    def final_put(self, seq: Sequence, ticket: Ticket) -> None:
        """``ticket`` stands for all pages of ``seq`` that are on their way to the store."""
        leg = self._by_seq.get(seq)
        if leg is not None:
            leg.last_put = ticket

    async def _finish_later(self, leg: Leg, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._last_put_s()):
                await ticket.done.wait()
        except TimeoutError:
            pass  # the put goes on in the background
        self._finish(leg)

    def _finish(self, leg: Leg) -> None:
        seq, stats = leg.seq, leg.seq.stats
        assert seq.reason is not None
        over = seq.reason is FinishReason.ABORT
        self.counters["handed_over" if over else "finished"] += 1
        leg.stream.finish(
            Finished(
                reason=seq.reason,
                computed_tokens=stats.computed_tokens,
                computed_emitted_tokens=stats.computed_emitted_tokens,
                cached_local_tokens=stats.cached_local_tokens,
                cached_store_tokens=stats.cached_store_tokens,
                pages_pulled=stats.pages_pulled,
                bytes_pulled=stats.bytes_pulled,
                pages_pushed=stats.pages_pushed,
                bytes_pushed=stats.bytes_pushed,
                recomputed_pages=stats.recomputed_pages,
                num_preemptions=stats.num_preemptions,
                pull_s=stats.pull_s,
            )
        )

    def fail(self, seqs: list[Sequence], error: RemoteFailed) -> None:
        """End sequences with an error."""
        for seq in seqs:
            self._scheduler.stop(seq, SeqState.ABORTED)
            leg = self._by_seq.get(seq)
            if leg is not None:
                self.counters["failed"] += 1
                leg.stream.finish(error)

    # ---- all legs

    def hand_over(self) -> None:
        """End every sequence with ABORT; its pages go to the store, another node goes on."""
        for leg in list(self._by_seq.values()):
            self.stop(leg.seq, FinishReason.ABORT)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no leg is open; False when time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        closed = RemoteFailed(ErrorCode.CLOSED, "the node has closed: retry elsewhere")
        for leg in self._by_seq.values():
            leg.stream.finish(closed)

    async def join(self) -> None:
        """Wait for the tasks that are still to send ``Finished``."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _reap(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            logger.error("a leg could not be finished", exc_info=task.exception())
