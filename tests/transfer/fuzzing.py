"""What all fuzz tests share: seeds, a mutator, and the alarms that no bytes of a peer may raise.

Every example has a seed of its own: it is in the message of a failure, and
``KVFERRY_FUZZ_SEED=<seed> KVFERRY_FUZZ=0`` runs that example alone. ``KVFERRY_FUZZ=<factor>`` runs
so many times the usual number of examples.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psutil
from hypothesis import settings

FACTOR = int(os.environ.get("KVFERRY_FUZZ", "1"))
FIRST_SEED = int(os.environ.get("KVFERRY_FUZZ_SEED", "0"))
EXAMPLE_LIMIT_S = 20.0  # an example that takes longer hangs, however busy the machine is
BOUNDED = settings(max_examples=max(1, 150 * FACTOR), deadline=None)

KIB = 1 << 10
# Numbers at which lengths, counts and signs go wrong.
EDGES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    1 << 15,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
)
NESTED = b"\x91" * 2000  # arrays in arrays, deeper than the interpreter's recursion limit


def examples(number: int) -> Iterator[AbstractContextManager[random.Random]]:
    """Yield one context for each example, which gives its generator and names its seed if it fails.

    ``for example in examples(100): with example as rng: ...``
    """
    for seed in range(FIRST_SEED, FIRST_SEED + max(1, number * FACTOR)):
        yield _example(seed)


@contextmanager
def _example(seed: int) -> Iterator[random.Random]:
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"alone with KVFERRY_FUZZ=0 KVFERRY_FUZZ_SEED={seed}")
        raise


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` with one to four things wrong in it."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(_MUTATIONS)(rng, out)
    return bytes(out)


def _place(rng: random.Random, out: bytearray) -> int:
    return rng.randint(0, len(out))


def _flip(rng: random.Random, out: bytearray) -> None:
    if out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, out: bytearray) -> None:
    if out:
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC6, 0xDD, 0xDF, 0xFF))


def _insert(rng: random.Random, out: bytearray) -> None:
    at = _place(rng, out)
    out[at:at] = rng.choice((b"\x00", b"\xff" * 8, rng.randbytes(rng.randint(1, 40)), NESTED))


def _delete(rng: random.Random, out: bytearray) -> None:
    at = _place(rng, out)
    del out[at : at + rng.randint(1, 16)]


def _repeat(rng: random.Random, out: bytearray) -> None:
    at = _place(rng, out)
    part = out[at : at + rng.randint(1, 40)]
    out[at:at] = part * rng.randint(1, 3)


def _truncate(rng: random.Random, out: bytearray) -> None:
    del out[_place(rng, out) :]


def _edge(rng: random.Random, out: bytearray) -> None:
    width = rng.choice((1, 2, 4, 8))
    order = rng.choice(("little", "big"))
    number = rng.choice(EDGES) & ((1 << 8 * width) - 1)
    at = _place(rng, out)
    out[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]


_MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    _flip,
    _set,
    _insert,
    _delete,
    _repeat,
    _truncate,
    _edge,
]


def shuffled(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Return a conversation with whole frames lost, repeated, swapped or mutated."""
    out = list(frames)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(4):
            case 0:
                out[at : at + 1] = []
            case 1:
                out[at:at] = out[at : at + 1] * rng.randint(1, 3)
            case 2:
                rng.shuffle(out)
            case _:
                out[at : at + 1] = [mutated(rng, frame) for frame in out[at : at + 1]]
    return out


class _Alarms(logging.Handler):
    """Keeps tracebacks in logs: asyncio reports there what escaped from a callback or a task."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.name == "asyncio":
            self.texts.append(self.format(record))


@contextmanager
def no_alarm() -> Iterator[None]:
    """Fail if anything is logged with a traceback, or an exception reaches an event loop."""
    alarms = _Alarms()
    root, transfer = logging.getLogger(), logging.getLogger("transfer")
    root.addHandler(alarms)
    transfer.setLevel(
        logging.ERROR
    )  # pytest keeps all records: a thousand warnings look like a leak
    try:
        yield
        gc.collect()  # a future whose exception nobody saw tells it when it is freed
    finally:
        root.removeHandler(alarms)
        transfer.setLevel(logging.NOTSET)
    assert not alarms.texts, "\n".join(alarms.texts[:3])


@contextmanager
def allocates_at_most(limit_nbytes: int) -> Iterator[None]:
    """Fail if Python allocates more than ``limit_nbytes`` beyond what it holds now."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= limit_nbytes, f"{peak - before} bytes, at most {limit_nbytes}"


def resident_nbytes() -> int:
    """Return the memory of this process that is in use, that of libraries included."""
    return int(psutil.Process().memory_info().rss)


def num_descriptors() -> int:
    return psutil.Process().num_fds()


async def descriptors_return_to(limit: int) -> None:
    """Wait until other threads have closed what they hold."""
    async with asyncio.timeout(EXAMPLE_LIMIT_S):
        while num_descriptors() > limit:
            gc.collect()  # the memory of a region that a traceback refers to has a descriptor, too
            await asyncio.sleep(0.005)
