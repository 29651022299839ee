"""One request on a decode node: its tokens, its pages, and which positions have KV.

Owns the state of a sequence and the rules for output tokens. Sans-I/O. Knows no other sequence, no
store and no pool: pages come and go by id, the owner of the allocator gives and takes them.

::

    WAITING ──admit──▶ PULLING ──pages there──────────────────────────▶ READY ──first token──┐
      ▲  no pages        │     ╲                                          ▲                  │
      │                  │      some are not (ever) coming                │ computed,        │
      │                  │       ╲                                        │ no first token   │
      │                  │        ▶ RECOMPUTING ──────────────────────────┤                  │
      │                  │            │                                   │ computed,        │
      │                  │            │                                   ▼ first token      │
      ├────retract───────┴────────────┴─────────────────────────────── RUNNING ◀─────────────┘
      │                                                                   │
      └── from every state: finish ──▶ FINISHED,  abort ──▶ ABORTED ◀─────┘

Tokens: ``prompt + emitted`` (the *context*), then what this leg adds: the first token (given by the
prefill leg, or sampled here) and the generated ones. ``num_kv`` leading positions have KV; a
RUNNING sequence lacks KV for its last token only (or lacks nothing but the logits of it).

Invariants: ``num_kv <= num_tokens``; the page table covers ``num_kv``; a page table is not changed
while a step runs (``in_step``); pages below ``num_kv`` are never written again, except that a
token whose KV exists is run for its logits with ``write_kv=False``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from decode_node.key_chain import KeyChain, TokenIds
from decode_node.leg_news import LegNews
from decode_node.pull_plan import PullPlan
from engine.request import DecodeRequest, FinishReason, RequestId, TokenOut
from engine.sampling import finish_reason
from engine.step import ModelInfo, SampleInput, SeqStep
from kvstore.page import PageId, PageKey
from kvstore.store import PageIdentity


class SeqState(StrEnum):
    WAITING = "waiting"
    PULLING = "pulling"
    RECOMPUTING = "recomputing"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


ENDED = (SeqState.FINISHED, SeqState.ABORTED)


@dataclass(slots=True)
class SeqStats:
    """Exact accounting, in the terms of ``Finished``."""

    computed_tokens: int = 0
    computed_emitted_tokens: int = 0
    cached_local_tokens: int = 0
    cached_store_tokens: int = 0
    pages_pulled: int = 0
    bytes_pulled: int = 0
    pages_pushed: int = 0
    bytes_pushed: int = 0
    recomputed_pages: int = 0
    num_preemptions: int = 0
    pull_s: float = 0.0


class Sequence:
    """See the module.

    Args:
        message: the decode request; its tokens were validated.
        info: facts of the model.
        keys: the chain of the context's full pages.
        arrival: number of the request on this node.
    """

    def __init__(
        self, message: DecodeRequest, info: ModelInfo, keys: KeyChain, arrival: int
    ) -> None:
        request = message.request
        self.request_id: RequestId = request.request_id
        self.params = request.sampling
        self.order = (request.priority, arrival)
        self.info = info
        self.num_prompt = request.num_prompt_tokens
        self.num_emitted = request.num_emitted_tokens
        self.num_context = self.num_prompt + self.num_emitted
        self.num_tokens = self.num_context
        self.num_tokens_max = min(
            max(self.num_prompt + self.params.max_tokens, self.num_context + 1), info.max_model_len
        )
        context = np.frombuffer(request.prompt + request.emitted, dtype="<i4")
        self._tokens: TokenIds = np.empty(self.num_tokens_max, dtype=np.int32)
        self._tokens[: self.num_context] = context
        self.chain = keys
        self.news = LegNews(expected=message.expect_prefill)
        self.state = SeqState.WAITING
        self.page_ids: list[PageId] = []
        self.num_kv = 0
        self.num_written = 0  # leading full pages that are in the store, or on their way
        self.tail_written = 0  # num_kv at which the tail page was known to be in the store
        self.num_offered = 0  # leading full pages that were offered to the page cache
        self.in_step = False
        self.reason: FinishReason | None = None
        self.stats = SeqStats()
        self._counting = True  # until the context was complete for the first time
        self._computed: bytearray | None = None  # while counting: 1 for positions computed here
        # A leg that goes on where another node stopped finds KV for all tokens but the last there.
        continues = self.num_emitted > 0 and not message.expect_prefill
        self._pull_target = self.num_context - 1 if continues else self.num_context

    # ---- tokens

    @property
    def tokens(self) -> TokenIds:
        """All tokens so far; a view that later tokens do not change."""
        return self._tokens[: self.num_tokens]

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, the emitted ones included: the index of the next."""
        return self.num_tokens - self.num_prompt

    @property
    def may_sample(self) -> bool:
        """True when the next output token is this node's to make."""
        return self.num_tokens > self.num_context or self.news.may_sample_first

    def accepts_first(self, token: TokenOut) -> bool:
        """True when ``token`` can be the first token of this leg."""
        return token.index == self.num_emitted and 0 <= token.token < self.info.vocab_size

    def take_first_token(self) -> FinishReason | None:
        """Append the first token once it is known; return why it ends the request, or None."""
        first = self.news.first_token
        if first is None or self.num_tokens > self.num_context or self.state in ENDED:
            return None
        stop = first.stop or self._stop_of(first)
        self._append(first.token)
        if self.state in (SeqState.READY, SeqState.RECOMPUTING):
            self.settle()
        return stop

    def take_output(self, output: TokenOut) -> TokenOut:
        """Append a sampled token; return it with the reason for which it ends the request."""
        assert output.index == self.num_outputs, (output.index, self.num_outputs)
        if output.stop is None and self.num_tokens + 1 >= self.num_tokens_max:
            output = msgspec.structs.replace(output, stop=FinishReason.LENGTH)
        self._append(output.token)
        return output

    def _append(self, token: int) -> None:
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.chain.extend(self.tokens)

    def _stop_of(self, token: TokenOut) -> FinishReason | None:
        eos: Collection[int] = self.info.eos_token_ids
        stop = finish_reason(self.params, token.index, token.token, eos)
        full = self.num_tokens + 1 >= self.num_tokens_max
        return stop or (FinishReason.LENGTH if full else None)

    # ---- pages

    @property
    def page_size(self) -> int:
        return self.info.spec.page_size

    @property
    def num_full_pages(self) -> int:
        """Leading pages of which every position has KV."""
        return self.num_kv // self.page_size

    def num_pages_at(self, num_tokens: int) -> int:
        """Pages of the sequence at ``num_tokens`` tokens; the very last token needs no KV."""
        return self.info.spec.num_pages_for(min(num_tokens, self.num_tokens_max - 1))

    @property
    def num_pages_max(self) -> int:
        return self.num_pages_at(self.num_tokens_max)

    @property
    def wanted_keys(self) -> list[PageKey]:
        """Keys of the full pages that KV is wanted for before this sequence runs."""
        return list(self.chain.keys[: self._pull_target // self.page_size])

    def admit(self, cached: list[PageId], fresh: list[PageId]) -> PullPlan:
        """WAITING → PULLING with shared and fresh pages; return what is to be pulled."""
        assert self.state is SeqState.WAITING
        self.state = SeqState.PULLING
        self.page_ids = cached + fresh
        self.num_kv = len(cached) * self.page_size
        self.num_written = self.num_offered = len(cached)
        if self._counting:  # again, after a retraction: what was computed here stays computed
            self.stats.cached_store_tokens = 0
            self.stats.cached_local_tokens = self._num_found(0, self.num_kv)
        num_pages = self.info.spec.num_pages_for(self._pull_target)
        wanted = [
            self.chain.identity(self._tokens, i, self._pull_target)
            for i in range(len(cached), num_pages)
        ]
        return PullPlan(len(cached), wanted)

    def page_arrived(self, index: int, *, local: bool) -> None:
        """The page at the frontier is there: pulled, or shared with another sequence."""
        assert index * self.page_size == self.num_kv, (index, self.num_kv)
        gained = min((index + 1) * self.page_size, self._pull_target) - self.num_kv
        assert gained > 0, (index, self.num_kv, self._pull_target)
        found = self._num_found(self.num_kv, self.num_kv + gained) if self._counting else 0
        self.num_kv += gained
        self.num_written = self.num_full_pages
        if local:
            self.num_offered = self.num_full_pages
        if self.num_kv == self._pull_target:
            self.tail_written = self.num_kv
        if local:
            self.stats.cached_local_tokens += found
        else:
            self.stats.cached_store_tokens += found

    def share(self, index: int, page_id: PageId) -> PageId:
        """Use ``page_id`` (held for this sequence by the caller) as the page at the frontier.

        Returns the page that was there; the caller releases it. Not while a step runs.
        """
        assert not self.in_step
        own, self.page_ids[index] = self.page_ids[index], page_id
        self.page_arrived(index, local=True)
        return own

    def next_key(self) -> PageKey | None:
        """Key of the page at the frontier, when it is a full page of known tokens."""
        if self.num_kv % self.page_size or self.num_kv >= self._pull_target:
            return None
        index = self.num_full_pages
        whole = (index + 1) * self.page_size <= self._pull_target
        return self.chain.keys[index] if whole else None

    def settle(self) -> None:
        """Choose the state by what is missing: KV, the first token, or nothing."""
        assert self.state not in (*ENDED, SeqState.WAITING), self.state
        missing = self.num_tokens - self.num_kv
        if missing == 0:
            self.state = SeqState.RUNNING if self.may_sample else SeqState.READY
        elif missing == 1 and self.may_sample:
            self.state = SeqState.RUNNING
        else:
            self.state = SeqState.RECOMPUTING
        self._complete_prompt()

    # ---- steps

    def next_step(self, num_tokens_max: int) -> SeqStep:
        """The next chunk or token, at most ``num_tokens_max`` tokens."""
        assert self.state in (SeqState.RECOMPUTING, SeqState.RUNNING), self.state
        write_kv = self.num_kv < self.num_tokens
        start = self.num_kv if write_kv else self.num_tokens - 1
        end = min(self.num_tokens, start + num_tokens_max)
        last = end == self.num_tokens and self.may_sample
        output = self._tokens[self.num_prompt : self.num_tokens]
        sample = SampleInput(self.params, self._tokens[: self.num_prompt], output)
        return SeqStep(
            tokens=self._tokens[start:end],
            start=start,
            page_ids=self.page_ids,
            write_kv=write_kv,
            sample=sample if last else None,
        )

    def step_done(self, step: SeqStep) -> bool:
        """The KV of ``step`` is written; True when that completed the context's."""
        if not step.write_kv:
            return False
        before, self.num_kv = self.num_kv, step.start + len(step.tokens)
        if not self._counting:
            return False
        end = min(self.num_kv, self.num_context)
        if end > before:
            self._count_computed(before, end)
        return self._complete_prompt()

    # ---- accounting of the context

    @property
    def prompt_complete(self) -> bool:
        """True once the whole context has had KV: its accounting is final."""
        return not self._counting

    def _complete_prompt(self) -> bool:
        """Close the accounting when the context has KV; True if that happened now."""
        if not self._counting or self.num_kv < self.num_context:
            return False
        self._counting, self._computed = False, None
        return True

    def _count_computed(self, start: int, end: int) -> None:
        """Positions that are computed again after a retraction count once."""
        if self._computed is None:
            self._computed = bytearray(self.num_context)
        self.stats.computed_tokens += self._computed.count(0, start, end)
        if end > self.num_prompt:
            emitted = self._computed.count(0, max(start, self.num_prompt), end)
            self.stats.computed_emitted_tokens += emitted
        self._computed[start:end] = b"\x01" * (end - start)
        first = -(-start // self.page_size)  # a page counts in the chunk that begins it
        self.stats.recomputed_pages += max(self.info.spec.num_pages_for(end) - first, 0)

    def _num_found(self, start: int, end: int) -> int:
        """How many positions of the context in ``[start, end)`` were not computed here."""
        end = min(end, self.num_context)
        return end - start if self._computed is None else self._computed.count(0, start, end)

    # ---- write-back

    def take_unwritten(self, *, tail: bool) -> list[tuple[PageIdentity, PageId]]:
        """Pages with KV that are not in the store yet; they count as written from now on.

        Args:
            tail: include the page that is not full; the sequence must not write it any more.
        """
        first, full = self.num_written, self.num_full_pages
        end = full
        if tail and self.num_kv % self.page_size and self.tail_written != self.num_kv:
            self.tail_written = self.num_kv
            end += 1
        self.num_written = max(first, full)
        return [
            (self.chain.identity(self._tokens, i, self.num_kv), self.page_ids[i])
            for i in range(first, end)
        ]

    # ---- ends

    def retract(self) -> list[PageId]:
        """Give up all pages and wait again; return them."""
        assert self.state not in (*ENDED, SeqState.WAITING), self.state
        assert not self.in_step
        self._pull_target = max(self._pull_target, self.num_kv)
        self.state = SeqState.WAITING
        self.stats.num_preemptions += 1
        return self._let_go()

    def end(self, state: SeqState, reason: FinishReason | None) -> list[PageId]:
        """Enter FINISHED or ABORTED; return the pages. Not while a step runs."""
        assert state in ENDED, state
        assert self.state not in ENDED, self.state
        assert not self.in_step
        self.state, self.reason = state, reason
        return self._let_go()

    def _let_go(self) -> list[PageId]:
        pages, self.page_ids = self.page_ids, []
        self.num_kv = self.num_written = self.tail_written = self.num_offered = 0
        return pages
