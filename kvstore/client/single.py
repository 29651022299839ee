"""One page alone, at one node, with nothing in the way: ``put`` and ``get`` in one piece.

Owns the straight way only, which takes two thirds less code to run than that of many pages over
many nodes. Whatever is out of the ordinary (a node that does not answer, another writer, replicas,
a page that did not verify) is left to ``PageWriter`` and ``PageReader``, which begin anew: nothing
that was done here has to be undone.
"""

from __future__ import annotations

import asyncio

from kvstore.checksum import INLINE_NBYTES_MAX, checksum_of
from kvstore.client.link import StoreLink
from kvstore.client.links import ClientParts
from kvstore.client.offering import OUTCOMES, digests_of, offer, worth_offering
from kvstore.messages import AcquirePages, LeasedPage, PagesAcquired
from kvstore.store import (
    GetOutcome,
    GetPage,
    GetResult,
    PutOutcome,
    PutPage,
    PutPolicy,
    PutResult,
    TransferCount,
)
from kvstore.verify import believable
from transfer.errors import TransferError
from transfer.interface import Range, Region

NOTHING = TransferCount(0, 0)


async def put_one(
    parts: ClientParts, page: PutPage, *, source: Region, policy: PutPolicy, deadline_s: float
) -> PutResult | None:
    """Store one page on its node; None: not done, take the long way."""
    link = parts.links.first_writer(page.identity.key)
    copies = parts.links.replicas > 1 and parts.config.put_waits_for_replicas
    if link is None or copies or not worth_offering(parts, link, 1):
        return None
    sums = await digests_of(parts, [page], source)
    try:
        (status,) = await offer(
            parts, link, [page], sums, source=source, policy=policy, deadline_s=deadline_s
        )
    except TransferError:
        return None
    outcome = OUTCOMES.get(status)
    if outcome is None:
        return None
    parts.counters[f"put_{outcome}"] += 1
    return PutResult([outcome], _moved(parts) if outcome is PutOutcome.STORED else NOTHING)


async def get_one(
    parts: ClientParts, page: GetPage, *, into: Region, deadline_s: float, wait: bool
) -> GetResult | None:
    """Read one page from its node, if it is there and verifies; None: take the long way."""
    key = page.identity.key
    link = parts.links.only_reader(key)
    if link is None or parts.spec.page_nbytes > INLINE_NBYTES_MAX:
        return None
    sent_s = asyncio.get_running_loop().time()
    try:
        request = AcquirePages(keys=(key,), first=parts.releases.claim(link))
        reply = await link.call(request, PagesAcquired, deadline_s=deadline_s)
    except TransferError:
        return None
    if not reply.pages:
        return None if wait else _result(parts, GetOutcome.ABSENT)
    try:
        limit_s = min(deadline_s, sent_s + reply.lease_s)
        read = await _read(parts, link, reply, page, into, limit_s)
    finally:
        parts.releases.add(link, reply.incarnation, reply.lease_id)
    return _result(parts, GetOutcome.READ) if read else None


def _result(parts: ClientParts, outcome: GetOutcome) -> GetResult:
    parts.counters[f"get_{outcome}"] += 1
    return GetResult([outcome], _moved(parts) if outcome is GetOutcome.READ else NOTHING)


def _moved(parts: ClientParts) -> TransferCount:
    return TransferCount(1, parts.spec.page_nbytes)


async def _read(
    parts: ClientParts,
    link: StoreLink,
    reply: PagesAcquired,
    page: GetPage,
    into: Region,
    limit_s: float,
) -> bool:
    """Whether the one page of ``reply`` is here and verifies."""
    leased: LeasedPage = reply.pages[0]
    spec, start = parts.spec, page.local_offset
    nbytes = spec.page_nbytes
    plain = len(reply.pages) == 1 and not any(reply.spread)
    if not plain or not believable(leased.record, page.identity, spec):
        return False
    started_s = asyncio.get_running_loop().time()
    try:
        await parts.transfer.read(
            link.tokens(reply.incarnation).read_token,
            (Range(leased.offset, start, nbytes),),
            into=into,
            deadline_s=limit_s,
        )
    except TransferError as error:
        link.judge_bulk(error, started_s=started_s)
        return False
    link.bulk_done()
    digest = checksum_of(spec, into.view[start : start + nbytes], page.identity.num_tokens)
    return digest == leased.record.checksum
