"""What one generation cost and where it ran: the facts behind usage and ``x-kvferry-trace``.

Owns ``GenerationTrace`` (filled by the legs as their reports come in) and ``GenerationDone``.
Knows no HTTP. Exact accounting of the prompt: whoever made the first token of the request tells
computed, cached local and cached store tokens; what decode computed again after that is
``recomputed_tokens``. A value nobody reported is None in ``cached_tokens``, 0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.request import Finished, FinishReason, FirstToken, PrefillDone
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

    def add_first_token(self, event: FirstToken) -> None:
        self.computed_tokens = event.computed_tokens
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

    def add_finished(self, event: Finished) -> None:
        if self.cached_known:
            self.recomputed_tokens += event.computed_tokens
        else:
            self.computed_tokens = event.computed_tokens
            self.cached_local = event.cached_local_tokens
            self.cached_store = event.cached_store_tokens
        self.recomputed_pages += event.recomputed_pages
        self.num_preemptions += event.num_preemptions
        self.pages_pulled += event.pages_pulled
        self.bytes_pulled += event.bytes_pulled
        self.pages_pushed += event.pages_pushed
        self.bytes_pushed += event.bytes_pushed
        self.pull_s += event.pull_s

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
            "ttft_s": self.ttft_s,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "push_s": self.push_s,
            "transfer_s": self.pull_s or self.push_s,
        }


class GenerationDone(NamedTuple):
    """The last item of a generation."""

    reason: FinishReason
    num_tokens: int
    trace: GenerationTrace
