"""The slot allocator: full use, slabs of several sizes, generations."""

from __future__ import annotations

import itertools
import random

from kvstore.server.segment import Segment, Slot


def test_a_segment_of_eight_pages_gives_eight_slots_in_order() -> None:
    segment = Segment(8 * 100)
    slots = [segment.allocate(100) for _ in range(8)]
    assert [slot.offset for slot in slots if slot] == [i * 100 for i in range(8)]
    assert segment.allocate(100) is None
    assert not segment.can_allocate(100)
    segment.check()


def test_generations_are_never_used_again() -> None:
    segment = Segment(100)
    seen = []
    for _ in range(5):
        slot = segment.allocate(100)
        assert slot is not None
        seen.append(slot.generation)
        segment.free(slot)
    assert len(set(seen)) == 5


def test_an_empty_slab_serves_another_size() -> None:
    segment = Segment(1600)
    small = [slot for _ in range(16) if (slot := segment.allocate(100))]
    assert len(small) == 16
    assert segment.allocate(400) is None
    for slot in small:
        segment.free(slot)
    large = [slot for _ in range(4) if (slot := segment.allocate(400))]
    assert len(large) == 4
    segment.check()


def test_sizes_coexist_and_count_their_bytes() -> None:
    segment = Segment(64 * 100)
    a, b = segment.allocate(100), segment.allocate(250)
    assert a is not None
    assert b is not None
    assert segment.used_nbytes == 350
    assert segment.num_used == 2
    segment.check()


def test_a_page_larger_than_a_slab_gets_a_slab_of_its_own() -> None:
    segment = Segment(1600)  # slabs of 100 bytes
    assert segment.allocate(1600) == Slot(0, 1600, 1)
    assert segment.num_free_slots(1600) == 0
    segment.check()


def test_random_use_never_hands_out_overlapping_slots() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        segment = Segment(rng.randrange(500, 5000))
        held: dict[int, Slot] = {}
        for _ in range(400):
            if held and rng.random() < 0.45:
                segment.free(held.pop(rng.choice(list(held))))
            else:
                slot = segment.allocate(rng.choice([16, 50, 128, 600]))
                if slot is not None:
                    assert slot.generation not in held
                    held[slot.generation] = slot
            spans = sorted((s.offset, s.offset + s.nbytes) for s in held.values())
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), seed
            assert all(end <= segment.nbytes for _, end in spans)
            assert segment.used_nbytes == sum(s.nbytes for s in held.values())
            segment.check()
        for slot in held.values():
            segment.free(slot)
        segment.check()
        assert segment.num_used == 0
        assert segment.can_allocate(segment.nbytes), "free extents did not join"
