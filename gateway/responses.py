"""JSON responses, encoded by msgspec and counted by route and status.

Owns the two helpers that routes return through and the one that renders errors. Knows no contents.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import GatewayError, error_headers, error_object
from gateway.openai_wire import encode
from gateway.streams import CLIENT_GONE_STATUS

_JSON = "application/json"
UNKNOWN_ROUTE = "unknown"  # one label for all of them: paths of scanners must not grow the metrics


def struct_response(request: Request, body: msgspec.Struct) -> Response:
    _count(request, 200)
    return Response(encode(body), media_type=_JSON)


def json_response(request: Request, body: Any, status: int = 200) -> Response:
    _count(request, status)
    return Response(msgspec.json.encode(body), status_code=status, media_type=_JSON)


def error_response(request: Request, error: GatewayError) -> Response:
    """Render ``error`` as the OpenAI error object."""
    _count(request, error.status)
    return Response(
        msgspec.json.encode(error_object(error)),
        status_code=error.status,
        headers=error_headers(error),
        media_type=_JSON,
    )


def gone_response(request: Request) -> Response:
    """What is returned when nobody is there to read it."""
    _count(request, CLIENT_GONE_STATUS)
    return Response(status_code=CLIENT_GONE_STATUS)


def _count(request: Request, status: int) -> None:
    metrics = request.app.state.gateway.metrics
    route = getattr(request.scope.get("route"), "path", UNKNOWN_ROUTE)
    metrics.http_requests.labels(route, str(status)).inc()
