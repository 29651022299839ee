"""Settings of the SSD tier, its named maxima, and how it refuses to start.

Owns ``SsdConfig`` and ``SsdRefused``. Knows no command line: ``launch`` turns ``PATH:512GiB`` into
one of these.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, field_validator

MIB = 1 << 20
BLOCK_NBYTES = 4096  # of direct I/O: offsets, lengths and memory are multiples of it
SSD_NBYTES_MIN = MIB
SSD_NBYTES_MAX = 1 << 50
SLAB_NBYTES_MAX = 64 * MIB  # a slab serves one size of slots; no page is larger than a slab
SLABS_PER_FILE = 16  # of a small file
STORES_MAX = 256  # pages being written; one more is refused
LOADS_MAX = 1024  # pages being read or waiting for memory to be read into; one more is refused
BOUNCE_NBYTES = 64 * MIB  # memory between callers and the disk
FLUSH_PAGES_MAX = 16_384  # changes of the index that wait for one commit; more are refused
COPY_NBYTES = MIB  # copied on the loop at a time: about 100 us


class SsdRefused(Exception):
    """The tier cannot start as configured; the message names the value and the remedy."""


class SsdConfig(BaseModel, frozen=True, extra="forbid"):
    """One SSD tier.

    Attributes:
        path: a directory, made if its parent exists; it holds the tier's files.
        nbytes: size of the file of pages. The index comes on top: about 400 bytes a page.
        num_writers, num_readers: threads that write and read pages.
        write_nbytes_per_s: stores beyond this average are refused; None: as the disk can.
        flush_s: how long a stored page may be missing in the index after a crash.
        retry_s: how long a disk that failed is left alone before one page is tried again.
        read_errors_max: reads that fail in a row before reading is given up for ``retry_s``.
        hung_s: a call of the disk that takes longer counts as failed; ``close`` waits no longer.
    """

    path: Path
    nbytes: int
    num_writers: int = Field(default=1, ge=1, le=16)
    num_readers: int = Field(default=2, ge=1, le=64)
    write_nbytes_per_s: float | None = Field(default=None, gt=0)
    flush_s: float = Field(default=0.2, gt=0, le=60)
    retry_s: float = Field(default=30.0, gt=0, le=3600)
    read_errors_max: int = Field(default=8, ge=1, le=1024)
    hung_s: float = Field(default=10.0, gt=0, le=3600)

    @field_validator("nbytes")
    @classmethod
    def _sensible(cls, nbytes: int) -> int:
        if nbytes < SSD_NBYTES_MIN:
            raise ValueError(
                f"nbytes={nbytes}: an SSD tier needs at least {SSD_NBYTES_MIN} bytes (1MiB);"
                " give a larger size, for example PATH:64GiB"
            )
        if nbytes > SSD_NBYTES_MAX:
            raise ValueError(
                f"nbytes={nbytes}: above {SSD_NBYTES_MAX} bytes (1PiB); give a smaller size"
            )
        return nbytes

    @field_validator("path")
    @classmethod
    def _named(cls, path: Path) -> Path:
        if not path.name:
            raise ValueError(
                f"path={str(path)!r}: names no directory of its own; give one, for example"
                " /mnt/nvme/kvferry"
            )
        return path
