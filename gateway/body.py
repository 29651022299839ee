"""Reading request bodies within a limit.

Owns ``read_body``: the limit is enforced on the stated length and again while bytes arrive, so that
no client can make the gateway hold more. Knows no JSON.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from gateway.errors import BodyTooLarge
from gateway.serving import ClientGone


async def read_body(request: Request, nbytes_max: int) -> bytes:
    """Return the whole body.

    Raises:
        BodyTooLarge: it is, or says it is, longer than ``nbytes_max``.
        ClientGone: the client left before it was complete.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and int(stated) > nbytes_max:
        raise _too_large(nbytes_max)
    chunks: list[bytes] = []
    nbytes = 0
    try:
        async for chunk in request.stream():
            nbytes += len(chunk)
            if nbytes > nbytes_max:
                raise _too_large(nbytes_max)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)


def _too_large(nbytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body exceeds {nbytes_max} bytes")
