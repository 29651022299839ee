"""What may go wrong in a simulated world, as numbers, and what has happened, as a digest.

Owns ``FaultPlan`` (probabilities and delays) and ``Trace`` (a running digest with the last lines
kept for people). Knows no nodes.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from dataclasses import dataclass

import xxhash

KEPT_LINES = 200
_TIME = struct.Struct("<d")


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Probabilities are per message or per bulk operation; durations are virtual seconds.

    Attributes:
        delay_s_min, delay_s_mean: one-way delay of every message (exponential).
        drop, duplicate, corrupt: control frames. Order on one channel is always kept; a
            duplicate may come late.
        bulk_bytes_per_s: speed of bulk transfers.
        bulk_corrupt: one byte of a bulk transfer is flipped.
        bulk_fail: a bulk transfer breaks after some of its bytes.
        late_write: bytes of a cancelled or failed write still arrive at the owner, later.
        late_read: a read that is given up ends a while later, and bytes arrive until it does.
        silent_crash: the peers of a crashed node notice nothing (power cut), instead of a
            connection reset.
        clock_skew_s: clocks of the nodes differ by up to this.
    """

    delay_s_min: float = 50e-6
    delay_s_mean: float = 500e-6
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    bulk_bytes_per_s: float = 1e9
    bulk_corrupt: float = 0.0
    bulk_fail: float = 0.0
    late_write: float = 0.0
    late_read: float = 0.0
    silent_crash: float = 0.5
    clock_skew_s: float = 0.0

    @classmethod
    def swarm(cls, rng: random.Random) -> FaultPlan:
        """Draw a plan. Each fault is off half of the time, so faults also appear one at a time."""

        def sometimes(most: float) -> float:
            drawn = rng.uniform(0.0, most)
            return drawn if rng.random() < 0.5 else 0.0

        return cls(
            delay_s_mean=rng.choice([100e-6, 1e-3, 20e-3]),
            drop=sometimes(0.05),
            duplicate=sometimes(0.1),
            corrupt=sometimes(0.02),
            bulk_bytes_per_s=rng.choice([1e7, 1e9, 1e10]),
            bulk_corrupt=sometimes(0.1),
            bulk_fail=sometimes(0.1),
            late_write=sometimes(0.5),
            silent_crash=rng.choice([0.0, 0.5, 1.0]),
            clock_skew_s=rng.choice([0.0, 0.0, 1.0, 3600.0]),
            late_read=sometimes(1.0),
        )


class Trace:
    """Everything that happened, as one digest."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._last: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self.num_lines = 0

    def add(self, now_s: float, what: str, payload: bytes = b"") -> None:
        self._hash.update(
            b"%b%b\0%d\0%b" % (_TIME.pack(now_s), what.encode(), len(payload), payload)
        )
        self._last.append((now_s, what))
        self.num_lines += 1

    def last(self, num_lines: int) -> list[str]:
        """What happened last, for people."""
        return [f"{now_s:.9f} {what}" for now_s, what in [*self._last][-num_lines:]]

    @property
    def digest(self) -> str:
        return str(self._hash.hexdigest())
