"""Small directories for tests, and the calls that they make all the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.messages import pack_keys, states_of
from kvstore.server.directory import Directory
from kvstore.server.entry import Reservation
from kvstore.server.segment import Segment, Slot
from kvstore.store import DEFAULT_POLICY, PageIdentity, PageState, PutPolicy
from tests.kvstore.pages import SPEC, sequence

LEASE_S = 5.0
CHECKSUM = b"c" * 16


def directory(
    num_pages: int,
    *,
    high: float = 1.0,
    low: float = 1.0,
    quotas: Mapping[bytes, float] | None = None,
    **options: Any,
) -> Directory:
    nbytes = num_pages * SPEC.page_nbytes
    return Directory(
        Segment(nbytes),
        lease_s=LEASE_S,
        high=int(nbytes * high),
        low=int(nbytes * low),
        quotas=quotas,
        **options,
    )


def single(number: int) -> PageIdentity:
    """A page without relatives."""
    return sequence(range(number * 10, number * 10 + 4))[0]


def reserve(
    d: Directory, page: PageIdentity, now_s: float = 0.0, policy: PutPolicy = DEFAULT_POLICY
) -> Reservation:
    return d.reserve([page], SPEC, now_s, policy)[0]


def grant(
    d: Directory, page: PageIdentity, now_s: float = 0.0, policy: PutPolicy = DEFAULT_POLICY
) -> Slot:
    slot = reserve(d, page, now_s, policy).slot
    assert slot is not None
    return slot


def store(
    d: Directory,
    pages: list[PageIdentity],
    now_s: float = 0.0,
    policy: PutPolicy = DEFAULT_POLICY,
) -> None:
    for page in pages:
        assert d.commit(page.key, grant(d, page, now_s, policy).generation, CHECKSUM)


def match(d: Directory, pages: list[PageIdentity], now_s: float = 0.0) -> list[PageState]:
    return states_of(d.match(pack_keys([page.key for page in pages]), now_s))


def present(d: Directory, pages: list[PageIdentity]) -> list[bool]:
    """Which of ``pages`` are in memory."""
    return [d.state(page.key) is PageState.READY for page in pages]
