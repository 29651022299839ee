"""From a parsed body to a job: every check that can be made before a node hears of it.

Owns prompt checks, tokenisation, room (``max_model_len``), vocabulary bounds and the sampling
parameters. Knows no nodes and no responses. Nothing is allocated anywhere for a job that fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.request import SamplingParams
from gateway.chat_template import ChatTemplateError
from gateway.errors import InvalidRequest, NotFound
from gateway.openai_schema import (
    STOP_CHARS_MAX,
    STOPS_MAX,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from gateway.tokenizer import Tokenizer

SEED_MASK = 2**63 - 1  # seeds of any sign become the non-negative ones that nodes use
ENCODE_INLINE_CHARS_MAX = 4096  # longer texts are tokenised off the loop
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Limits(NamedTuple):
    """What the cluster can hold at the moment."""

    max_model_len: int | None
    vocab_size: int
    choices_max: int


class Prompt(NamedTuple):
    tokens: list[int]
    text: str | None  # as the client gave it; None when it gave tokens


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, checked: ``len(prompts) * n`` generations."""

    prompts: list[Prompt]
    n: int
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    trace: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


def check_model(name: str, served: Sequence[str]) -> None:
    """Raise ``NotFound`` unless ``name`` is one of the names in ``served``."""
    if name not in served:
        raise NotFound(
            f"the model {name!r} does not exist; this server serves {served[0]!r}",
            param="model",
            code="model_not_found",
        )


async def completion_job(
    body: CompletionBody, tokenizer: Tokenizer, limits: Limits, *, seed: int, trace: bool
) -> Job:
    """Check and tokenise a completion request.

    Raises:
        InvalidRequest: names the field.
    """
    if body.best_of not in (None, body.n):
        raise InvalidRequest("best_of must equal n", param="best_of", code="unsupported")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported: prompts have no logprobs here",
            param="echo",
            code="unsupported",
        )
    prompts = [
        await _encode(item, tokenizer, limits, add_special_tokens=body.add_special_tokens)
        for item in _split_prompts(body.prompt, body.n, limits)
    ]
    room = min(_room(len(prompt.tokens), limits, "prompt") for prompt in prompts)
    return _job(body, prompts, body.max_tokens, body.logprobs, room, limits, seed, trace)


async def chat_job(
    body: ChatBody, tokenizer: Tokenizer, limits: Limits, *, seed: int, trace: bool
) -> Job:
    """Check, render and tokenise a chat request.

    Raises:
        InvalidRequest: names the field.
    """
    _check_choices(body.n, limits)
    tokens = await chat_tokens(
        body.messages,
        tokenizer,
        add_generation_prompt=body.add_generation_prompt,
        extra=body.chat_template_kwargs,
    )
    if not tokens:
        raise InvalidRequest("the messages are empty", param="messages", code="empty_prompt")
    room = _room(len(tokens), limits, "messages")
    wanted = body.max_completion_tokens or body.max_tokens or room
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    logprobs = body.top_logprobs if body.logprobs else None
    return _job(body, [Prompt(tokens, None)], wanted, logprobs, room, limits, seed, trace)


async def chat_tokens(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    extra: dict[str, Any] | None = None,
) -> list[int]:
    """Render ``messages`` with the model's template and tokenise the result."""
    plain = [_plain_message(message, at) for at, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, extra=extra
        )
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), param="messages", code="chat_template") from error
    return await encode_text(text, tokenizer, add_special_tokens=False)


async def encode_text(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Tokenise; long texts in a worker thread."""
    if len(text) <= ENCODE_INLINE_CHARS_MAX:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        None, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )


def check_token_ids(tokens: Iterable[object], vocab_size: int, param: str) -> list[int]:
    """Return ``tokens`` if all are ids of the vocabulary."""
    checked: list[int] = []
    for token in tokens:
        if type(token) is not int:
            raise InvalidRequest(f"{param}: {token!r} is not a token id", param=param)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token} is out of the vocabulary (0..{vocab_size - 1})",
                param=param,
                code="token_out_of_vocabulary",
            )
        checked.append(token)
    return checked


def _split_prompts(prompt: object, n: int, limits: Limits) -> list[str | list[object]]:
    if isinstance(prompt, str):
        items: list[str | list[object]] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        items = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(i, str | list) for i in prompt):
        items = prompt
    else:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            "lists, and not empty",
            param="prompt",
        )
    _check_choices(len(items) * n, limits)
    return items


def _check_choices(count: int, limits: Limits) -> None:
    if count > limits.choices_max:
        raise InvalidRequest(
            f"{count} choices in one request, at most {limits.choices_max} are served", param="n"
        )


async def _encode(
    item: str | list[object], tokenizer: Tokenizer, limits: Limits, *, add_special_tokens: bool
) -> Prompt:
    if isinstance(item, str):
        tokens = (
            await encode_text(item, tokenizer, add_special_tokens=add_special_tokens)
            if item
            else []
        )
        prompt = Prompt(tokens, item)
    else:
        prompt = Prompt(check_token_ids(item, limits.vocab_size, "prompt"), None)
    if not prompt.tokens:
        raise InvalidRequest("the prompt is empty", param="prompt", code="empty_prompt")
    return prompt


def _room(num_tokens: int, limits: Limits, param: str) -> int:
    """Tokens that may follow a prompt of ``num_tokens``."""
    if limits.max_model_len is None:
        return 2**31 - 1 - num_tokens
    if num_tokens >= limits.max_model_len:
        raise InvalidRequest(
            f"this model's maximum context length is {limits.max_model_len} tokens; "
            f"the prompt alone has {num_tokens}",
            param=param,
            code="context_length_exceeded",
        )
    return limits.max_model_len - num_tokens


def _job(
    body: GenerationBody,
    prompts: list[Prompt],
    max_tokens: int,
    logprobs: int | None,
    room: int,
    limits: Limits,
    seed: int,
    trace: bool,
) -> Job:
    if max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}, but only {room} tokens fit after the prompt "
            f"(maximum context length {limits.max_model_len})",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {body.min_tokens} exceeds max_tokens {max_tokens}", param="min_tokens"
        )
    return Job(
        prompts=prompts,
        n=body.n,
        sampling=_sampling(body, max_tokens, logprobs, limits, seed),
        stops=_stops(body.stops),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        cache_salt=body.cache_salt,
        stream=body.stream,
        include_usage=body.include_usage,
        echo=isinstance(body, CompletionBody) and body.echo,
        return_token_ids=body.return_token_ids,
        trace=trace,
    )


def _sampling(
    body: GenerationBody, max_tokens: int, logprobs: int | None, limits: Limits, seed: int
) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        seed=seed if body.seed is None else body.seed & SEED_MASK,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(
            check_token_ids(body.stop_token_ids, limits.vocab_size, "stop_token_ids")
        ),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, limits.vocab_size),
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key!r} is no token id of the vocabulary (0..{vocab_size - 1})",
                param="logit_bias",
            )
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(
                f"logit_bias: {value} is not between -100 and 100", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > STOPS_MAX:
        raise InvalidRequest(f"at most {STOPS_MAX} stop strings are accepted", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise InvalidRequest(
                f"a stop string has 1 to {STOP_CHARS_MAX} characters", param="stop"
            )
    return tuple(stops)


def _plain_message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """The message with its content as one string, as chat templates expect it."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"messages[{at}].role must be one of {sorted(_ROLES)}, got {role!r}",
            param=f"messages[{at}].role",
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(part, at) for part in content)
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise InvalidRequest(
            f"messages[{at}].content must be a string or a list of text parts",
            param=f"messages[{at}].content",
        )
    return {**message, "content": content}


def _text_part(part: object, at: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise InvalidRequest(
        f"messages[{at}].content: only text parts are supported, got {kind!r}",
        param=f"messages[{at}].content",
        code="unsupported",
    )
