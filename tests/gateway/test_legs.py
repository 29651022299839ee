"""Claims about the state machine of one generation, and a fuzz over all interleavings.

The fuzz plays both legs, truthfully but with any timing, loss, repetition and retry. Whatever
happens: the client gets the reference sequence, each token once, in order, and the end.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from engine.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillDone,
    PrefillEvent,
    PromptReady,
    TokenOut,
    TokensOut,
)
from gateway.legs import (
    Action,
    AwaitFacts,
    Emit,
    Finish,
    GiveUp,
    LegState,
    RequestCore,
    StartDecode,
    StartPrefill,
    TellDecode,
)
from gateway.trace import GenerationTrace
from tests.gateway.fake_node import output_at, request_of, unpacked

REFERENCE = [1000 + at for at in range(40)]


def first_token(core_request: Any) -> FirstToken:
    return FirstToken(
        output=output_at(core_request, REFERENCE, 0),
        computed_tokens=3,
        cached_local_tokens=0,
        cached_store_tokens=0,
        pages_pulled=0,
        bytes_pulled=0,
        queue_s=0.0,
        prefill_s=0.0,
    )


def done(published: bool = True) -> PrefillDone:
    return PrefillDone(published=published, pages_pushed=1, bytes_pushed=1, push_s=0.0)


def ready(computed: int = 0, local: int = 0, store: int = 3, emitted: int = 0) -> PromptReady:
    return PromptReady(
        computed_tokens=computed,
        computed_emitted_tokens=emitted,
        cached_local_tokens=local,
        cached_store_tokens=store,
        pages_pulled=1,
        bytes_pulled=10,
        recomputed_pages=0,
        pull_s=0.5,
    )


def finished(reason: FinishReason) -> Finished:
    return Finished(
        reason=reason,
        computed_tokens=0,
        computed_emitted_tokens=0,
        cached_local_tokens=0,
        cached_store_tokens=3,
        pages_pulled=0,
        bytes_pulled=0,
        pages_pushed=0,
        bytes_pushed=0,
        recomputed_pages=0,
        num_preemptions=0,
        pull_s=0.0,
    )


def core_of(
    max_tokens: int = 6, *, wanted: bool = False, decode_attempts: int = 10_000, **sampling: Any
) -> RequestCore:
    return RequestCore(
        request_of([1, 2, 3], max_tokens, **sampling),
        GenerationTrace(wanted=wanted),
        prefill_attempts_max=3,
        decode_attempts_max=decode_attempts,
    )


def tokens(*indices: int, max_tokens: int = 6) -> TokensOut:
    request = request_of([1, 2, 3], max_tokens)
    return TokensOut(outputs=tuple(output_at(request, REFERENCE, index) for index in indices))


def emitted(actions: list[Action]) -> list[int]:
    return [action.output.index for action in actions if isinstance(action, Emit)]


REQUEST = request_of([1, 2, 3], 6)


def test_begin_starts_both_legs_or_only_those_that_are_needed() -> None:
    assert core_of().begin(with_prefill=True) == [StartPrefill(1), StartDecode(1)]
    assert core_of(1).begin(with_prefill=True) == [StartPrefill(1)]
    assert core_of().begin(with_prefill=False) == [StartDecode(1)]
    assert core_of(1).begin(with_prefill=False) == [StartDecode(1)]


def test_index_zero_of_decode_is_refused_while_prefill_computes() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    assert core.on_decode(1, tokens(0)) == [StartDecode(2)]


def test_a_gap_in_the_indices_is_a_lost_leg() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    actions = core.on_decode(1, tokens(1, 2, 4))
    assert emitted(actions) == [1, 2]
    assert actions[-1] == StartDecode(2)


def test_repeated_tokens_are_emitted_once() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    assert emitted(core.on_prefill(1, first_token(REQUEST))) == [0]
    assert emitted(core.on_prefill(1, first_token(REQUEST))) == []
    assert emitted(core.on_decode(1, tokens(0, 1, 1, 2))) == [1, 2]


def test_events_of_an_old_leg_change_nothing() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill_lost(1)
    core.on_decode_lost(1)
    assert core.on_prefill(1, first_token(REQUEST)) == []
    assert core.on_decode(1, tokens(0)) == []
    assert core.on_prefill_lost(1) == []
    assert core.on_decode_lost(1) == []


def test_tokens_and_the_end_of_an_old_decode_leg_are_not_taken_for_the_new_ones() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    assert core.on_decode_lost(1) == [StartDecode(2)]
    assert core.on_decode(1, tokens(1, 2)) == []
    assert core.on_decode(1, finished(FinishReason.STOP)) == []
    assert emitted(core.on_decode(2, tokens(1))) == [1]


def test_prefill_is_ignored_once_decode_was_told_it_failed() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    assert core.prefill_unavailable(1) == [TellDecode()]
    news = core.news()
    assert news is not None
    assert news.failed
    assert core.on_prefill(1, first_token(REQUEST)) == []
    core.on_decode(1, ready())
    assert emitted(core.on_decode(1, tokens(0, 1))) == [0, 1]


def test_prefill_retries_are_bounded() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    assert core.on_prefill_lost(1) == [StartPrefill(2)]
    assert core.on_prefill_lost(2) == [StartPrefill(3)]
    assert core.on_prefill_lost(3) == [TellDecode()]


def test_decode_legs_without_a_token_are_bounded_and_tokens_reset_the_count() -> None:
    core = core_of(decode_attempts=2)
    core.begin(with_prefill=False)
    assert core.on_decode_lost(1) == [StartDecode(2)]
    core.on_decode(2, ready())
    core.on_decode(2, tokens(0))
    assert core.on_decode_lost(2) == [StartDecode(3)]
    (give_up,) = core.on_decode_lost(3)
    assert isinstance(give_up, GiveUp)
    assert core.on_prefill_lost(0) == []


def test_a_busy_node_is_no_fault() -> None:
    core = core_of(decode_attempts=1)
    core.begin(with_prefill=False)
    assert core.on_decode_lost(1, fault=False) == [StartDecode(2)]


def test_abort_moves_the_request_with_its_tokens() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_prefill(1, done())
    core.on_decode(1, tokens(1, 2))
    assert core.on_decode(1, finished(FinishReason.ABORT)) == [StartDecode(2)]
    again = core.decode_request()
    assert not again.expect_prefill
    assert unpacked(again.request.emitted) == REFERENCE[:3]


def test_decode_lost_after_the_last_token_is_no_failure() -> None:
    core = core_of(wanted=True)
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_prefill(1, done())
    assert core.on_decode(1, tokens(1, 2, 3, 4, 5))[-1] == AwaitFacts()
    assert core.on_decode_lost(1) == [Finish(FinishReason.LENGTH)]


def test_a_wanted_trace_waits_for_both_legs_but_not_for_ever() -> None:
    core = core_of(wanted=True)
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_decode(1, tokens(1, 2, 3, 4, 5))
    assert core.on_decode(1, finished(FinishReason.LENGTH)) == []
    assert core.grace_over() == [Finish(FinishReason.LENGTH)]
    assert core.grace_over() == []
    assert core.on_prefill(1, done()) == []


def trace_of(core: RequestCore) -> GenerationTrace:
    return core._trace


def cached_of(core: RequestCore) -> tuple[int | None, int | None]:
    return trace_of(core).cached_local, trace_of(core).cached_store


def test_the_leg_that_makes_index_zero_says_what_was_cached_and_later_legs_do_not() -> None:
    core = core_of()
    core.begin(with_prefill=False)
    core.on_decode(1, ready(computed=2, local=1, store=0))
    assert cached_of(core) == (None, None), "it has made no token yet"
    core.on_decode_lost(1)
    core.on_decode(2, ready(computed=1, local=0, store=2))
    core.on_decode(2, tokens(0, 1))
    assert cached_of(core) == (0, 2)
    core.on_decode_lost(2)
    core.on_decode(3, ready(computed=1, local=4, store=0, emitted=1))
    core.on_decode(3, tokens(2, 3, 4, 5))
    assert cached_of(core) == (0, 2)
    assert core._trace.cached_tokens(3) == 2
    assert trace_of(core).computed_tokens == 2 + 1, "the prompt, in all legs"
    assert trace_of(core).recomputed_tokens == 1


def test_what_decode_computed_again_adds_to_what_prefill_computed() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_decode(1, ready(computed=2, store=1))
    assert cached_of(core) == (0, 0)
    assert trace_of(core).computed_tokens == 3 + 2
    assert trace_of(core).recomputed_tokens == 2


def test_the_end_of_a_leg_repeats_its_accounting_and_counts_once() -> None:
    core = core_of(wanted=True)
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_decode(1, ready(store=3))
    core.on_decode(1, tokens(1))
    end = dict.fromkeys(Finished.__struct_fields__, 0) | {"reason": FinishReason.ABORT}
    end |= {"cached_store_tokens": 3, "pages_pulled": 2, "bytes_pulled": 30, "pages_pushed": 4}
    core.on_decode(1, Finished(**end | {"pull_s": 0.75}))  # type: ignore[arg-type]
    trace = trace_of(core)
    assert (trace.pages_pulled, trace.bytes_pulled, trace.pull_s) == (2, 30, 0.75)
    assert trace.pages_pushed == 4, "also of a leg that was handed over"
    core.on_decode(2, ready())
    assert (trace.pages_pulled, trace.bytes_pulled) == (3, 40)


def test_a_first_token_of_decode_without_accounting_is_a_lost_leg() -> None:
    core = core_of()
    core.begin(with_prefill=False)
    assert core.on_decode(1, tokens(0)) == [StartDecode(2)]


def test_a_text_that_ends_needs_no_decode_and_lets_prefill_push() -> None:
    core = core_of()
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_decode(1, ready())
    core.on_decode(1, tokens(1))
    assert core.stop_text() == [Finish(FinishReason.STOP)]
    assert core.decode is LegState.OVER
    assert core.prefill is LegState.PUSHING
    assert core.stop_text() == []


def test_a_text_that_ends_waits_for_the_facts_of_prefill_when_they_are_wanted() -> None:
    core = core_of(wanted=True)
    core.begin(with_prefill=True)
    core.on_prefill(1, first_token(REQUEST))
    core.on_decode(1, ready())
    core.on_decode(1, tokens(1))
    assert core.stop_text() == [AwaitFacts()]
    assert core.on_decode(1, tokens(2)) == [], "decode is over"
    assert core.on_prefill(1, done()) == [Finish(FinishReason.STOP)]


def test_stop_of_the_last_token_wins_over_length() -> None:
    core = core_of(6)
    core.begin(with_prefill=True)
    last = TokenOut(index=0, token=5, stop=FinishReason.STOP)
    event = first_token(REQUEST)
    actions = core.on_prefill(1, FirstToken(**{**_fields(event), "output": last}))
    assert actions[-1] == Finish(FinishReason.STOP)


def _fields(event: FirstToken) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


# ── fuzz ─────────────────────────────────────────────────────────────────────────────────────────


class World:
    """Plays every leg the core starts; knows what a truthful node would say."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.max_tokens = self.rng.choice([1, 2, 3, 8])
        stop = REFERENCE[self.rng.randrange(10)] if self.rng.random() < 0.4 else None
        sampling: dict[str, Any] = {} if stop is None else {"stop_token_ids": (stop,)}
        self.request = request_of([1, 2, 3], self.max_tokens, **sampling)
        self.core = RequestCore(
            self.request,
            GenerationTrace(wanted=self.rng.random() < 0.5),
            prefill_attempts_max=2,
            decode_attempts_max=10_000,
        )
        self.loss = self.rng.choice([0.0, 0.05, 0.3])
        self.got: list[int] = []
        self.reason: FinishReason | None = None
        self.prefill: dict[int, deque[PrefillEvent]] = {}
        self.decode: dict[int, int] = {}  # leg -> next index, once it may go on
        self.waiting: dict[int, DecodeRequest] = {}
        self.over: set[int] = set()
        self.reported: set[int] = set()
        self.failed_told = False
        self.cached: int | None = None

    def expected(self) -> list[int]:
        found = []
        for index in range(self.max_tokens):
            output = output_at(self.request, REFERENCE, index)
            found.append(output.token)
            if output.stop is not None:
                break
        return found

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.reason is None, f"{action} after the end"
            match action:
                case StartPrefill(leg):
                    events: list[PrefillEvent] = [first_token(self.request), done()]
                    self.prefill[leg] = deque(events)
                case StartDecode(leg):
                    self.waiting[leg] = self.core.decode_request()
                case Emit(output):
                    assert output.index == len(self.got), "tokens in order, each once"
                    self.got.append(output.token)
                case Finish(reason):
                    self.reason = reason
                case GiveUp(message):
                    raise AssertionError(message)
                case TellDecode() | AwaitFacts():
                    pass

    def step(self) -> None:
        options = ["news", "lose_prefill", "lose_decode", "prefill", "decode", "old", "grace"]
        match self.rng.choice(options):
            case "prefill":
                self._prefill_event()
            case "lose_prefill" if self.rng.random() < self.loss:
                self.perform(self.core.on_prefill_lost(self.core.prefill_leg))
            case "lose_decode" if self.rng.random() < self.loss:
                self.perform(self.core.on_decode_lost(self.core.decode_leg))
            case "news":
                self._tell()
            case "decode":
                self._decode_event(self.core.decode_leg)
            case "old":
                self._decode_event(max(1, self.core.decode_leg - 1))
            case "grace":
                self.perform(self.core.grace_over())

    def _prefill_event(self) -> None:
        leg = self.rng.randint(1, max(1, self.core.prefill_leg))
        events = self.prefill.get(leg)
        if events:
            event = events.popleft()
            self.perform(self.core.on_prefill(leg, event))
            if self.rng.random() < 0.2 and self.reason is None:
                self.perform(self.core.on_prefill(leg, event))

    def _tell(self) -> None:
        """The shell's rule: cumulative news, to legs that expect prefill."""
        leg, news = self.core.decode_leg, self.core.news()
        request = self.waiting.get(leg)
        if request is None or not request.expect_prefill or news is None:
            return
        assert not (news.failed and news.first_token), "contradictory news"
        assert not (news.first_token and self.failed_told), "failed was told before"
        if news.failed:
            self.failed_told = True
            self.decode.setdefault(leg, 0)
        elif news.first_token is not None:
            self.decode.setdefault(leg, 1)

    def _decode_event(self, leg: int) -> None:
        request = self.waiting.get(leg)
        if request is None or leg in self.over:
            return
        if not request.expect_prefill:
            self.decode.setdefault(leg, request.request.num_emitted_tokens)
        index = self.decode.get(leg)
        if index is None:
            return
        event: DecodeEvent
        if leg not in self.reported:
            self.reported.add(leg)
            event = ready(computed=leg, store=3 - min(leg, 3))
            if leg == self.core.decode_leg and not self.got and index == 0:
                self.cached = 3 - min(leg, 3)  # counts if this leg makes index 0
        elif index >= len(self.expected()):
            reason = output_at(self.request, REFERENCE, len(self.expected()) - 1).stop
            assert reason is not None
            event = finished(reason)
            self.over.add(leg)
        else:
            count = self.rng.randint(1, len(self.expected()) - index)
            outputs = [output_at(self.request, REFERENCE, index + i) for i in range(count)]
            event = TokensOut(outputs=tuple(outputs))
            self.decode[leg] = index + count
        self.perform(self.core.on_decode(leg, event))


def test_any_interleaving_gives_the_exact_tokens_once() -> None:
    for seed in range(2000):
        world = World(seed)
        world.perform(world.core.begin(with_prefill=world.rng.random() < 0.8))
        for _ in range(5000):
            if world.reason is not None:
                break
            world.step()
        assert world.reason is not None, f"seed {seed}: no end"
        assert world.got == world.expected(), f"seed {seed}"
        last = output_at(world.request, REFERENCE, len(world.got) - 1)
        assert world.reason is last.stop, f"seed {seed}"
        assert world.core._trace.cached_store == (world.cached or 0), f"seed {seed}"
