"""The wire form of ``/v1/completions``: one response, or a stream of chunks.

Owns how pieces become ``text_completion`` objects, with logprobs, echo and token ids; no HTTP.
"""

from __future__ import annotations

from msgspec import UNSET

from engine.request import TokenOut
from gateway.admission import Job
from gateway.openai_wire import Completion, CompletionChoice, CompletionLogprobs, sse
from gateway.render import Piece
from gateway.serving import JobRun
from gateway.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token alone, as text."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def prompt_text(job: Job, tokenizer: Tokenizer, prompt_index: int) -> str:
    """The prompt as the client wrote it, or decoded."""
    prompt = job.prompts[prompt_index]
    return tokenizer.decode(prompt.tokens) if prompt.text is None else prompt.text


class LogprobsBuilder:
    """Completion logprobs of one choice; offsets count characters of the whole text."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def build(self, outputs: list[TokenOut]) -> CompletionLogprobs:
        logprobs = CompletionLogprobs([], [], [], [])
        for output in outputs:
            text = token_text(self._tokenizer, output.token)
            logprobs.text_offset.append(self._offset)
            logprobs.token_logprobs.append(output.logprob)
            logprobs.tokens.append(text)
            top = {token_text(self._tokenizer, t): value for t, value in output.top_logprobs}
            if output.logprob is not None:
                top.setdefault(text, output.logprob)
            logprobs.top_logprobs.append(top or None)
            self._offset += len(text)
        return logprobs


class CompletionWriter:
    """Chunks of a stream; also collects a whole response."""

    def __init__(self, run: JobRun, model: str, created: int) -> None:
        self._run = run
        self._job = run.job
        self._model = model
        self._created = created
        tokenizer = run.gateway.tokenizer
        self._echo = [
            prompt_text(self._job, tokenizer, c.prompt_index) if self._job.echo else ""
            for c in run.choices
        ]
        self._logprobs = [LogprobsBuilder(tokenizer, len(text)) for text in self._echo]
        self._begun = [False] * len(run.choices)
        self._pieces: list[list[Piece]] = [[] for _ in run.choices]

    def piece(self, index: int, piece: Piece) -> bytes:
        text = piece.text
        prompt_token_ids: object = UNSET
        if not self._begun[index]:
            self._begun[index] = True
            text = self._echo[index] + text
            prompt_token_ids = self._prompt_token_ids(index)
        choice = self._choice(index, piece._replace(text=text), prompt_token_ids)
        usage = None if self._job.include_usage else UNSET
        return sse(self._body([choice], usage=usage))

    def last(self) -> bytes:
        if not (self._job.include_usage or self._job.trace):
            return b""
        usage = self._run.usage() if self._job.include_usage else UNSET
        kvferry = self._run.trace_object() if self._job.trace else UNSET
        return sse(self._body([], usage=usage, kvferry=kvferry))

    async def collect(self, index: int, piece: Piece) -> None:
        self._pieces[index].append(piece)

    def response(self) -> Completion:
        """The whole response, when every choice was collected."""
        choices = []
        for index, pieces in enumerate(self._pieces):
            whole = join_pieces(pieces)
            text = self._echo[index] + whole.text
            ids = self._prompt_token_ids(index)
            choices.append(self._choice(index, whole._replace(text=text), ids))
        kvferry = self._run.trace_object() if self._job.trace else UNSET
        return self._body(choices, usage=self._run.usage(), kvferry=kvferry)

    def _prompt_token_ids(self, index: int) -> object:
        if not self._job.return_token_ids:
            return UNSET
        return self._job.prompts[self._run.choices[index].prompt_index].tokens

    def _choice(self, index: int, piece: Piece, prompt_token_ids: object) -> CompletionChoice:
        with_logprobs = self._job.sampling.logprobs is not None
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs[index].build(piece.outputs) if with_logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=[o.token for o in piece.outputs] if self._job.return_token_ids else UNSET,
            prompt_token_ids=prompt_token_ids,  # type: ignore[arg-type]
        )

    def _body(
        self, choices: list[CompletionChoice], *, usage: object, kvferry: object = UNSET
    ) -> Completion:
        return Completion(
            id=self._run.request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
            kvferry=kvferry,  # type: ignore[arg-type]
        )


def join_pieces(pieces: list[Piece]) -> Piece:
    """All pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        text="".join(piece.text for piece in pieces),
        outputs=[output for piece in pieces for output in piece.outputs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
