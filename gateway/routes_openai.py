"""The OpenAI routes: completions, chat completions, models; and vLLM's tokenize, detokenize.

Owns paths and the order of the checks (body, model, request, room) of each route. All else is in
the modules it calls.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.admission import (
    Job,
    chat_job,
    chat_tokens,
    check_model,
    check_token_ids,
    completion_job,
    encode_text,
)
from gateway.body import read_body
from gateway.chat import ChatWriter
from gateway.completions import CompletionWriter
from gateway.errors import InvalidRequest
from gateway.openai_schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from gateway.openai_wire import ModelCard, ModelList
from gateway.responses import json_response, struct_response
from gateway.serving import Gateway, JobRun, while_connected
from gateway.streams import JobStream

TRACE_HEADER = "x-kvferry-trace"

router = APIRouter()


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def _wants_trace(request: Request) -> bool:
    return request.headers.get(TRACE_HEADER, "") == "1"


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse_body(await read_body(request, gateway.config.max_body_nbytes), CompletionBody)
    check_model(body.model, gateway.served_names)
    seed = gateway.dispatcher.new_seed()
    job = await completion_job(
        body, gateway.tokenizer, gateway.limits, seed=seed, trace=_wants_trace(request)
    )
    run = JobRun(gateway, job, gateway.dispatcher.new_request_id("cmpl"))
    return await _respond(request, job, run, CompletionWriter(run, body.model, _now(gateway)))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse_body(await read_body(request, gateway.config.max_body_nbytes), ChatBody)
    check_model(body.model, gateway.served_names)
    seed = gateway.dispatcher.new_seed()
    job = await chat_job(
        body, gateway.tokenizer, gateway.limits, seed=seed, trace=_wants_trace(request)
    )
    run = JobRun(gateway, job, gateway.dispatcher.new_request_id("chatcmpl"))
    return await _respond(request, job, run, ChatWriter(run, body.model, _now(gateway)))


async def _respond(
    request: Request, job: Job, run: JobRun, writer: CompletionWriter | ChatWriter
) -> Response:
    if job.stream:
        return JobStream(run, writer, request.url.path)
    await while_connected(request.receive, run.run(writer.collect))
    return struct_response(request, writer.response())


@router.get("/v1/models")
async def models(request: Request) -> Response:
    gateway = gateway_of(request)
    cards = [_card(gateway, name) for name in gateway.served_names]
    return struct_response(request, ModelList(data=cards))


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    gateway = gateway_of(request)
    check_model(model, gateway.served_names)
    return struct_response(request, _card(gateway, model))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse_body(await read_body(request, gateway.config.max_body_nbytes), TokenizeBody)
    if body.model is not None:
        check_model(body.model, gateway.served_names)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = await encode_text(
            body.prompt, gateway.tokenizer, add_special_tokens=body.add_special_tokens
        )
    else:
        tokens = await chat_tokens(
            body.messages or [],
            gateway.tokenizer,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
    length = gateway.limits.max_model_len
    return json_response(request, {"count": len(tokens), "max_model_len": length, "tokens": tokens})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse_body(await read_body(request, gateway.config.max_body_nbytes), DetokenizeBody)
    if body.model is not None:
        check_model(body.model, gateway.served_names)
    tokens = check_token_ids(body.tokens, gateway.limits.vocab_size, "tokens")
    text = gateway.tokenizer.decode(tokens, skip_special_tokens=False)
    return json_response(request, {"prompt": text})


def _now(gateway: Gateway) -> int:
    return int(gateway.wall_clock())


def _card(gateway: Gateway, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=gateway.started_at,
        root=gateway.config.model,
        max_model_len=gateway.limits.max_model_len,
    )
