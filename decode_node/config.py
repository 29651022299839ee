"""Settings of a decode node: every queue, budget and wait has its named limit here."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DecodeConfig(BaseModel, frozen=True, extra="forbid"):
    """Frozen settings.

    Attributes:
        bind: where the channel service listens; port 0 takes a free one.
        max_running: sequences that hold pages at one time.
        max_waiting: requests queued for pages; one more is answered ``overloaded``.
        step_tokens: token budget of one step: one per running sequence, the rest for chunks of
            recomputed prompts, so that the inter-token latency of running streams stays bounded.
        head_room_tokens: tokens a sequence must be able to grow by before it joins others.
        pull_timeout_s: how long a pull may take once its pages are known to be in the store (or
            known not to come); then the rest is recomputed.
        write_back_workers: puts in flight at one time.
        write_back_pages: pages that may wait for the store; never more than a quarter of the pool.
        write_back_timeout_s: deadline of one put.
        final_write_back_s: how long ``Finished`` waits for the put of a sequence's last pages.
        drain_write_back_s: the same for sequences that a drain hands over to another node.
        early_news_max: updates kept for requests that have not arrived yet.
        early_news_s: how long such an update is kept.
    """

    bind: str = "tcp://127.0.0.1:0"
    max_running: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=1024, ge=1)
    step_tokens: int = Field(default=512, ge=1)
    head_room_tokens: int = Field(default=64, ge=0)
    pull_timeout_s: float = Field(default=5.0, gt=0)
    write_back_workers: int = Field(default=4, ge=1)
    write_back_pages: int = Field(default=1024, ge=1)
    write_back_timeout_s: float = Field(default=5.0, gt=0)
    final_write_back_s: float = Field(default=0.25, ge=0)
    drain_write_back_s: float = Field(default=2.0, ge=0)
    early_news_max: int = Field(default=4096, ge=1)
    early_news_s: float = Field(default=30.0, gt=0)
