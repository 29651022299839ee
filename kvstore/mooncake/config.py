"""Settings of the Mooncake back end and its named maxima; how an address is written.

Knows neither the library nor the command line::

    mooncake://MASTER:PORT[?segment=NBYTES&protocol=tcp&devices=mlx5_0&metadata=URL&replicas=2]
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, Field

MIB = 1 << 20
SCHEME = "mooncake"
BATCH_PAGES_MAX = 64  # of one call of the library
SLAB_NBYTES = 24 * MIB  # memory of one call; one page at least
READ_SLABS = 4  # read calls under way at once; each has its thread
WRITE_SLABS = 2
ABANDONED_SLABS_MAX = 32  # left to reads that hung; after that they are used again
MATCHES_MAX = 64  # matches under way at once; the others queue until their deadline
PROBE_KEYS_MAX = 65_536  # keys of one existence query
WAITS_MAX = 65_536  # keys x waiting calls

EXAMPLE = "mooncake://127.0.0.1:50051"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)([kmgt]?)(?:i?b)?", re.IGNORECASE)
_OPTIONS = ("segment", "protocol", "devices", "metadata", "replicas")


class MooncakeConfig(BaseModel, frozen=True, extra="forbid"):
    """One client of a Mooncake cluster.

    Attributes:
        master: ``host:port`` of ``mooncake_master``.
        metadata: where segments find each other; the default needs no server.
        host: the address under which others reach this process.
        protocol: ``tcp``, or another that the library was built with; ``devices`` goes with it.
        segment_nbytes: memory that this process contributes; 0: it only uses that of others.
        replicas: copies of each page.
        prefix: begins every key, so that kvferry clears its own objects only.
        retry_s: between attempts to reach a master that does not answer.
        poll_s, poll_max_s: between existence queries for pages that somebody waits for; the pause
            grows from one to the other while nothing comes.
        overdue_s: a call under way for so long makes the master suspect.
        ask_s: one that is suspect and does not answer for so long is lost.
        backoff_s, backoff_max_s: between questions to a lost one; doubled from one to the other.
        join_retry_s: after so long a put asks again whether another writer has given up its page.
        close_s: grace for calls under way at ``close``.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_nbytes: int = Field(default=0, ge=0)
    replicas: int = Field(default=1, ge=1, le=8)
    prefix: str = Field(default="kvferry", pattern=r"[a-z0-9-]{1,40}")
    retry_s: float = Field(default=1.0, gt=0)
    poll_s: float = Field(default=0.002, gt=0)
    poll_max_s: float = Field(default=0.05, gt=0)
    overdue_s: float = Field(default=0.5, gt=0)
    ask_s: float = Field(default=1.0, gt=0)
    backoff_s: float = Field(default=0.25, gt=0)
    backoff_max_s: float = Field(default=5.0, gt=0)
    join_retry_s: float = Field(default=0.25, gt=0)
    close_s: float = Field(default=5.0, ge=0)

    @classmethod
    def of_url(cls, url: str, *, host: str = "127.0.0.1") -> MooncakeConfig:
        """Return what an address says.

        Raises:
            ValueError: it is none; the message says what is wrong with it.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != SCHEME or not parts.hostname or not port or parts.path not in ("", "/"):
            raise ValueError(f"write {SCHEME}://MASTER:PORT, for example {EXAMPLE}")
        values: dict[str, object] = {"master": f"{_bracketed(parts.hostname)}:{port}", "host": host}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS:
                raise ValueError(f"?{name}=: choose from {', '.join(_OPTIONS)}")
            key = "segment_nbytes" if name == "segment" else name
            values[key] = _nbytes(value) if name == "segment" else value
        return cls.model_validate(values)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _nbytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"?segment={text}: write a size like 512MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2].lower()]
