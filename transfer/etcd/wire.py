"""etcd v3's JSON, as its gRPC gateway speaks it: the few calls that membership needs.

Owns the message types and nothing else. In this JSON 64-bit numbers travel as strings, bytes as
base64, and fields at their defaults are left out; ``decode`` takes all three.

Source: etcd's ``api/etcdserverpb/rpc.proto`` and ``api/mvccpb/kv.proto``, versions 3.4 and later.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

A = TypeVar("A")


class Header(msgspec.Struct, frozen=True):
    """``revision``: of the whole store when it answered."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """One key. ``lease`` is 0 where there is none (as etcd has it)."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()


class TxnStep(msgspec.Struct, frozen=True):
    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    succeeded: bool = False
    responses: tuple[TxnStep, ...] = ()


class LeaseGranted(msgspec.Struct, frozen=True):
    """``TTL`` may be more than what was asked for: etcd has a least one."""

    ID: int
    TTL: int


class LeaseState(msgspec.Struct, frozen=True):
    """``TTL``: seconds left; none left when the lease is gone."""

    TTL: int = 0
    grantedTTL: int = 0  # etcd's own spelling


class LeaseKept(msgspec.Struct, frozen=True):
    """``result`` is always there when etcd looked at the lease, also at one that has ended."""

    result: LeaseState | None = None


class Authenticated(msgspec.Struct, frozen=True):
    token: str


class StreamFailure(msgspec.Struct, frozen=True):
    """What ends a stream, or answers a request that is one inside of etcd (``lease/keepalive``)."""

    grpc_code: int = 0
    message: str = ""


class Failure(msgspec.Struct, frozen=True):
    """What etcd answers instead; ``code`` is gRPC's."""

    code: int = 0
    message: str = ""
    error: str | StreamFailure = ""


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct, frozen=True):
    """``compact_revision``: the history that was asked for is gone up to there."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class WatchLine(msgspec.Struct, frozen=True):
    """One line of a watch stream."""

    result: WatchResult | None = None
    error: StreamFailure | None = None


def decode(text: bytes | str, kind: type[A]) -> A:
    """Decode one answer; msgspec.DecodeError when it is none of ``kind``."""
    return msgspec.json.decode(text, type=kind, strict=False)


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that start with ``prefix``, which ends in ASCII."""
    assert prefix[-1] < 0xFF, "prefixes end in a slash"
    return prefix[:-1] + bytes([prefix[-1] + 1])


def put(key: bytes, value: bytes, lease: int | None = None) -> dict[str, Any]:
    """A step of a transaction: set a key, under a lease if there is one."""
    request: dict[str, Any] = {"key": key, "value": value}
    if lease is not None:
        request["lease"] = str(lease)
    return {"request_put": request}


def get(key: bytes) -> dict[str, Any]:
    """A step of a transaction: read a key."""
    return {"request_range": {"key": key}}


def is_at(key: bytes, mod_revision: int) -> dict[str, Any]:
    """A condition: the key was last set at this revision; 0: it is not there."""
    compared = {"target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}
    return {"key": key, **compared}


def is_under(key: bytes, lease: int) -> dict[str, Any]:
    """A condition: the key is there, under this lease."""
    return {"key": key, "target": "LEASE", "result": "EQUAL", "lease": str(lease)}
