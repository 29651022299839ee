"""What ``kvferry doctor`` found: rows, transports that are missing, and their arithmetic.

Pure. A row is one JSON object; so is a transport that is not available. Rates are gigabytes
(10^9 bytes) per second. The keys are a promise to scripts: one may be added, none renamed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from launch.doctor.grid import Case

Op = Literal["read", "write", "stalled_peer"]
DIGITS = 6


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured transfer beside its limit, from the same rounds.

    Attributes:
        op: ``read``, ``write``, or ``stalled_peer`` (reads from three peers beside a stopped one).
        limit: what the figure is held against; None when there is none here, see ``note``.
        ratio: ``gbytes_per_s / limit_gbytes_per_s``.
        p50_us, p99_us: of the small read; None in rows of throughput.
        limit_p50_us: the same exchange over the limit.
        verified: every byte was right on both ends, before and after the timed rounds.
        checksum: name of the digest that the reader verified within the timed part; the limit then
            includes hashing the same pages. None: raw bytes.
        via: transports and devices in use.
        note: why there is no limit, or which byte was wrong; empty otherwise.
    """

    transport: str
    op: Op
    page_nbytes: int
    batch: int
    gbytes_per_s: float
    limit: str | None
    limit_gbytes_per_s: float | None
    ratio: float | None
    p50_us: float | None = None
    p99_us: float | None = None
    verified: bool
    checksum: str | None = None
    limit_p50_us: float | None = None
    via: str = ""
    note: str = ""

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.batch

    @property
    def is_latency(self) -> bool:
        return self.p50_us is not None

    @property
    def name(self) -> str:
        """The row as people call it."""
        checked = f" with {self.checksum}" if self.checksum else ""
        return f"{self.transport} {self.op}{checked}, {self.batch} x {self.page_nbytes} bytes"


class Unavailable(msgspec.Struct, frozen=True, kw_only=True):
    """A transport that could not be measured (to the end), and what to do about it.

    Attributes:
        failed: it is there, but broke while it was measured. Rows of it may have come before.
    """

    transport: str
    reason: str
    remedy: str
    available: Literal[False] = False
    failed: bool = False


Finding = Row | Unavailable


def encode_finding(finding: Finding) -> str:
    """Return the finding as one line of JSON."""
    return msgspec.json.encode(finding).decode()


def decode_finding(line: str) -> Finding:
    """Return what ``encode_finding`` wrote.

    Raises:
        msgspec.MsgspecError: the line is no finding.
    """
    if "available" in msgspec.json.decode(line, type=dict[str, object]):
        return msgspec.json.decode(line, type=Unavailable)
    return msgspec.json.decode(line, type=Row)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the least sample that ``percent`` % do not exceed."""
    assert samples, "a percentile of nothing"
    assert 0 < percent <= 100, percent
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def gbytes_per_s(nbytes: int, samples: Sequence[float]) -> float:
    """Return the rate of ``nbytes`` in the median of ``samples`` seconds."""
    return nbytes / statistics.median(samples) / 1e9


class Bound(NamedTuple):
    """A limit and its samples, seconds of one batch; ``NO_BOUND`` where there is none."""

    name: str
    seconds: Sequence[float]


NO_BOUND = Bound("", ())


def throughput_row(
    transport: str,
    op: Op,
    case: Case,
    seconds: Sequence[float],
    bound: Bound,
    *,
    wrong: str = "",
    **more: Any,
) -> Row:
    """Return the row of one case. ``seconds`` of one batch each, one sample for each round.

    ``wrong`` says which byte was; empty when none. ``more`` are attributes of the row.
    """
    rate = gbytes_per_s(case.nbytes, seconds)
    limit = gbytes_per_s(case.nbytes, bound.seconds) if bound.seconds else None
    return Row(
        transport=transport,
        op=op,
        page_nbytes=case.page_nbytes,
        batch=case.batch,
        gbytes_per_s=round(rate, DIGITS),
        limit=None if limit is None else bound.name,
        limit_gbytes_per_s=None if limit is None else round(limit, DIGITS),
        ratio=None if limit is None else round(rate / limit, DIGITS),
        verified=not wrong,
        **{**more, "note": wrong or more.get("note", "")},
    )


def latency_row(
    transport: str, case: Case, seconds: Sequence[float], bound: Bound, **more: Any
) -> Row:
    """Return the row of the small read. ``seconds`` of single reads, of all rounds.

    ``more`` as for ``throughput_row``.
    """
    row = throughput_row(transport, "read", case, seconds, bound, **more)
    limit_s = percentile(bound.seconds, 50) if bound.seconds else None
    return msgspec.structs.replace(
        row,
        p50_us=round(percentile(seconds, 50) * 1e6, 3),
        p99_us=round(percentile(seconds, 99) * 1e6, 3),
        limit_p50_us=None if limit_s is None else round(limit_s * 1e6, 3),
    )
