"""What a prefill node can be told at start, and the named maxima that it never exceeds."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator

RESTORE_RECORDS_MAX = 64  # restore decisions kept for people
ENGINE_FAILURES_MAX = 3  # steps that fail in a row before the node calls itself unhealthy
STORE_GRACE_S = 0.25  # a store call that outlives its own deadline by this much is cancelled
KEYS_INLINE_TOKENS_MAX = 4096  # longer prompts are hashed off the event loop


class PrefillConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of one prefill node.

    Attributes:
        bind: where the channel service listens; port 0 takes a free one.
        chunk_size: most tokens of one request in one step.
        token_budget: most tokens of all requests in one step.
        max_num_requests: live requests (waiting, running, publishing); one more is refused.
        max_num_active: requests that hold pages (restoring or running) at one time.
        ageing_s: every so many seconds of waiting raise a request by one priority level.
        restore: pull prefix pages from the store at all.
        restore_wait_s: longest wait for pages that another node is writing.
        restore_timeout_s: longest restore of one request.
        restore_latency_s: fixed cost of one restore in the cost model.
        restore_bytes_per_s: prior of the restore rate, until it has been measured.
        compute_tokens_per_s: prior of the prefill rate, until it has been measured.
        push_batch_pages: most pages in one ``put``.
        push_concurrency: most ``put`` calls in flight.
        push_timeout_s: deadline of one ``put``, and of a request's last pages.
    """

    bind: str = "tcp://127.0.0.1:0"
    chunk_size: int = Field(default=512, ge=1)
    token_budget: int = Field(default=512, ge=1)
    max_num_requests: int = Field(default=256, ge=1)
    max_num_active: int = Field(default=32, ge=1)
    ageing_s: float = Field(default=2.0, gt=0)
    restore: bool = True
    restore_wait_s: float = Field(default=1.0, ge=0)
    restore_timeout_s: float = Field(default=5.0, gt=0)
    restore_latency_s: float = Field(default=0.002, ge=0)
    restore_bytes_per_s: float = Field(default=500e6, gt=0)
    compute_tokens_per_s: float = Field(default=2000.0, gt=0)
    push_batch_pages: int = Field(default=64, ge=1)
    push_concurrency: int = Field(default=4, ge=1)
    push_timeout_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _chunk_fits_budget(self) -> Self:
        if self.chunk_size > self.token_budget:
            raise ValueError(
                f"chunk_size={self.chunk_size} exceeds token_budget={self.token_budget}: "
                "lower the one or raise the other"
            )
        return self
