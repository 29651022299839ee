"""Configuration of the gateway: routing weights, bounds, timeouts, HTTP limits.

Owns the frozen models ``RouterConfig``, ``DispatcherConfig`` and ``GatewayConfig`` and every
default of this package. Knows no files and no environment: ``launch`` builds these.
All durations are in seconds.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RouterConfig(_Frozen):
    """Weights of ``score = alpha * cached / total - beta * queue_delay`` and its guard.

    Attributes:
        alpha: what a prompt that is cached in full is worth.
        beta: what a queue as long as this prompt's own work costs.
        request_floor_tokens: a queued prompt counts as at least this many tokens.
        decode_slots: on decode nodes, this many running requests cost as much as a full hit.
        balance_ratio: a node with more than ``balance_ratio * least + balance_slack`` requests is
            passed over whatever it caches, so that one hot prefix spreads over all nodes.
        balance_slack: see ``balance_ratio``.
        recent_half_life_s: how fast a finished request stops counting for the balance guard.
    """

    alpha: float = 1.0
    beta: float = 1.0
    request_floor_tokens: int = Field(default=64, ge=1)
    decode_slots: int = Field(default=16, ge=1)
    balance_ratio: float = Field(default=1.25, ge=1.0)
    balance_slack: float = Field(default=4.0, ge=0.0)
    recent_half_life_s: float = Field(default=5.0, gt=0.0)


class DispatcherConfig(_Frozen):
    """Bounds of the dispatcher. Every retry and every wait has its maximum here.

    Attributes:
        requests_max: generations in flight; one more is refused (429).
        index_pages_max: page entries of the prefix index, over all nodes.
        prefill_attempts_max: prefill legs of one request before decode computes the prompt.
        decode_attempts_max: decode legs in a row that fail without giving a token.
        capacity_wait_s: how long a new request waits for a known decode node to be reachable.
        prefill_wait_s: how long a new request waits for a prefill node that is being connected.
        connect_timeout_s: one attempt to open a channel.
        reconnect_min_s, reconnect_max_s: back-off between attempts.
        update_timeout_s: one attempt to tell a decode node news of its prefill leg.
        update_attempts_max: attempts before the decode leg counts as lost.
        update_retry_s: first pause between these attempts; doubles up to ``update_timeout_s``.
        finish_grace_s: how long a finished request waits for the facts of its legs.
        linger_s: how long the legs of a finished request may go on pushing pages.
        linger_max: legs that linger at once; the oldest is closed beyond that.
        watch_s: length of one KV event subscription before it is renewed.
        overload_retry_s: pause before a running request asks overloaded decode nodes again.
        retry_after_s: what refused clients are told.
    """

    router: RouterConfig = RouterConfig()
    requests_max: int = Field(default=1024, ge=1)
    index_pages_max: int = Field(default=400_000, ge=1)
    prefill_attempts_max: int = Field(default=3, ge=1)
    decode_attempts_max: int = Field(default=5, ge=1)
    capacity_wait_s: float = 2.0
    prefill_wait_s: float = 1.0
    connect_timeout_s: float = 2.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0
    update_timeout_s: float = 1.0
    update_attempts_max: int = Field(default=20, ge=1)
    update_retry_s: float = 0.05
    finish_grace_s: float = 1.0
    linger_s: float = 30.0
    linger_max: int = Field(default=1024, ge=1)
    watch_s: float = 3600.0
    overload_retry_s: float = 0.2
    retry_after_s: int = Field(default=1, ge=1)


class GatewayConfig(_Frozen):
    """What the HTTP door offers and refuses.

    Attributes:
        model: the served model name.
        aliases: further names under which it is served.
        max_model_len: longest prompt plus output; None: the least that the nodes state.
        max_body_nbytes: larger request bodies are refused (413) while they arrive.
        request_timeout_s: from the arrival of a request to its last token.
        choices_max: prompts times ``n`` of one HTTP request.
        admin_token: opens ``/admin`` to peers that are not on loopback.
        members_at: who keeps the list of members, as people call it.
    """

    model: str
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = Field(default=None, ge=1)
    max_body_nbytes: int = Field(default=8 * 1024 * 1024, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0.0)
    choices_max: int = Field(default=128, ge=1)
    admin_token: str | None = None
    members_at: str = "the registry"
