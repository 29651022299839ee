"""Routes for operators: health, ready, metrics.

Owns what healthy and ready mean. *Healthy*: this process and all its service threads and tasks
live; load, a missing node or a long prefill never make it red. *Ready*: a request could be served
now, so a decode node is reachable; the rest that is missing is listed as degraded.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gateway.responses import json_response
from gateway.routes_openai import gateway_of
from gateway.serving import Gateway
from transfer.identity import Role

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    gateway = gateway_of(request)
    checks = {"dispatcher": gateway.dispatcher.healthy}
    checks.update({name: bool(check()) for name, check in gateway.health_checks.items()})
    healthy = all(checks.values())
    body = {"status": "ok" if healthy else "failed", "checks": checks}
    return json_response(request, body, 200 if healthy else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    gateway = gateway_of(request)
    usable = gateway.dispatcher.placement.links.usable(Role.DECODE)
    body = {"ready": bool(usable), "degraded": degraded(gateway)}
    return json_response(request, body, 200 if usable else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(gateway_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def degraded(gateway: Gateway) -> list[str]:
    """What is missing or impaired, in words."""
    links = gateway.dispatcher.placement.links
    found: list[str] = []
    if not gateway.membership.connected:
        keeper = gateway.config.members_at
        found.append(f"membership: {keeper} does not answer; the last view is used")
    for role, loss in (
        (Role.DECODE, "no request can be served"),
        (Role.PREFILL, "decode nodes compute prompts themselves"),
    ):
        if not links.usable(role):
            found.append(f"no usable {role.value} node: {loss}")
        for link in links.of_role(role):
            if link.channel is None:
                found.append(f"{link.name} is not reachable: {link.last_error or 'connecting'}")
            elif link.member.status.draining:
                found.append(f"{link.name} is draining")
    if not gateway.membership.view.has_store:
        found.append("no store node: pages cannot move, prompts are computed where they are needed")
    return found
