"""Request bodies of the OpenAI routes, field by field.

Owns the pydantic models, the list of fields that are accepted and ignored, and the translation of
validation failures into OpenAI errors that name the ``param``. Strict: no number from a string, no
NaN. Fields that nobody knows are refused, the internal ones of the nodes (``request_id``,
``emitted``, ``priority``) among them. Knows no tokenizer, no vocabulary, no limits of the model.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.request import LOGPROBS_MAX, STOP_TOKEN_IDS_MAX
from gateway.errors import InvalidRequest

CHOICES_MAX = 128
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
LOGIT_BIAS_MAX = 300
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
COUNT_MAX = 2**31 - 1

# OpenAI fields that change nothing here: accounting, hints for caches and routing.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "verbosity",
        "reasoning_effort",
    }
)
# Known OpenAI fields that would change the answer and are not offered.
UNSUPPORTED_FIELDS = frozenset(
    {"tools", "functions", "function_call", "audio", "web_search_options", "suffix", "moderation"}
)

B = TypeVar("B", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class ResponseFormat(_Strict):
    type: Literal["text"]


class GenerationBody(_Strict):
    """What both generating routes share. Meanings and defaults are vLLM's."""

    model: str
    n: int = Field(default=1, ge=1, le=CHOICES_MAX)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=COUNT_MAX)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=SEED_MIN, le=SEED_MAX)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=STOP_TOKEN_IDS_MAX)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=LOGIT_BIAS_MAX)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=COUNT_MAX)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """``POST /v1/completions``. ``prompt`` is checked by ``gateway/admission.py``."""

    prompt: Any
    best_of: int | None = None
    max_tokens: int = Field(default=16, ge=1, le=COUNT_MAX)
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    echo: bool = False
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=LOGPROBS_MAX)
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TokenizeBody(_Strict):
    """``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(_Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class ExplainBody(_Strict):
    """``POST /admin/explain``: the prompt whose routing is asked for."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    cache_salt: str | None = None
    add_special_tokens: bool = True


class ClearBody(_Strict):
    """``POST /admin/cache/clear``: which namespace, by name or by what makes it; or all.

    ``salt`` is the ``cache_salt`` of requests.
    """

    namespace: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    model: str | None = None
    salt: str | None = Field(default=None, min_length=1, max_length=1024)
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    all: bool = False


def parse_body(raw: bytes, body_type: type[B]) -> B:
    """Return ``raw`` as ``body_type``; ``null`` means absent.

    Raises:
        InvalidRequest: no JSON, no object, or a field that is missing, wrong, or not offered.
    """
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    fields = {name: value for name, value in document.items() if value is not None}
    known = body_type.model_fields
    for name in [name for name in fields if name not in known]:
        if name in UNSUPPORTED_FIELDS and fields[name]:
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported")
        if name in IGNORED_FIELDS or name in UNSUPPORTED_FIELDS:
            del fields[name]
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _translate(error) from error


def _translate(error: ValidationError) -> InvalidRequest:
    """The first failure, with the OpenAI way to name a field: ``messages[0].role``."""
    first = error.errors(include_url=False, include_context=False)[0]
    location = [part for part in first["loc"] if not _is_union_member(part)]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"unrecognized request argument: {param}", param=param, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return InvalidRequest(
            f"{param} is required", param=param, code="missing_required_parameter"
        )
    given = msgspec.json.encode(first["input"], enc_hook=repr).decode()
    shown = given if len(given) <= 80 else given[:77] + "..."
    return InvalidRequest(
        f"{param}: {first['msg']}, got {shown}", param=param, code="invalid_value"
    )


def _is_union_member(part: int | str) -> bool:
    """Pydantic adds the tried member of a union to the location; people did not write it."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
