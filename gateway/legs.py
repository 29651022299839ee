"""One generation as a state machine: two legs, one gap-free stream of tokens.

Owns what is emitted, which leg may make which token, when a leg is tried again and what decode is
told about prefill. Sans-I/O: no clock, no nodes, no channels. The shell (``gateway/generation.py``)
performs the actions and feeds events back, each with the number of the leg it belongs to.

::

    prefill     NONE ──start──▶ COMPUTING ──FirstToken──▶ PUSHING ──PrefillDone──▶ OVER
                        ▲        │   │ lost, no                │ lost: published=False  ▲
                        └─retry──┘   │ attempts left           └────────────────────────┤
                                     └── decode is told failed=True ────────────────────┘

    decode      NONE ──start──▶ RUNNING ──Finished──▶ OVER
                        ▲          │ lost, or ABORT
                        └──────────┘ again elsewhere, with the tokens emitted so far

    generation  OPEN ──stop token, stop string or max_tokens──▶ ENDING ──facts or legs over──▶ DONE
                  └──Finished──────────────────────────────────────────────────────────▶

Invariants: tokens are emitted by index, each once, without gaps; index 0 comes from prefill unless
decode was told ``failed`` or began without expecting prefill, and then never from prefill; events
of an old leg change nothing; a decode leg accounts for the prompt before it makes index 0; news for
decode never says both ``first_token`` and ``failed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from engine.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    GenerateRequest,
    PrefillDone,
    PrefillEvent,
    PrefillUpdate,
    PromptReady,
    TokenOut,
)
from gateway.trace import GenerationTrace


class LegState(StrEnum):
    NONE = "none"
    COMPUTING = "computing"  # prefill only: no first token yet
    PUSHING = "pushing"  # prefill only: first token made, pages on their way
    RUNNING = "running"  # decode only
    OVER = "over"


class Phase(StrEnum):
    OPEN = "open"
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Open prefill leg ``leg`` on a node; answer ``prefill_unavailable`` when there is none."""

    leg: int


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Open decode leg ``leg`` with ``decode_request()``, taken when it is sent."""

    leg: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Give ``output`` to the client."""

    output: TokenOut


@dataclass(frozen=True, slots=True)
class TellDecode:
    """``news()`` changed: see that the present decode leg learns it."""


@dataclass(frozen=True, slots=True)
class AwaitFacts:
    """All tokens are out; call ``grace_over`` when the legs' reports take too long."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The generation is complete. Legs still open may go on pushing pages."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Every allowed attempt failed."""

    message: str


Action = StartPrefill | StartDecode | Emit | TellDecode | AwaitFacts | Finish | GiveUp


class RequestCore:
    """State of one generation."""

    def __init__(
        self,
        request: GenerateRequest,
        trace: GenerationTrace,
        *,
        prefill_attempts_max: int,
        decode_attempts_max: int,
    ) -> None:
        assert not request.emitted, "emitted is the gateway's own: a new request has none"
        assert request.sampling.max_tokens >= 1
        self._request = request
        self._trace = trace
        self._prefill_attempts_max = prefill_attempts_max
        self._decode_attempts_max = decode_attempts_max
        self._emitted: list[int] = []
        self._first: TokenOut | None = None  # made by prefill
        self._published: bool | None = None
        self._prefill_failed = False
        self._fruitless_decode_legs = 0
        self._reason: FinishReason | None = None
        self.prefill = LegState.NONE
        self.decode = LegState.NONE
        self.phase = Phase.OPEN
        self.prefill_leg = 0
        self.decode_leg = 0

    @property
    def num_emitted(self) -> int:
        return len(self._emitted)

    @property
    def expects_prefill(self) -> bool:
        """True while a decode leg that starts now must wait for prefill's first token."""
        if self.prefill is LegState.COMPUTING:
            return not self._emitted
        return self.prefill is LegState.PUSHING and len(self._emitted) == 1

    def begin(self, *, with_prefill: bool) -> list[Action]:
        """Start both legs; one token needs no decode, no prefill node means decode alone."""
        assert self.prefill is self.decode is LegState.NONE
        actions: list[Action] = []
        if with_prefill:
            actions += self._start_prefill()
        else:
            self.prefill = LegState.OVER
            self._prefill_failed = True
        if not with_prefill or self._request.sampling.max_tokens > 1:
            actions += self._start_decode()
        return actions

    def decode_request(self) -> DecodeRequest:
        """What the present decode leg is asked. Prefill's token travels as news while its pages
        are on their way, so that decode waits for them instead of computing them again."""
        expects = self.expects_prefill
        tokens = [] if expects else self._emitted
        emitted = np.asarray(tokens, dtype="<i4").tobytes()
        request = self._request
        if emitted:
            request = GenerateRequest(
                request_id=request.request_id,
                prompt=request.prompt,
                sampling=request.sampling,
                emitted=emitted,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
        return DecodeRequest(request=request, expect_prefill=expects)

    def news(self) -> PrefillUpdate | None:
        """All that is known of the prefill leg, for a decode leg that expects it; None: nothing."""
        if self._first is None and self._published is None and not self._prefill_failed:
            return None
        return PrefillUpdate(
            request_id=self._request.request_id,
            first_token=self._first,
            published=self._published,
            failed=self._prefill_failed,
        )

    def on_prefill(self, leg: int, event: PrefillEvent) -> list[Action]:
        if leg != self.prefill_leg or self.prefill is LegState.OVER:
            return []
        if isinstance(event, PrefillDone):
            return self._on_prefill_done(event)
        if self.prefill is not LegState.COMPUTING or event.output.index != 0:
            return []
        return self._on_first_token(event)

    def on_prefill_lost(self, leg: int) -> list[Action]:
        """The leg broke or was refused: another one is tried while attempts are left."""
        if leg != self.prefill_leg or self.prefill is LegState.OVER or self.phase is Phase.DONE:
            return []
        if self.prefill is LegState.PUSHING:
            self.prefill = LegState.OVER
            self._published = False
            return self._after_prefill()
        if self.prefill_leg < self._prefill_attempts_max:
            return self._start_prefill()
        return self.prefill_unavailable(leg)

    def prefill_unavailable(self, leg: int) -> list[Action]:
        """There is no node for this prefill leg: decode computes the prompt."""
        if leg != self.prefill_leg or self.prefill is not LegState.COMPUTING:
            return []
        if self.phase is Phase.DONE:
            return []
        self.prefill = LegState.OVER
        self._prefill_failed = True
        if self.decode is LegState.NONE:
            return self._start_decode()
        return [TellDecode()]

    def on_decode(self, leg: int, event: DecodeEvent) -> list[Action]:
        if leg != self.decode_leg or self.decode is not LegState.RUNNING:
            return []
        if isinstance(event, PromptReady):
            self._trace.add_prompt_ready(event)
            return []
        if isinstance(event, Finished):
            return self._on_finished(event)
        actions: list[Action] = []
        for output in event.outputs:
            if self.phase is not Phase.OPEN or output.index < len(self._emitted):
                continue  # the client has it already
            if output.index > len(self._emitted) or self._is_prefills(output.index):
                return actions + self.on_decode_lost(leg)
            if output.index == 0:
                if not self._trace.prompt_reported:
                    return self.on_decode_lost(leg)
                self._trace.first_token_by_decode()
            self._fruitless_decode_legs = 0
            actions += self._emit(output)
        return actions

    def on_decode_lost(self, leg: int, *, fault: bool = True) -> list[Action]:
        """The leg broke, was refused, cannot be told news, or does not follow the protocol.

        ``fault`` False: a busy node declined; the shell bounds how often that is tried.
        """
        if leg != self.decode_leg or self.decode is not LegState.RUNNING:
            return []
        self.decode = LegState.OVER
        if self.phase is not Phase.OPEN:
            return self._settle()
        self._fruitless_decode_legs += fault
        if self._fruitless_decode_legs >= self._decode_attempts_max:
            self.phase = Phase.DONE
            count = self._fruitless_decode_legs
            return [GiveUp(f"{count} decode legs in a row failed without giving a token")]
        return self._start_decode()

    def stop_text(self) -> list[Action]:
        """A stop string ended the text: decode is not needed any more, prefill may go on pushing.

        Only once a token was emitted; nothing happens when the generation is ending anyway.
        """
        if self.phase is not Phase.OPEN:
            return []
        assert self._emitted, "a text ends with a token"
        self._end_decode()
        return self._end(FinishReason.STOP)

    def grace_over(self) -> list[Action]:
        """The reports of the legs take too long: finish with what is known."""
        if self.phase is not Phase.ENDING:
            return []
        return self._finish()

    def _is_prefills(self, index: int) -> bool:
        return index == 0 and self.prefill is LegState.COMPUTING

    def _start_prefill(self) -> list[Action]:
        self.prefill_leg += 1
        self.prefill = LegState.COMPUTING
        return [StartPrefill(self.prefill_leg)]

    def _start_decode(self) -> list[Action]:
        self.decode_leg += 1
        self.decode = LegState.RUNNING
        self._trace.decode_leg_began()
        return [StartDecode(self.decode_leg)]

    def _on_first_token(self, event: FirstToken) -> list[Action]:
        self.prefill = LegState.PUSHING
        self._first = event.output
        self._trace.add_first_token(event)
        actions = self._emit(event.output)
        if self.phase is Phase.OPEN:
            actions.append(TellDecode())
        return actions

    def _on_prefill_done(self, event: PrefillDone) -> list[Action]:
        if self.prefill is LegState.COMPUTING:  # done without a token: a broken leg
            return self.on_prefill_lost(self.prefill_leg)
        self.prefill = LegState.OVER
        self._published = event.published
        self._trace.add_prefill_done(event)
        return self._after_prefill()

    def _after_prefill(self) -> list[Action]:
        return [TellDecode()] if self.phase is Phase.OPEN else self._settle()

    def _on_finished(self, event: Finished) -> list[Action]:
        self._trace.add_finished(event)
        aborted = event.reason is FinishReason.ABORT
        if self.phase is Phase.OPEN and (aborted or not self._emitted):
            return self.on_decode_lost(self.decode_leg)
        self.decode = LegState.OVER
        if self.phase is Phase.OPEN:
            return self._end(event.reason)
        return self._settle()

    def _emit(self, output: TokenOut) -> list[Action]:
        self._emitted.append(output.token)
        reason = output.stop
        if reason is None and len(self._emitted) >= self._request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        actions: list[Action] = [Emit(output)]
        if reason is not None:
            actions += self._end(reason)
        return actions

    def _end(self, reason: FinishReason) -> list[Action]:
        self._reason = reason
        self.phase = Phase.ENDING
        if self._prefill_made_all:
            self._end_decode()
        actions = self._settle()
        return actions if self.phase is Phase.DONE else [AwaitFacts()]

    def _end_decode(self) -> None:
        """Decode is not needed (any more), and has nothing to report that is worth waiting for."""
        if self.decode is LegState.RUNNING:
            self.decode = LegState.OVER

    @property
    def _prefill_made_all(self) -> bool:
        return self._first is not None and len(self._emitted) == 1

    def _settle(self) -> list[Action]:
        """Finish an ending generation once nothing more is worth waiting for."""
        if self.phase is not Phase.ENDING:
            return []
        prefill_over = self.prefill in (LegState.NONE, LegState.OVER)
        decode_over = self.decode in (LegState.NONE, LegState.OVER)
        known = self._trace.cached_known and not self._trace.wanted
        return self._finish() if known or (prefill_over and decode_over) else []

    def _finish(self) -> list[Action]:
        assert self._reason is not None
        self.phase = Phase.DONE
        return [Finish(self._reason)]
