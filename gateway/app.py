"""The FastAPI application: routes and errors around a dispatcher.

Owns the assembly and the rule that every error, of ours or the framework's, has the OpenAI shape.

The dispatcher belongs to whoever built it (``launch``, a test): start it before the first request
and close it after the last. The app starts and closes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway import routes_admin, routes_openai, routes_ops
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.errors import (
    GatewayError,
    GenerationFailed,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
)
from gateway.metrics import Metrics
from gateway.responses import error_response, gone_response
from gateway.serving import ClientGone, Gateway
from gateway.tokenizer import Tokenizer
from transfer.membership import Membership

HealthChecks = Mapping[str, Callable[[], bool]]


def create_app(
    config: GatewayConfig,
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    membership: Membership,
    *,
    health_checks: HealthChecks | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Return the application. ``app.state.gateway`` is the ``Gateway`` that the routes share.

    Args:
        health_checks: name → "alive?", for threads and services that live beside the app.
        wall_clock: seconds since the epoch, for ``created``.
    """
    app = FastAPI(title="kvferry", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gateway = Gateway(
        config=config,
        dispatcher=dispatcher,
        tokenizer=tokenizer,
        membership=membership,
        metrics=Metrics(dispatcher, membership),
        wall_clock=wall_clock,
        started_at=int(wall_clock()),
        health_checks=dict(health_checks or {}),
    )
    for routes in (routes_openai, routes_ops, routes_admin):
        app.include_router(routes.router)
    app.add_exception_handler(GatewayError, _on_gateway_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(request, NotFound(f"unknown route: {where}"))
    if error.status_code == 405:
        return error_response(request, MethodNotAllowed(f"method not allowed: {where}"))
    return error_response(request, InvalidRequest(str(error.detail)))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return gone_response(request)


async def _on_bug(request: Request, error: Exception) -> Response:
    """A fault of ours: the traceback goes to the log, by the server."""
    return error_response(request, GenerationFailed("internal error", code="internal"))
