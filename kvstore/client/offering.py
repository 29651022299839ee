"""Offers pages to a node, which reads them from here: a put in one message.

Owns one offer. A node that could not read from this process is not offered anything for a while:
it is written to instead, which needs no way back.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.checksum import PageBytes, checksums
from kvstore.client.link import StoreLink, check_count
from kvstore.client.links import ClientParts
from kvstore.messages import OfferedPage, PagesTaken, TakePages, TakeStatus
from kvstore.store import PutOutcome, PutPage, PutPolicy
from transfer.interface import Region

OUTCOMES = {  # of what is settled by one offer
    TakeStatus.TAKEN: PutOutcome.STORED,
    TakeStatus.PRESENT: PutOutcome.PRESENT,
    TakeStatus.REFUSED: PutOutcome.REFUSED,
    TakeStatus.COLLISION: PutOutcome.REFUSED,
}


def worth_offering(parts: ClientParts, link: StoreLink, num_pages: int) -> bool:
    """The pages are few bytes, and ``link``'s node has been able to read from here."""
    nbytes = num_pages * parts.spec.page_nbytes
    return nbytes <= parts.config.offer_nbytes_max and link.takes_offers


async def digests_of(
    parts: ClientParts, pages: Sequence[PutPage], source: Region
) -> Sequence[bytes]:
    """The checksums of ``pages``, which lie in ``source``."""
    spec, nbytes, view = parts.spec, parts.spec.page_nbytes, source.view
    return await checksums(
        [
            PageBytes(
                spec,
                view[page.local_offset : page.local_offset + nbytes],
                page.identity.num_tokens,
            )
            for page in pages
        ]
    )


async def offer(
    parts: ClientParts,
    link: StoreLink,
    pages: Sequence[PutPage],
    sums: Sequence[bytes],
    *,
    source: Region,
    policy: PutPolicy,
    deadline_s: float,
    wait_s: float = 0.0,
) -> tuple[TakeStatus, ...]:
    """Have the node take ``pages``, of checksums ``sums``, which may wait for room; what became of
    each.

    Raises:
        TransferError: the node did not answer; it may have taken them all the same.
    """
    message = TakePages(
        spec=parts.spec,
        read_token=source.export("r"),
        pages=tuple(
            OfferedPage(page.identity, page.local_offset, digest)
            for page, digest in zip(pages, sums, strict=True)
        ),
        policy=policy,
        wait_s=wait_s,
    )
    reply = await link.call(message, PagesTaken, deadline_s=deadline_s, wait_s=wait_s)
    check_count(reply.statuses, len(pages))
    if TakeStatus.UNREAD in reply.statuses:
        link.cannot_read()
        parts.counters["unread_offers"] += 1
    return reply.statuses
