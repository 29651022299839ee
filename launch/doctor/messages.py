"""What the two sides of ``kvferry doctor`` say to each other, over kvferry's control channels.

Owns the msgspec structs. Bulk bytes never travel here.

::

    OpenMemory ─▶ MemoryOpened ... (a stream: the memory lives exactly as long as it)
                     FillMemory ─▶ Done,  CheckMemory ─▶ MemoryChecked
                     OpenSocket ─▶ SocketOpened     (the plain socket that tcp is held against)
"""

from __future__ import annotations

import msgspec

CONTRACT = {"service": "kvferry-doctor/1"}  # a hello to anything else is refused


class OpenMemory(msgspec.Struct, frozen=True, tag="doctor_open_memory"):
    """Start an engine of ``transport`` that owns ``nbytes`` for me. Fails as ``unavailable``."""

    transport: str
    nbytes: int


class MemoryOpened(msgspec.Struct, frozen=True, tag="doctor_memory_opened"):
    """The token grants reading and writing."""

    token: bytes


class FillMemory(msgspec.Struct, frozen=True, tag="doctor_fill_memory"):
    """Write pattern ``seed`` over your first ``nbytes``."""

    seed: int
    nbytes: int


class CheckMemory(msgspec.Struct, frozen=True, kw_only=True, tag="doctor_check_memory"):
    """Compare with pattern ``seed``: as a write of this case leaves your memory, or as filled."""

    seed: int
    page_nbytes: int
    batch: int
    written: bool


class MemoryChecked(msgspec.Struct, frozen=True, tag="doctor_memory_checked"):
    """``wrong`` says which byte differs; empty when none does."""

    wrong: str


class OpenSocket(msgspec.Struct, frozen=True, tag="doctor_open_socket"):
    """Listen for one plain connection; see ``plain_socket.py``."""


class SocketOpened(msgspec.Struct, frozen=True, tag="doctor_socket_opened"):
    """Where, and the bytes that the connection must begin with."""

    host: str
    port: int
    key: bytes


class AreYouThere(msgspec.Struct, frozen=True, tag="doctor_are_you_there"):
    """Answer ``Done``, whether or not you hold memory for me."""


class Done(msgspec.Struct, frozen=True, tag="doctor_done"):
    """It was done."""
