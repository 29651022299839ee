"""A disk that fails as told: held, failing, tearing, forgetting and flipping."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

from kvstore.ssd.page_file import LocalFile, PageFile


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class FaultyDisk:
    """Makes ``FaultyFile``s that all look at these switches.

    Attributes:
        write_error, read_error, reserve_error, sync_error: errno of every call, while set.
        open_error: errno of the next open.
        tear: writes stop after that many bytes, saying nothing.
        forget: writes are lost, saying nothing, until the file is closed.
        reads, writes, syncs: cleared to hold calls back until set again.
    """

    def __init__(self) -> None:
        self.write_error: int | None = None
        self.read_error: int | None = None
        self.reserve_error: int | None = None
        self.sync_error: int | None = None
        self.open_error: int | None = None
        self.tear: int | None = None
        self.forget = False
        self.reads, self.writes, self.syncs = (threading.Event() for _ in range(3))
        for held in (self.reads, self.writes, self.syncs):
            held.set()
        self.num_writes = 0
        self.num_reads = 0
        self.read_ranges: list[tuple[int, int]] = []

    def open(self, path: Path, nbytes: int) -> PageFile:
        if self.open_error is not None:
            raise failure(self.open_error)
        return FaultyFile(self, path, nbytes)


class FaultyFile(LocalFile):
    def __init__(self, disk: FaultyDisk, path: Path, nbytes: int) -> None:
        super().__init__(path, nbytes)
        self._disk = disk

    def read(self, offset: int, into: memoryview) -> int:
        self._disk.num_reads += 1
        self._disk.read_ranges.append((offset, len(into)))
        assert self._disk.reads.wait(30)
        if self._disk.read_error is not None:
            raise failure(self._disk.read_error)
        return super().read(offset, into)

    def write(self, offset: int, data: memoryview) -> None:
        self._disk.num_writes += 1
        assert self._disk.writes.wait(30)
        if self._disk.write_error is not None:
            super().write(offset, data[: len(data) // 2 // 4096 * 4096])  # half of it arrived
            raise failure(self._disk.write_error)
        if self._disk.forget:
            return
        if self._disk.tear is not None:
            data = data[: self._disk.tear // 4096 * 4096]
        super().write(offset, data)

    def reserve(self, offset: int, nbytes: int) -> None:
        if self._disk.reserve_error is not None:
            raise failure(self._disk.reserve_error)
        super().reserve(offset, nbytes)

    def sync(self) -> None:
        assert self._disk.syncs.wait(30)
        if self._disk.sync_error is not None:
            raise failure(self._disk.sync_error)
        super().sync()


def flip_bytes(path: Path, offset: int, nbytes: int, rng: random.Random, count: int = 1) -> None:
    """Flip one bit in each of ``count`` bytes of a range of a file."""
    with path.open("r+b") as file:
        for _ in range(count):
            at = offset + rng.randrange(nbytes)
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
