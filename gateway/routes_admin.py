"""Admin routes: the cluster as the gateway sees it, and why a prompt would go where.

Owns the access rule: loopback peers, or whoever presents the admin token. Knows no HTTP of others.
"""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.admission import chat_tokens, check_token_ids, encode_text
from gateway.body import read_body
from gateway.errors import Forbidden, InvalidRequest
from gateway.openai_schema import ExplainBody, parse_body
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
