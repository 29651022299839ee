"""Which sequences hold pages, and what the next step runs: the policy of a decode node.

Owns the waiting queue, the active sequences and every page of their tables. Sans-I/O: no clock, no
await. Knows no store; what leaves a sequence passes through ``PageOutlet`` before its pages go.

* **Admission** in order of (priority, arrival), by pages: the tokens there are, and, beside others,
  head room to grow. Nobody overtakes, hence nobody starves.
* **Steps**: one token for each running sequence, and chunks of recomputed prompts within what is
  left of the token budget. Two sequences that miss the same page do not both compute it: the later
  one waits for the earlier, then shares the page.
* **Pressure**: cached pages that nobody holds are evicted; then the latest sequence is retracted
  (never an earlier one for a later one). The earliest can always grow: no deadlock. Pages that are
  still in transfer are waited for first.

A page table, who holds it, and who gives it back::

    [ shared, full, immutable ][ own, full ][ own, partly filled ][ own, empty ]
      cache + each sequence      + cache       this sequence         this sequence
                                               (tail; written)       (head room)
    each holder releases its own reference, once; transfers hold theirs until they ended
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from decode_node.config import DecodeConfig
from decode_node.page_cache import PageCache
from decode_node.page_holds import PageHolds
from decode_node.pull_plan import PullPlan
from decode_node.sequence import ENDED, SeqState, Sequence
from engine.page_allocator import PageAllocator
from engine.request import ErrorCode, FinishReason, TokenOut
from engine.step import ModelInfo, SeqStep
from kvstore.keys import Namespace
from kvstore.page import PageId, PageKey
from kvstore.store import PageIdentity

UnwrittenPages = list[tuple[PageIdentity, PageId]]


class PageOutlet(Protocol):
    """Where pages and pulls of a sequence go when the scheduler lets go of them."""

    def write_back(self, seq: Sequence, pages: UnwrittenPages, *, final: bool) -> None:
        """Store pages; takes references of its own before it returns."""
        ...

    def stop_pull(self, seq: Sequence) -> None:
        """End the pull of ``seq``, if there is one; it keeps its own references until then."""
        ...


class Refusal(NamedTuple):
    """Why a request is not taken: a ``RemoteFailed`` in the making."""

    code: ErrorCode
    message: str


class Admitted(NamedTuple):
    seq: Sequence
    plan: PullPlan


class Planned(NamedTuple):
    """One sequence's part of the next step."""

    seq: Sequence
    step: SeqStep


class StepResult(NamedTuple):
    """What a step brought: prompts whose KV is complete now, tokens, sequences that are over."""

    prompts: list[Sequence]
    outputs: list[tuple[Sequence, TokenOut]]
    ended: list[Sequence]


class Scheduler:
    """See the module."""

    def __init__(
        self,
        config: DecodeConfig,
        info: ModelInfo,
        allocator: PageAllocator,
        cache: PageCache,
        holds: PageHolds,
        outlet: PageOutlet,
    ) -> None:
        self._config = config
        self._info = info
        self._allocator = allocator
        self._cache = cache
        self._holds = holds
        holds.release_by(cache.release)
        self._outlet = outlet
        self._waiting: list[Sequence] = []
        self._active: list[Sequence] = []
        self._ending: dict[Sequence, tuple[SeqState, FinishReason | None]] = {}
        self._stalled: Sequence | None = None  # was refused pages that transfers will give back
        self.num_retracted = 0

    @property
    def waiting(self) -> Seq[Sequence]:
        return self._waiting

    @property
    def active(self) -> Seq[Sequence]:
        return self._active

    # ---- coming in

    def submit(self, seq: Sequence) -> Refusal | None:
        """Queue ``seq``, or say why not."""
        num_pages = self._allocator.num_pages - 1
        if seq.num_context + 1 > self._info.max_model_len:
            return Refusal(
                ErrorCode.TOO_LONG,
                f"{seq.num_context} tokens leave no room for output: the model takes "
                f"{self._info.max_model_len}",
            )
        if seq.num_pages_max > num_pages:
            return Refusal(
                ErrorCode.TOO_LONG,
                f"{seq.num_tokens_max} tokens need {seq.num_pages_max} pages, the pool has "
                f"{num_pages}: lower max_tokens or raise num_pages",
            )
        if len(self._waiting) >= self._config.max_waiting:
            text = f"{len(self._waiting)} requests are waiting already"
            return Refusal(ErrorCode.OVERLOADED, text)
        bisect.insort(self._waiting, seq, key=lambda s: s.order)
        return None

    def admit(self) -> list[Admitted]:
        """Give pages to as many waiting sequences as fit; they are PULLING now."""
        admitted: list[Admitted] = []
        if self._stalled is not None and self._stalled in self._active:
            return admitted  # it comes first
        while self._waiting and len(self._active) < self._config.max_running:
            plan = self._try_admit(self._waiting[0])
            if plan is None:
                break
            seq = self._waiting.pop(0)
            bisect.insort(self._active, seq, key=lambda s: s.order)
            admitted.append(Admitted(seq, plan))
        return admitted

    def _try_admit(self, seq: Sequence) -> PullPlan | None:
        cached = self._cache.match(seq.wanted_keys)
        num_fresh = seq.num_pages_at(seq.num_tokens + 1) - len(cached)
        grown = seq.num_pages_at(seq.num_tokens + 1 + self._config.head_room_tokens)
        needed = grown - len(cached) if self._active else num_fresh
        self._evict_for(needed)
        if self._allocator.num_free < needed:
            self._cache.release(cached)
            return None
        fresh = self._allocator.allocate(num_fresh)
        assert fresh is not None
        return seq.admit(cached, fresh)

    def _evict_for(self, num_free: int) -> None:
        short = num_free - self._allocator.num_free
        if short > 0:
            self._cache.evict(short)

    # ---- pages that arrive

    def page_pulled(self, seq: Sequence, index: int) -> None:
        """The page at the frontier of ``seq`` was read and verified."""
        seq.page_arrived(index, local=False)
        self._offer(seq)

    def share_next(self, seq: Sequence) -> int | None:
        """Replace the page at the frontier by a cached one; return its index, None if not there."""
        key, index = seq.next_key(), seq.num_full_pages
        if key is None or key not in self._cache or not self._rooted(seq, index):
            return None
        own = seq.share(index, self._cache.match_one(key))
        self._cache.release([own])
        return index

    def _offer(self, seq: Sequence) -> None:
        """Cache the new full pages of ``seq``; where one is cached already, use that one.

        So a sequence that holds a cached page holds all its ancestors in the cache too, and what
        nobody holds can always be evicted.
        """
        while seq.num_offered < seq.num_full_pages and self._rooted(seq, seq.num_offered):
            index = seq.num_offered
            key, parent = seq.chain.keys[index], seq.chain.parent_key(index)
            own, size = seq.page_ids[index], seq.info.spec.page_size
            if key in self._cache:
                seq.page_ids[index] = self._cache.match_one(key)
                self._cache.release([own])
            else:
                tokens = seq.tokens[index * size : (index + 1) * size]
                packed = tokens.astype("<i4", copy=False).tobytes()
                self._cache.insert(key, parent, own, packed, seq.chain.namespace)
            seq.num_offered += 1

    def _rooted(self, seq: Sequence, index: int) -> bool:
        """True when the page before ``index`` is the cached one (it is not after a clear)."""
        parent = seq.chain.parent_key(index)
        return parent is None or self._cache.page_of(parent) == seq.page_ids[index - 1]

    # ---- steps

    def plan(self) -> list[Planned]:
        """Choose the next step; may retract. Empty when there is nothing to compute now."""
        self._stalled = None
        planned: list[Planned] = []
        claimed: set[PageKey] = set()
        num_running = sum(s.state is SeqState.RUNNING for s in self._active)
        budget = max(self._config.step_tokens - num_running, self._info.spec.page_size)
        for seq in list(self._active):
            if seq.state is SeqState.RECOMPUTING:
                self._share_computed(seq)
            if seq.state is SeqState.RUNNING:
                step = self._plan_one(seq, 1)
            elif seq.state is SeqState.RECOMPUTING and self._claim(seq, claimed) and budget > 0:
                step = self._plan_one(seq, budget)
                budget -= len(step.tokens) if step is not None else 0
            else:
                continue
            if step is not None:
                planned.append(Planned(seq, step))
        for seq, _ in planned:
            seq.in_step = True
        return planned

    def _share_computed(self, seq: Sequence) -> None:
        """Take pages that an earlier sequence computed meanwhile."""
        shared = False
        while self.share_next(seq) is not None:
            shared = True
        if shared:
            seq.settle()

    def _claim(self, seq: Sequence, claimed: set[PageKey]) -> bool:
        """Reserve the pages ``seq`` is about to compute; False when an earlier one does it."""
        keys = seq.chain.keys[seq.num_full_pages :]
        if keys and keys[0] in claimed:
            return False
        claimed.update(keys)
        return True

    def _plan_one(self, seq: Sequence, num_tokens_max: int) -> SeqStep | None:
        step = seq.next_step(num_tokens_max)
        return step if self._make_room(seq, step.start + len(step.tokens)) else None

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the page table of ``seq``; False when it must wait or was retracted itself."""
        missing = self._info.spec.num_pages_for(num_tokens) - len(seq.page_ids)
        while missing > 0:
            self._evict_for(missing)
            fresh = self._allocator.allocate(missing)
            if fresh is not None:
                seq.page_ids.extend(fresh)
                break
            alone = len(self._active) == 1
            if alone or self._holds.num_ending(self._cache.holds) >= missing:
                assert self._holds.num_held, "a sequence that fits alone waits for nothing"
                self._stalled = seq
                return False
            victim = self._active[-1]
            self._retract(victim)
            if victim is seq:
                return False
        return True

    def _retract(self, seq: Sequence) -> None:
        """The pages go to the store (and stay cached while there is room); the sequence waits."""
        self._outlet.stop_pull(seq)
        running = seq.state is SeqState.RUNNING
        self._outlet.write_back(seq, seq.take_unwritten(tail=running), final=False)
        self._cache.release(seq.retract())
        self._active.remove(seq)
        bisect.insort(self._waiting, seq, key=lambda s: s.order)
        self.num_retracted += 1

    def complete(self, planned: Seq[Planned], outputs: Seq[TokenOut | None]) -> StepResult:
        """Take in the outcome of a step."""
        result = StepResult([], [], [])
        for (seq, step), output in zip(planned, outputs, strict=True):
            seq.in_step = False
            if seq.step_done(step):
                result.prompts.append(seq)
            self._offer(seq)
            reason: FinishReason | None = None
            if output is not None:
                taken = seq.take_output(output)
                result.outputs.append((seq, taken))
                reason = taken.stop
            if reason is not None:
                self._ending.pop(seq, None)
                self._end(seq, SeqState.FINISHED, reason)
                result.ended.append(seq)
            elif seq in self._ending:
                self._end(seq, *self._ending.pop(seq))
                result.ended.append(seq)
            else:
                seq.settle()
                if seq.num_full_pages > seq.num_written:
                    self._outlet.write_back(seq, seq.take_unwritten(tail=False), final=False)
        return result

    def fail(self, planned: Seq[Planned]) -> list[Sequence]:
        """The step broke: its sequences are over, nothing of theirs is stored any more."""
        failed = []
        for seq, _ in planned:
            seq.in_step = False
            self._ending.pop(seq, None)
            self._end(seq, SeqState.ABORTED, None, keep=False)
            failed.append(seq)
        return failed

    # ---- going out

    def stop(self, seq: Sequence, state: SeqState, reason: FinishReason | None = None) -> bool:
        """End ``seq`` in any state, idempotently. What it has is stored: all of it when FINISHED,
        the full pages when ABORTED (then nobody waits for the put).

        Returns False when it ended before, or when a step is running it: then ``complete`` ends it
        (with its own reason, if that step finishes it) and reports it.
        """
        if seq.state in ENDED:
            return False
        if seq.in_step:
            self._ending[seq] = (state, reason)
            return False
        self._end(seq, state, reason)
        return True

    def _end(
        self, seq: Sequence, state: SeqState, reason: FinishReason | None, *, keep: bool = True
    ) -> None:
        self._outlet.stop_pull(seq)
        queue = self._waiting if seq.state is SeqState.WAITING else self._active
        queue.remove(seq)
        if state is SeqState.FINISHED:
            settled = seq.state not in (SeqState.WAITING, SeqState.PULLING)
            self._outlet.write_back(seq, seq.take_unwritten(tail=settled), final=True)
        elif keep and seq.num_full_pages > seq.num_written:
            self._outlet.write_back(seq, seq.take_unwritten(tail=False), final=False)
        self._cache.release(seq.end(state, reason))

    def clear_cache(self, namespace: Namespace | None = None) -> int:
        """Forget all cached pages, or those of one namespace; sequences keep theirs.

        Returns how many were forgotten.
        """
        return self._cache.clear() if namespace is None else self._cache.clear_namespace(namespace)

    def check(self) -> None:
        """Assert conservation: every reference to every page has its known holder; O(pages)."""
        self._allocator.check()
        self._cache.check()
        held: Counter[PageId] = Counter()
        for seq in self._active:
            assert len(set(seq.page_ids)) == len(seq.page_ids), seq.request_id
            assert seq.num_kv <= seq.num_tokens, seq.request_id
            assert seq.num_kv <= len(seq.page_ids) * seq.page_size, seq.request_id
            held.update(seq.page_ids)
        assert all(not seq.page_ids for seq in self._waiting)
        assert all(seq.in_step for seq in self._ending)
        for page in range(1, self._allocator.num_pages):
            page_id = PageId(page)
            known = held[page_id] + self._holds.count(page_id) + self._cache.holds(page_id)
            assert self._allocator.refs(page_id) == known, (page_id, known)
