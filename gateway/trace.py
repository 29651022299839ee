"""What one generation cost and where it ran: the facts behind usage and ``x-kvferry-trace``.

Owns ``GenerationTrace`` (filled by the legs as their reports come in) and ``GenerationDone``.
Knows no HTTP.

Exact accounting of the prompt. *Cached* is what the leg that made output index 0 found, and no
later leg changes it: a prefill leg says it with ``FirstToken``, a decode leg with ``PromptReady``
before its first token. *Computed* is all that was computed for the prompt, by every leg that
reported; of that, and of tokens the client had already, ``recomputed_tokens`` were computed after
index 0 was made. What nobody reported is None in ``cached_local``, ``cached_store``, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.request import Finished, FinishReason, FirstToken, PrefillDone, PromptReady
from transfer.identity import NodeId

Origin = Literal["restored", "recomputed", "none"]


@dataclass(slots=True)
class GenerationTrace:
    """Mutable record of one generation; readable at any time, also after a cancel.

    ``wanted`` asks the dispatcher to wait (bounded) for the reports of both legs.
    """

    wanted: bool = False
    prefill_node: NodeId | None = None
    decode_node: NodeId | None = None
    transport: str = ""
    expected_cached_tokens: int = 0
    computed_tokens: int = 0
    cached_local: int | None = None
    cached_store: int | None = None
    recomputed_tokens: int = 0
    recomputed_pages: int = 0
    pages_pushed: int = 0
    pages_pulled: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    num_prefill_legs: int = 0
    num_decode_legs: int = 0
    num_preemptions: int = 0
    ttft_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    push_s: float = 0.0
    pull_s: float = 0.0
    _decode: PromptReady | Finished | None = field(default=None, init=False)  # its last report

    @property
    def cached_known(self) -> bool:
        return self.cached_local is not None

    def cached_tokens(self, num_prompt_tokens: int) -> int:
        """Cached tokens of the prompt, never above its length."""
        return min(num_prompt_tokens, (self.cached_local or 0) + (self.cached_store or 0))

    @property
    def restored_or_recomputed(self) -> Origin:
        """``recomputed``: decode had to compute pages; ``restored``: the store gave some."""
        if self.recomputed_pages:
            return "recomputed"
        return "restored" if self.cached_store else "none"

    @property
    def prompt_reported(self) -> bool:
        """True when the present decode leg has said where the KV of the prompt came from."""
        return self._decode is not None

    def add_first_token(self, event: FirstToken) -> None:
        self.computed_tokens += event.computed_tokens
        self.cached_local = event.cached_local_tokens
        self.cached_store = event.cached_store_tokens
        self.pages_pulled += event.pages_pulled
        self.bytes_pulled += event.bytes_pulled
        self.queue_s = event.queue_s
        self.prefill_s = event.prefill_s

    def add_prefill_done(self, event: PrefillDone) -> None:
        self.pages_pushed += event.pages_pushed
        self.bytes_pushed += event.bytes_pushed
        self.push_s += event.push_s

    def decode_leg_began(self) -> None:
        """Reports from now on are another leg's."""
        self._decode = None

    def add_prompt_ready(self, event: PromptReady) -> None:
        self._add_decode(event)

    def first_token_by_decode(self) -> None:
        """The present decode leg made output index 0: what it found cached is what counts."""
        assert self._decode is not None
        self.cached_local = self._decode.cached_local_tokens
        self.cached_store = self._decode.cached_store_tokens

    def add_finished(self, event: Finished) -> None:
        self._add_decode(event)
        self.num_preemptions += event.num_preemptions
        self.pages_pushed += event.pages_pushed
        self.bytes_pushed += event.bytes_pushed

    def _add_decode(self, event: PromptReady | Finished) -> None:
        """Reports of one leg are totals: add what is new in this one."""
        old, self._decode = self._decode, event
        computed = event.computed_tokens - (old.computed_tokens if old else 0)
        emitted = event.computed_emitted_tokens - (old.computed_emitted_tokens if old else 0)
        self.computed_tokens += computed - emitted
        if self.cached_known:
            self.recomputed_tokens += computed
        self.recomputed_pages += event.recomputed_pages - (old.recomputed_pages if old else 0)
        self.pages_pulled += event.pages_pulled - (old.pages_pulled if old else 0)
        self.bytes_pulled += event.bytes_pulled - (old.bytes_pulled if old else 0)
        self.pull_s += event.pull_s - (old.pull_s if old else 0.0)

    def to_object(self) -> dict[str, object]:
        """The ``kvferry`` object of a response."""
        return {
            "prefill_node": self.prefill_node,
            "decode_node": self.decode_node,
            "transport": self.transport,
            "computed_tokens": self.computed_tokens,
            "cached_tokens": {"local": self.cached_local or 0, "store": self.cached_store or 0},
            "recomputed_tokens": self.recomputed_tokens,
            "pages_pushed": self.pages_pushed,
            "pages_pulled": self.pages_pulled,
            "bytes_pushed": self.bytes_pushed,
            "bytes_pulled": self.bytes_pulled,
            "restored_or_recomputed": self.restored_or_recomputed,
            "prefill_legs": self.num_prefill_legs,
            "decode_legs": self.num_decode_legs,
            "preemptions": self.num_preemptions,
            "ttft_s": None if self.ttft_s is None else _shown(self.ttft_s),
            "queue_s": _shown(self.queue_s),
            "prefill_s": _shown(self.prefill_s),
            "push_s": _shown(self.push_s),
            "transfer_s": _shown(self.pull_s or self.push_s),
        }


def _shown(duration_s: float) -> float:
    """Seconds to the microsecond: what is beyond is noise of the clock."""
    return round(duration_s, 6)


class GenerationDone(NamedTuple):
    """The last item of a generation."""

    reason: FinishReason
    num_tokens: int
    trace: GenerationTrace
