"""Every error a request can end with, and its one mapping to HTTP.

::

    GatewayError             status  type                   code
    ├── InvalidRequest       400     invalid_request_error  (any)
    ├── NotFound             404     invalid_request_error  model_not_found | not_found
    ├── Forbidden            403     permission_error       forbidden
    ├── MethodNotAllowed     405     invalid_request_error  method_not_allowed
    ├── BodyTooLarge         413     invalid_request_error  body_too_large
    ├── TooManyRequests      429     rate_limit_error       overloaded         + Retry-After
    ├── GenerationFailed     500     server_error           generation_failed
    ├── Incomplete           502     server_error           incomplete
    ├── NoCapacity           503     server_error           no_capacity        + Retry-After
    └── TimedOut             504     server_error           timeout

Owns the tree and the OpenAI error object. The dispatcher raises these without knowing HTTP;
``gateway/app.py`` and the streams render them with ``error_object``.
"""

from __future__ import annotations

from typing import ClassVar


class GatewayError(Exception):
    """Root of the tree.

    Attributes:
        message: text for people; names the value and the remedy.
        param: the request field at fault.
        code: short machine-readable word.
        retry_after_s: when to try again, where that helps.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s


class InvalidRequest(GatewayError):
    """The request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class NotFound(GatewayError):
    """Unknown route or model."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class Forbidden(GatewayError):
    """The caller may not use this route."""

    status = 403
    type = "permission_error"
    default_code = "forbidden"


class MethodNotAllowed(GatewayError):
    """The route exists, with another method."""

    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class BodyTooLarge(GatewayError):
    """The body is longer than the configured limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class TooManyRequests(GatewayError):
    """More work than the gateway or every decode node accepts at once."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"


class GenerationFailed(GatewayError):
    """Every allowed attempt failed."""

    default_code = "generation_failed"


class Incomplete(GatewayError):
    """An order of the operator did not reach every node."""

    status = 502
    default_code = "incomplete"


class NoCapacity(GatewayError):
    """There is no decode node to serve the request."""

    status = 503
    default_code = "no_capacity"


class TimedOut(GatewayError):
    """The deadline of the request passed."""

    status = 504
    default_code = "timeout"


def error_object(error: GatewayError) -> dict[str, dict[str, str | None]]:
    """Return the OpenAI error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: GatewayError) -> dict[str, str]:
    """Return the response headers that belong to ``error``."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(error.retry_after_s)}
