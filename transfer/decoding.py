"""Decodes msgpack that somebody else wrote, and names what can be wrong with it.

The one place where errors of msgspec become ``FrameInvalid``. Owns no format: each wire passes its
own decoder. Knows no sockets.

Nesting matters: values of fields that a decoder does not know are skipped by recursion, so a few
hundred bytes of ``[[[[...`` exhaust the interpreter's recursion limit. That is the sender's fault
as much as a wrong type is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from transfer.errors import FrameInvalid

T = TypeVar("T")
Data = bytes | memoryview
MAX_REASON_NCHARS = 200  # msgspec quotes what it read, which may be megabytes


def decode_foreign(data: Data, decode: Callable[[Data], T], what: str) -> T:
    """Return ``decode(data)``, a method of a msgspec decoder.

    Raises:
        FrameInvalid: the bytes are not ``what`` (used in the message: "a region token").
    """
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:MAX_REASON_NCHARS]
        raise FrameInvalid(f"{what} does not decode: {reason}") from error
