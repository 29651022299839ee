"""Running a job: its choices at the same time, each as one generation.

Owns ``Gateway`` (what the routes share), the fan-out over prompts and ``n``, the pieces of each
choice, usage, and the watch for clients that leave. Knows no wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from starlette.types import Receive

from engine.request import GenerateRequest, RequestId, TokenOut
from gateway.admission import SEED_MASK, Job, Limits
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError
from gateway.metrics import Metrics
from gateway.openai_wire import PromptTokensDetails, Usage
from gateway.render import ChoiceRenderer, Piece
from gateway.tokenizer import Tokenizer
from gateway.trace import GenerationDone, GenerationTrace
from transfer.membership import Membership

T = TypeVar("T")
OnPiece = Callable[[int, Piece], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection; its work has been cancelled."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """What every route needs."""

    config: GatewayConfig
    dispatcher: Dispatcher
    tokenizer: Tokenizer
    membership: Membership
    metrics: Metrics
    wall_clock: Callable[[], float]
    started_at: int
    health_checks: Mapping[str, Callable[[], bool]]

    @property
    def served_names(self) -> tuple[str, ...]:
        return (self.config.model, *self.config.aliases)

    @property
    def limits(self) -> Limits:
        """Limits by configuration and by what the nodes state; the smaller counts."""
        facts = self.dispatcher.facts
        stated = [self.config.max_model_len, facts.max_model_len if facts else None]
        lengths = [length for length in stated if length is not None]
        vocab_size = facts.vocab_size if facts else None
        return Limits(
            max_model_len=min(lengths, default=None),
            vocab_size=vocab_size or self.tokenizer.vocab_size,
            choices_max=self.config.choices_max,
        )


@dataclass(slots=True)
class ChoiceRun:
    """One choice while it runs, and what is known of it afterwards."""

    index: int
    prompt_index: int
    trace: GenerationTrace
    num_tokens: int = 0


@dataclass(slots=True)
class JobRun:
    """A job while it runs. ``run`` once; usage and traces may be read afterwards."""

    gateway: Gateway
    job: Job
    request_id: RequestId
    choices: list[ChoiceRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index in range(self.job.num_choices):
            trace = GenerationTrace(wanted=self.job.trace)
            self.choices.append(ChoiceRun(index, index // self.job.n, trace))

    async def run(self, on_piece: OnPiece) -> None:
        """Run all choices; ``on_piece(index, piece)`` is called in order for each choice.

        Raises:
            GatewayError: of the first choice that failed; the others are cancelled.
        """
        self.gateway.dispatcher.check_room(len(self.choices))
        deadline_s = asyncio.get_running_loop().time() + self.gateway.config.request_timeout_s
        if len(self.choices) == 1:
            await self._run_choice(self.choices[0], on_piece, deadline_s)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(self._run_choice(choice, on_piece, deadline_s))
        except* GatewayError as errors:
            raise _first(errors) from None

    def usage(self) -> Usage:
        """Token counts. A prompt counts once whatever ``n``; of its choices, the one that found
        the least in caches is the one that computed it."""
        cached = 0
        for at, prompt in enumerate(self.job.prompts):
            own = [c.trace for c in self.choices if c.prompt_index == at]
            cached += min(trace.cached_tokens(len(prompt.tokens)) for trace in own)
        prompt_tokens = self.job.num_prompt_tokens
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached),
        )

    def trace_object(self) -> dict[str, object]:
        """The ``kvferry`` object: the first choice's facts; all of them when there are more."""
        first = self.choices[0].trace.to_object()
        if len(self.choices) > 1:
            first["choices"] = [choice.trace.to_object() for choice in self.choices]
        return first

    async def _run_choice(self, choice: ChoiceRun, on_piece: OnPiece, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        metrics = self.gateway.metrics
        renderer = ChoiceRenderer(self.job, self.gateway.tokenizer)
        previous_s = loop.time()
        items = self.gateway.dispatcher.generate(
            self._request(choice),
            deadline_s=deadline_s,
            trace=choice.trace,
            text_ended=lambda: renderer.finished,
        )
        generation = cast("AsyncGenerator[TokenOut | GenerationDone, None]", items)
        async with aclosing(generation) as generation:
            async for item in generation:
                if isinstance(item, GenerationDone):
                    piece = renderer.done(item.reason)
                else:
                    now_s = loop.time()
                    histogram = metrics.itl if choice.num_tokens else metrics.ttft
                    histogram.observe(now_s - previous_s)
                    previous_s = now_s
                    piece = renderer.push(item)
                    choice.num_tokens = renderer.num_tokens
                if piece is not None:
                    await on_piece(choice.index, piece)

    def _request(self, choice: ChoiceRun) -> GenerateRequest:
        sampling = self.job.sampling
        offset = choice.index % self.job.n
        if offset:
            seed = (sampling.seed + offset) & SEED_MASK
            sampling = msgspec.structs.replace(sampling, seed=seed)
        tokens = self.job.prompts[choice.prompt_index].tokens
        return GenerateRequest(
            request_id=RequestId(f"{self.request_id}-{choice.index}"),
            prompt=np.asarray(tokens, dtype="<i4").tobytes(),
            sampling=sampling,
            cache_salt=self.job.cache_salt,
        )


def _first(group: BaseExceptionGroup[GatewayError]) -> GatewayError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GatewayError)
    return error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it when the client leaves.

    Raises:
        ClientGone: the client left first; ``work`` has been cancelled and has ended.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name="http work")
    watch = loop.create_task(_disconnected(receive), name="http disconnect watch")
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGone
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.wait((task, watch))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
