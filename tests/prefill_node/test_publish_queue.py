"""The publish queue: turns, batches, references, and the end of a publication."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.page_allocator import PageAllocator
from engine.request import RequestId
from kvstore.page import PageId, PageKey
from kvstore.store import PageIdentity, PutOutcome, PutResult, TransferCount
from prefill_node.publish_queue import Batch, Publication, PublishQueue, QueuedPage


class Bench:
    def __init__(self, batch_pages: int = 4, num_pages: int = 64) -> None:
        self.allocator = PageAllocator(num_pages)
        self.queue = PublishQueue(self.allocator, batch_pages=batch_pages, timeout_s=10.0)
        self.ended: list[str] = []

    def publication(self, name: str) -> Publication:
        return Publication(RequestId(name), lambda: self.ended.append(name))

    def add(self, publication: Publication, depths: list[int]) -> list[PageId]:
        """Queue fresh pages of which the queue is the only holder afterwards."""
        page_ids = self.allocator.allocate(len(depths))
        assert page_ids is not None
        pages = [
            QueuedPage(
                PageIdentity(key=PageKey(bytes([d]) * 32), parent=b"", depth=d, tokens=b"\0" * 4), p
            )
            for d, p in zip(depths, page_ids, strict=True)
        ]
        self.queue.add(publication, pages)
        self.allocator.release(page_ids)
        return page_ids

    def check(self) -> None:
        held = Counter(self.queue.held())
        for page_id in map(PageId, range(1, self.allocator.num_pages)):
            assert self.allocator.refs(page_id) == held[page_id]


def stored(batch: Batch, outcome: PutOutcome = PutOutcome.STORED) -> PutResult:
    count = len(batch.pages) if outcome is PutOutcome.STORED else 0
    return PutResult([outcome] * len(batch.pages), TransferCount(count, count * 100))


def depths(batch: Batch | None) -> list[int]:
    return [page.identity.depth for page in batch.pages] if batch else []


def test_batches_are_consecutive_and_bounded() -> None:
    bench = Bench()
    publication = bench.publication("a")
    bench.add(publication, [0, 1, 2, 3, 4, 5, 9, 10])
    assert [depths(bench.queue.take(0)) for _ in range(4)] == [[0, 1, 2, 3], [4, 5], [9, 10], []]


def test_publications_take_turns() -> None:
    bench = Bench(batch_pages=2)
    long, short = bench.publication("long"), bench.publication("short")
    bench.add(long, [0, 1, 2, 3, 4, 5])
    bench.add(short, [7])
    taken = [bench.queue.take(0) for _ in range(4)]
    assert [batch.publication.request_id for batch in taken if batch] == [
        "long",
        "short",
        "long",
        "long",
    ]


def test_a_publication_ends_after_close_and_its_last_put() -> None:
    bench = Bench()
    publication = bench.publication("a")
    bench.add(publication, [0, 1])
    batch = bench.queue.take(0)
    assert batch is not None
    bench.queue.close(publication, 0)
    assert bench.ended == []
    bench.queue.complete(batch, stored(batch))
    assert bench.ended == ["a"]
    assert publication.ok
    assert (publication.pages_pushed, publication.bytes_pushed) == (2, 200)
    assert bench.allocator.num_held == 0


def test_pages_that_were_present_count_as_published_but_not_as_moved() -> None:
    bench = Bench()
    publication = bench.publication("a")
    bench.add(publication, [0, 1])
    batch = bench.queue.take(0)
    assert batch is not None
    bench.queue.complete(batch, stored(batch, PutOutcome.PRESENT))
    bench.queue.close(publication, 0)
    assert publication.ok
    assert publication.pages_pushed == 0


@pytest.mark.parametrize("outcome", [PutOutcome.REFUSED, PutOutcome.FAILED, None])
def test_a_failed_put_drops_what_is_pending(outcome: PutOutcome | None) -> None:
    bench = Bench(batch_pages=1)
    publication = bench.publication("a")
    bench.add(publication, [0, 1, 2])
    batch = bench.queue.take(0)
    assert batch is not None
    bench.queue.complete(batch, stored(batch, outcome) if outcome else None)
    assert bench.allocator.num_held == 0
    assert bench.queue.take(0) is None
    bench.add(publication, [3])
    assert bench.allocator.num_held == 0, "more of it would be in vain"
    bench.queue.close(publication, 0)
    assert bench.ended == ["a"]
    assert not publication.ok


def test_cancel_holds_the_pages_of_a_running_put_until_it_has_ended() -> None:
    bench = Bench(batch_pages=2)
    publication = bench.publication("a")
    first, second, third = bench.add(publication, [0, 1, 2])
    batch = bench.queue.take(0)
    assert batch is not None
    bench.queue.cancel(publication)
    bench.queue.cancel(publication)
    assert [bench.allocator.refs(p) for p in (first, second, third)] == [1, 1, 0]
    assert bench.ended == []
    bench.queue.complete(batch, stored(batch))
    assert bench.ended == ["a"]
    assert not publication.ok
    assert bench.allocator.num_held == 0


def test_pages_that_are_pending_past_the_deadline_are_given_up() -> None:
    bench = Bench()
    publication = bench.publication("a")
    bench.add(publication, [0, 1])
    bench.queue.close(publication, now_s=0)
    assert bench.queue.take(now_s=10.0) is None
    assert bench.ended == ["a"]
    assert not publication.ok
    assert bench.allocator.num_held == 0


@pytest.mark.parametrize("seed", range(6))
def test_fuzz_references_equal_pending_and_running_pages(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(batch_pages=3)
    publications = [bench.publication(str(i)) for i in range(5)]
    running: list[Batch] = []
    for now_s in range(300):
        publication = rng.choice(publications)
        action = rng.random()
        if action < 0.3 and not publication.closed and bench.allocator.num_free > 5:
            start = rng.randint(0, 50)
            bench.add(publication, list(range(start, start + rng.randint(1, 5))))
        elif action < 0.55:
            batch = bench.queue.take(now_s)
            running += [batch] if batch else []
        elif action < 0.9 and running:
            batch = running.pop(rng.randrange(len(running)))
            outcome = rng.choice([PutOutcome.STORED, PutOutcome.STORED, PutOutcome.FAILED])
            bench.queue.complete(batch, rng.choice([stored(batch, outcome), None]))
        elif action > 0.98:
            if rng.random() < 0.5:
                bench.queue.cancel(publication)
            else:
                bench.queue.close(publication, now_s)
        bench.check()
    for publication in publications:
        bench.queue.cancel(publication)
    for batch in running:
        bench.queue.complete(batch, stored(batch))
    assert bench.allocator.num_held == 0
    assert sorted(bench.ended) == sorted(p.request_id for p in publications)
