"""A small HTTP client for readiness, status and the demo: JSON, and server-sent events.

Owns one connection per call, on the standard library. Blocking: async callers use a thread.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from launch.errors import StartError


class Response(NamedTuple):
    status: int
    body: Any


def get_json(url: str, *, timeout_s: float) -> Response | None:
    """Return status and JSON body; None when nobody answers."""
    return _json_of(url, "GET", None, {}, timeout_s)


def post_json(
    url: str, body: Mapping[str, Any], *, headers: Mapping[str, str], timeout_s: float
) -> Response | None:
    """Return status and JSON body of a POST; None when nobody answers."""
    sent = {"content-type": "application/json", **headers}
    return _json_of(url, "POST", json.dumps(body), sent, timeout_s)


def _json_of(
    url: str, method: str, body: str | None, headers: Mapping[str, str], timeout_s: float
) -> Response | None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(method, parts.path, body=body, headers=dict(headers))
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    try:
        return Response(response.status, json.loads(text))
    except ValueError:
        return Response(response.status, None)


def post_events(
    url: str, body: Mapping[str, Any], *, headers: Mapping[str, str], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream until ``[DONE]``.

    Raises:
        StartError: a status other than 200, an error object, or a stream that ends early.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        sent = {"content-type": "application/json", **headers}
        connection.request("POST", parts.path, body=json.dumps(body), headers=sent)
        response = connection.getresponse()
        if response.status != 200:
            raise StartError(f"{url} answered {response.status}: {response.read().decode()}")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise StartError(f"{url}: {event['error']}")
                yield event
        raise StartError(f"{url}: the stream ended without [DONE]")
    except (OSError, http.client.HTTPException) as error:
        raise StartError(f"{url}: {error}") from error
    finally:
        connection.close()
