"""The vocabulary of a generation request: what the gateway asks of the nodes.

Owns the wire structs that gateway, prefill nodes and decode nodes share, and sampling parameters.
Free of torch, so that a gateway may import it. Knows no HTTP, no scheduling, no network.

The life of a request, as messages (G gateway, P prefill node, D decode node)::

    G ──PrefillRequest──▶ P   stream: FirstToken, then PrefillDone
    G ──DecodeRequest───▶ D   stream: PromptReady, TokensOut ..., then Finished
    G ──PrefillUpdate───▶ D   request: first token / pages published / leg failed  → Ack

Both legs start at once. A node that cannot serve ends its stream with one of ``ErrorCode``.

Output tokens carry their ``index`` (0 = first output token of the request). The *gateway* decides
who makes index 0: the prefill leg while ``DecodeRequest.expect_prefill``; once the gateway has
told D ``failed=True`` (and only then) D computes it itself and the gateway ignores P.
When a leg is retried elsewhere, the tokens that the client already has travel as ``emitted``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)

LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 64


class ErrorCode(StrEnum):
    """The ``code`` of every ``RemoteFailed`` that a prefill or decode leg ends with.

    The control channel's own ``overloaded`` (too many calls at once) has the same name and meaning.
    """

    INVALID_REQUEST = "invalid_request"  # malformed: no node would take it
    TOO_LONG = "too_long"  # no node of this size would take it
    OVERLOADED = "overloaded"  # busy: another node may take it
    DRAINING = "draining"  # leaving: another node may take it
    DEADLINE_EXCEEDED = "deadline_exceeded"  # the request's own deadline passed
    CLOSED = "closed"  # the node stopped meanwhile
    ENGINE_FAILED = "engine_failed"  # the engine raised, or its loop is dead
    SUPERSEDED = "superseded"  # the same request was sent again


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 means all. ``seed`` is always set by the gateway: with
    the output position it determines the random number, on any node, before and after a migration.
    ``logprobs`` None means none; 0 means the chosen token's only.
    Stop *strings* are the gateway's (nodes have no tokenizer).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (``n`` choices are ``n`` requests).

    Attributes:
        prompt: int32 little-endian tokens of the prompt.
        emitted: int32 little-endian output tokens that the client already has.
        cache_salt: tenant salt of the page keys.
        priority: lower runs first, 0 by default.
    """

    request_id: RequestId
    prompt: bytes
    sampling: SamplingParams
    emitted: bytes = b""
    cache_salt: str | None = None
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.emitted) // 4


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token id
    LENGTH = "length"
    ABORT = "abort"  # drained or shut down: the gateway continues elsewhere


class TokenOut(msgspec.Struct, frozen=True, kw_only=True):
    """One output token.

    Attributes:
        logprob: natural logarithm, of the distribution before temperature and filters
            (OpenAI's and vLLM's default); None when not asked for.
        top_logprobs: ``(token, logprob)`` pairs, most probable first.
        stop: the finish reason when this token ends the request.
    """

    index: int
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    stop: FinishReason | None = None


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    request: GenerateRequest


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first_token"):
    """Sent as soon as it is sampled; pages may still be on their way.

    Exact accounting of the prompt (with ``emitted``): ``computed_tokens + cached_local_tokens +
    cached_store_tokens == number of tokens``; a token whose KV was present but that was run again
    for its logits counts as cached.
    """

    output: TokenOut
    computed_tokens: int
    cached_local_tokens: int
    cached_store_tokens: int
    pages_pulled: int
    bytes_pulled: int
    queue_s: float
    prefill_s: float


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_done"):
    """The last item: every page of the prompt is in the store (``published``), or some are not."""

    published: bool
    pages_pushed: int
    bytes_pushed: int
    push_s: float


PrefillEvent = FirstToken | PrefillDone


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    request: GenerateRequest
    expect_prefill: bool


class PrefillUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_update"):
    """News of the prefill leg for the decode leg. Any field may come first, each at most once;
    repeats are ignored.

    Attributes:
        first_token: output index 0, already sent to the client.
        published: True all pages are in the store; False some never will be; None not known yet.
        failed: the prefill leg is over and made no first token: compute it yourself.
    """

    request_id: RequestId
    first_token: TokenOut | None = None
    published: bool | None = None
    failed: bool = False


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    known: bool = True


class PromptReady(msgspec.Struct, frozen=True, kw_only=True, tag="prompt_ready"):
    """The KV of prompt (+ emitted) is complete: where it came from, exactly.

    Sent once by a decode leg, before its first ``TokensOut``; a leg that ends earlier sends none.
    ``computed_tokens + cached_local_tokens + cached_store_tokens == prompt (+ emitted)`` tokens,
    counted like in ``FirstToken``: tokens that this leg computed are never cached ones, also when
    it pulled them again after a retraction. ``computed_emitted_tokens`` of the computed ones
    belong to ``emitted``. The rest is what the leg did up to now.
    """

    computed_tokens: int
    computed_emitted_tokens: int
    cached_local_tokens: int
    cached_store_tokens: int
    pages_pulled: int
    bytes_pulled: int
    recomputed_pages: int
    pull_s: float


class TokensOut(msgspec.Struct, frozen=True, tag="tokens"):
    """Output tokens with consecutive indices."""

    outputs: tuple[TokenOut, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The last item of a decode stream: what the leg did, exactly.

    The accounting of the prompt repeats ``PromptReady``; where that never came, it is of the part
    that had KV. ``reason`` ABORT asks the gateway to continue elsewhere.
    """

    reason: FinishReason
    computed_tokens: int
    computed_emitted_tokens: int
    cached_local_tokens: int
    cached_store_tokens: int
    pages_pulled: int
    bytes_pulled: int
    pages_pushed: int
    bytes_pushed: int
    recomputed_pages: int
    num_preemptions: int
    pull_s: float


DecodeEvent = PromptReady | TokensOut | Finished
