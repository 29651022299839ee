"""The tokens of one sequence on their way to its consumer.

Owns the buffer between the step loop, which never waits, and a consumer of any speed: what was
not fetched yet is handed over in one ``TokensOut``. Bounded by the request's ``max_tokens``.
Order: ``PromptReady`` (at most one), tokens, the end.
"""

from __future__ import annotations

import asyncio

from engine.request import DecodeEvent, Finished, PromptReady, TokenOut, TokensOut
from transfer.errors import RemoteFailed


class OutputStream:
    """Single producer, single consumer."""

    def __init__(self) -> None:
        self._prompt: PromptReady | None = None
        self._outputs: list[TokenOut] = []
        self._end: Finished | RemoteFailed | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def prompt_ready(self, event: PromptReady) -> None:
        """Add the accounting of the prompt, before the first token; never blocks."""
        assert self._end is None
        assert not self._outputs
        self._prompt = event
        self._changed.set()

    def push(self, output: TokenOut) -> None:
        """Add a token; never blocks."""
        assert self._end is None
        self._outputs.append(output)
        self._changed.set()

    def finish(self, end: Finished | RemoteFailed) -> None:
        """Add the last item; what comes later is ignored."""
        if self._end is None:
            self._end = end
            self._changed.set()

    async def next(self) -> DecodeEvent:
        """Return what comes next: the prompt, all buffered tokens as one item, then the end.

        Raises:
            RemoteFailed: the sequence failed.
        """
        while self._prompt is None and not self._outputs and self._end is None:
            self._changed.clear()
            await self._changed.wait()
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            return prompt
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return TokensOut(tuple(outputs))
        if isinstance(self._end, RemoteFailed):
            raise self._end
        assert self._end is not None
        return self._end
