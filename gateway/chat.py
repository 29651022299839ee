"""The wire form of ``/v1/chat/completions``: one response, or a stream of chunks.

Owns the order of a chat stream: role chunk, content chunks, finish chunk with an empty delta.
Knows no HTTP.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from engine.request import TokenOut
from gateway.completions import join_pieces, token_text
from gateway.openai_wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    TopLogprob,
    Usage,
    sse,
)
from gateway.render import Piece
from gateway.serving import JobRun
from gateway.tokenizer import Tokenizer

_EMPTY = ChatDelta()
_ROLE = ChatDelta(role="assistant", content="")


def chat_logprobs(tokenizer: Tokenizer, outputs: list[TokenOut]) -> ChatLogprobs:
    """Logprobs of ``outputs`` with the bytes of each token."""
    content = []
    for output in outputs:
        top = [
            TopLogprob(token_text(tokenizer, t), value, list(tokenizer.token_bytes(t)))
            for t, value in output.top_logprobs
        ]
        content.append(
            TokenLogprob(
                token=token_text(tokenizer, output.token),
                logprob=output.logprob if output.logprob is not None else 0.0,
                bytes=list(tokenizer.token_bytes(output.token)),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content)


class ChatWriter:
    """Chunks of a stream; also collects a whole response."""

    def __init__(self, run: JobRun, model: str, created: int) -> None:
        self._run = run
        self._job = run.job
        self._model = model
        self._created = created
        self._tokenizer = run.gateway.tokenizer
        self._with_logprobs = run.job.sampling.logprobs is not None
        self._usage: UnsetType | None = None if run.job.include_usage else UNSET
        self._begun = [False] * len(run.choices)
        self._pieces: list[list[Piece]] = [[] for _ in run.choices]

    def piece(self, index: int, piece: Piece) -> bytes:
        events = b""
        if not self._begun[index]:
            self._begun[index] = True
            ids = self._job.prompts[0].tokens if self._job.return_token_ids else UNSET
            role = ChatChunkChoice(index=index, delta=_ROLE)
            events += sse(self._chunk([role], prompt_token_ids=ids))
        if piece.text or piece.outputs:
            events += self._content(index, piece)
        if piece.finish_reason is not None:
            finish = ChatChunkChoice(
                index=index,
                delta=_EMPTY,
                finish_reason=piece.finish_reason,
                stop_reason=UNSET if piece.stop_reason is None else piece.stop_reason,
            )
            events += sse(self._chunk([finish]))
        return events

    def last(self) -> bytes:
        if not (self._job.include_usage or self._job.trace):
            return b""
        return sse(
            self._chunk(
                [],
                usage=self._run.usage() if self._job.include_usage else UNSET,
                kvferry=self._run.trace_object() if self._job.trace else UNSET,
            )
        )

    async def collect(self, index: int, piece: Piece) -> None:
        self._pieces[index].append(piece)

    def response(self) -> ChatCompletion:
        """The whole response, when every choice was collected."""
        choices = []
        for index, pieces in enumerate(self._pieces):
            whole = join_pieces(pieces)
            assert whole.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=index,
                    message=ChatMessage(content=whole.text),
                    logprobs=self._logprobs(whole),
                    finish_reason=whole.finish_reason,
                    stop_reason=whole.stop_reason,
                    token_ids=self._token_ids(whole),
                )
            )
        return ChatCompletion(
            id=self._run.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._run.usage(),
            prompt_token_ids=self._job.prompts[0].tokens if self._job.return_token_ids else UNSET,
            kvferry=self._run.trace_object() if self._job.trace else UNSET,
        )

    def _content(self, index: int, piece: Piece) -> bytes:
        shows = piece.text or self._with_logprobs or self._job.return_token_ids
        if not shows:
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=piece.text),
            logprobs=self._logprobs(piece),
            token_ids=self._token_ids(piece),
        )
        return sse(self._chunk([choice]))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, piece.outputs) if self._with_logprobs else None

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return [o.token for o in piece.outputs] if self._job.return_token_ids else UNSET

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | UnsetType | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        kvferry: dict[str, object] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._run.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage if usage is None else usage,
            prompt_token_ids=prompt_token_ids,
            kvferry=kvferry,
        )
