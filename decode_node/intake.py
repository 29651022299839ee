"""Checks a decode request and makes a sequence of it.

Owns the validation of what a peer sent: nothing reaches the engine that could break a step.
"""

from __future__ import annotations

import asyncio

import numpy as np

from decode_node.key_chain import KeyChain, TokenIds
from decode_node.sequence import Sequence
from engine.request import DecodeRequest, ErrorCode
from engine.step import ModelInfo
from kvstore.keys import Namespace, namespace_of, page_keys
from kvstore.page import PageKey
from transfer.errors import RemoteFailed

KEYS_INLINE_TOKENS_MAX = 4096  # longer contexts are hashed off the event loop


def context_of(message: DecodeRequest, info: ModelInfo) -> TokenIds:
    """Return prompt and emitted tokens, validated.

    Raises:
        RemoteFailed: invalid_request, too_long.
    """
    request = message.request
    if len(request.prompt) % 4 or len(request.emitted) % 4:
        text = "prompt and emitted are int32 tokens, 4 bytes each"
        raise RemoteFailed(ErrorCode.INVALID_REQUEST, text)
    tokens: TokenIds = np.frombuffer(request.prompt + request.emitted, dtype="<i4")
    if not request.prompt:
        text = "the prompt is empty: send at least one token"
        raise RemoteFailed(ErrorCode.INVALID_REQUEST, text)
    if request.sampling.max_tokens < 1:
        text = f"max_tokens={request.sampling.max_tokens}: below 1"
        raise RemoteFailed(ErrorCode.INVALID_REQUEST, text)
    if len(tokens) + 1 > info.max_model_len:
        raise RemoteFailed(
            ErrorCode.TOO_LONG,
            f"{len(tokens)} tokens leave no room for output: the model takes {info.max_model_len}",
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= info.vocab_size:
        raise RemoteFailed(
            ErrorCode.INVALID_REQUEST,
            f"token {low if low < 0 else high} is not in 0..{info.vocab_size - 1}",
        )
    return tokens


async def new_sequence(message: DecodeRequest, info: ModelInfo, arrival: int) -> Sequence:
    """Return a WAITING sequence for ``message``.

    Raises:
        RemoteFailed: see ``context_of``.
    """
    tokens = context_of(message, info)
    namespace = namespace_of(info.fingerprint, info.spec, salt=message.request.cache_salt)
    size = info.spec.page_size
    if len(tokens) <= KEYS_INLINE_TOKENS_MAX:
        keys = _full_page_keys(namespace, tokens, size)
    else:
        loop = asyncio.get_running_loop()
        keys = await loop.run_in_executor(None, _full_page_keys, namespace, tokens, size)
    return Sequence(message, info, KeyChain(namespace, size, keys), arrival)


def _full_page_keys(namespace: Namespace, tokens: TokenIds, page_size: int) -> list[PageKey]:
    whole = tokens[: len(tokens) // page_size * page_size]
    return page_keys(namespace, whole, page_size)  # type: ignore[arg-type]
