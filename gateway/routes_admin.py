"""Admin routes: the cluster as the gateway sees it, why a prompt would go where, clearing caches.

Owns the access rule: loopback peers, or whoever presents the admin token. Knows no HTTP of others.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.admission import chat_tokens, check_model, check_token_ids, encode_text
from gateway.body import read_body
from gateway.clearing import CLEAR_S, what_is_left
from gateway.errors import Forbidden, Incomplete, InvalidRequest, NoCapacity, error_object
from gateway.openai_schema import ClearBody, ExplainBody, parse_body
from gateway.responses import json_response
from gateway.routes_openai import gateway_of
from gateway.serving import Gateway
from transfer.identity import Role
from transfer.membership import Member


def require_admin(request: Request) -> None:
    """Raise ``Forbidden`` unless the peer is on loopback or presents the admin token."""
    if _is_loopback(request.client.host if request.client else ""):
        return
    token = gateway_of(request).config.admin_token
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token and hmac.compare_digest(given.encode(), token.encode()):
        return
    raise Forbidden("/admin is open to loopback, or with the admin token as bearer")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_CLEARED = (Role.PREFILL, Role.DECODE, Role.STORE)

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)])


@router.get("/cluster")
async def cluster(request: Request) -> Response:
    gateway = gateway_of(request)
    view = gateway.membership.view
    body = {
        "model": gateway.config.model,
        "view_version": view.version,
        "connected": gateway.membership.connected,
        "members": [_member(gateway, member) for member in view.members],
    }
    return json_response(request, body)


@router.post("/explain")
async def explain(request: Request) -> Response:
    gateway = gateway_of(request)
    body = parse_body(await read_body(request, gateway.config.max_body_nbytes), ExplainBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    tokens = await _tokens(gateway, body)
    if not tokens:
        raise InvalidRequest("the prompt is empty", param="prompt", code="empty_prompt")
    ranking = await gateway.dispatcher.explain(tokens, body.cache_salt)
    candidates = {role: [c._asdict() for c in found] for role, found in ranking.items()}
    return json_response(request, {"num_tokens": len(tokens), "candidates": candidates})


@router.post("/cache/clear")
async def clear_cache(request: Request) -> Response:
    gateway = gateway_of(request)
    order = await _clear_body(request)
    namespace = _namespace(gateway, order)
    deadline_s = asyncio.get_running_loop().time() + CLEAR_S
    nodes = await gateway.dispatcher.clear_caches(namespace, deadline_s=deadline_s)
    report = {
        "namespace": None if namespace is None else namespace.hex(),
        "named_by": _named_by(gateway, order),
        "pages": {role: sum(n.num_pages for n in nodes if n.role == role) for role in _CLEARED},
        "nodes": [node._asdict() for node in nodes],
    }
    left = what_is_left(nodes)
    if left is None:
        return json_response(request, report)
    error = Incomplete(left)
    return json_response(request, error_object(error) | report, error.status)


async def _clear_body(request: Request) -> ClearBody:
    """The order: a JSON object, or without a body the query."""
    raw = await read_body(request, gateway_of(request).config.max_body_nbytes)
    if raw:
        return parse_body(raw, ClearBody)
    query: dict[str, Any] = dict(request.query_params)
    if query.get("all") in ("true", "false"):
        query["all"] = query["all"] == "true"
    return parse_body(msgspec.json.encode(query), ClearBody)


def _namespace(gateway: Gateway, body: ClearBody) -> bytes | None:
    """Which namespace is to be cleared; None: all."""
    parts = (body.model, body.salt, body.adapter)
    by_parts = any(part is not None for part in parts)
    if (body.namespace is not None) + by_parts + body.all != 1:
        raise InvalidRequest(
            "give one of: namespace (64 hex digits); model, salt and adapter; all=true",
            param="namespace",
        )
    if body.namespace is not None:
        return bytes.fromhex(body.namespace)
    if body.all:
        return None
    if body.model is not None:
        check_model(body.model, gateway.served_names)
    facts = gateway.dispatcher.facts
    if facts is None:
        raise NoCapacity("no node has stated its model yet: give the namespace in hex")
    return facts.namespace(body.salt, body.adapter)


def _named_by(gateway: Gateway, order: ClearBody) -> dict[str, str | None] | None:
    """What the namespace was computed from; None: it was given as it is, or all were."""
    if order.all or order.namespace is not None:
        return None
    facts = gateway.dispatcher.facts
    model = gateway.config.model if facts is None else facts.model
    return {"model": model, "salt": order.salt, "adapter": order.adapter}


async def _tokens(gateway: Gateway, body: ExplainBody) -> list[int]:
    if isinstance(body.prompt, str):
        return await encode_text(
            body.prompt, gateway.tokenizer, add_special_tokens=body.add_special_tokens
        )
    if body.prompt is not None:
        return check_token_ids(body.prompt, gateway.limits.vocab_size, "prompt")
    return await chat_tokens(body.messages or [], gateway.tokenizer)


def _member(gateway: Gateway, member: Member) -> dict[str, object]:
    info = member.info
    role = info.identity.role
    placement = gateway.dispatcher.placement
    shown: dict[str, object] = {
        "node_id": member.node_id,
        "role": role.value,
        "incarnation": info.identity.incarnation,
        "address": info.address,
        "transport": info.transport,
        "contract": info.contract,
        "labels": info.labels,
        "draining": member.status.draining,
        "gauges": member.status.gauges,
        "heartbeat_age_s": member.heartbeat_age_s,
    }
    if role in (Role.PREFILL, Role.DECODE):
        link = next((x for x in placement.links.of_role(role) if x.name == member.node_id), None)
        shown["reachable"] = link is not None and link.channel is not None
        shown["last_error"] = link.last_error if link else ""
        shown["num_in_flight"] = placement.routers[role].num_requests(member.node_id)
        shown["index_pages"] = placement.index.num_pages(member.node_id)
        shown["index_in_sync"] = placement.index.in_sync(member.node_id)
    return shown
