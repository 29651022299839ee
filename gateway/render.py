"""From output tokens to what a client sees: text, logprobs and the end of one choice.

Owns ``ChoiceRenderer``: detokenising, stop strings, held-back text, and the rule that a token that
*ends* the text (EOS, stop id) is counted but not shown. Sans-I/O; knows no wire format.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.request import FinishReason, TokenOut
from gateway.admission import Job
from gateway.detokenizer import Detokenizer, StopMatch, StopScanner
from gateway.tokenizer import Tokenizer


class Piece(NamedTuple):
    """One step of a choice: new text, the tokens behind it, and its end if it ended."""

    text: str
    outputs: list[TokenOut]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChoiceRenderer:
    """Renders one choice; ``finished`` once a piece with a finish reason was returned."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=job.skip_special_tokens)
        self._scanner = StopScanner(job.stops, include_stop=job.include_stop)
        self._pending: list[TokenOut] = []
        self._eager = job.sampling.logprobs is not None or job.return_token_ids
        self.num_tokens = 0
        self.finished = False

    def push(self, output: TokenOut) -> Piece | None:
        """Take one token; None when there is nothing to show yet."""
        assert not self.finished, "a token after the end of its choice"
        self.num_tokens += 1
        self._pending.append(output)
        text = "" if self._is_hidden_end(output) else self._detokenizer.push(output.token)
        may_stop = self.num_tokens > self._job.sampling.min_tokens
        shown = self._scanner.push(text, may_stop=may_stop)
        if isinstance(shown, StopMatch):
            return self._end(shown.text, "stop", shown.stop)
        if output.stop is not None:
            return self._finish(shown, output.stop, output.token)
        if shown or self._eager:
            return self._piece(shown)
        return None

    def done(self, reason: FinishReason) -> Piece | None:
        """The generation ended; None when its last token said so already."""
        return None if self.finished else self._finish("", reason, None)

    def _is_hidden_end(self, output: TokenOut) -> bool:
        return output.stop is FinishReason.STOP and not (
            self._job.include_stop and output.token in self._job.sampling.stop_token_ids
        )

    def _finish(self, text: str, reason: FinishReason, token: int | None) -> Piece:
        rest = self._scanner.push(self._detokenizer.flush(), may_stop=False)
        assert isinstance(rest, str)
        text += rest + self._scanner.flush()
        by_id = reason is FinishReason.STOP and token in self._job.sampling.stop_token_ids
        return self._end(text, reason.value, token if by_id else None)

    def _end(self, text: str, reason: str, stop_reason: str | int | None) -> Piece:
        self.finished = True
        piece = self._piece(text)
        return piece._replace(finish_reason=reason, stop_reason=stop_reason)

    def _piece(self, text: str) -> Piece:
        outputs, self._pending = self._pending, []
        return Piece(text, outputs)
