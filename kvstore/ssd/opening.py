"""Starting a tier: whose files are these, can they be used, what is in them.

Owns the order of the checks and the words of every refusal. Runs on a thread. Reads the first block
of the page file and the index, no page.

    room -> directory -> lock -> page file, superblock -> index -> rows that verify
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvstore.ssd.catalogue import Catalogue
from kvstore.ssd.config import BLOCK_NBYTES, SsdConfig, SsdRefused
from kvstore.ssd.index import Index
from kvstore.ssd.lock import TierLock
from kvstore.ssd.page_file import Disk, PageFile
from kvstore.ssd.restored import restore
from kvstore.ssd.slabs import Slabs
from kvstore.ssd.superblock import (
    UUID_NBYTES,
    Superblock,
    parse_superblock,
    slab_nbytes_for,
)

log = logging.getLogger(__name__)

PAGES_NAME = "pages.kvferry"
INDEX_NAME = "index.kvferry"
LOCK_NAME = "lock.kvferry"
# A generation is the life of the file and, in its lower bits, a count within it. The index counts
# lives; one that was lost begins anew somewhere, so that it hardly meets what lies in the slots.
GENERATION_BITS, FIRST_LIFE_BITS = 40, 22


Rows = tuple[list[int], list[bytes]]


class Opened(NamedTuple):
    """A tier's files, and what the index says is in them."""

    lock: TierLock
    file: PageFile
    database: Index
    uuid: bytes
    slabs: Slabs
    pages: Catalogue
    headers: list[bytes]  # of the pages restored, the hottest first
    bad_rows: list[int]  # offsets

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self.lock.release)
            last_first.callback(self.file.close)
            last_first.callback(self.database.close)


def open_tier(config: SsdConfig, disk: Disk) -> Opened:
    """Open or make the tier's files.

    Raises:
        SsdRefused: names the value and the remedy; nothing stays open.
    """
    with ExitStack() as undo:
        path = config.path / PAGES_NAME
        try:
            _room(config, path)  # first: a refusal leaves nothing behind
            _directory(config.path)
            lock = TierLock(config.path / LOCK_NAME)
            undo.callback(lock.release)
            if not path.exists():
                uuid = secrets.token_bytes(UUID_NBYTES)
                _make(path, Superblock(uuid, slab_nbytes_for(config.nbytes)))
            _whose(path)
            file = disk.open(path, config.nbytes)
            undo.callback(file.close)
            superblock = _superblock(file, path)
        except OSError as error:
            raise SsdRefused(
                f"{config.path}: {error.strerror}; give a directory that this user can write to,"
                " on a disk that works"
            ) from error
        num_slabs = (config.nbytes - BLOCK_NBYTES) // superblock.slab_nbytes
        slabs = Slabs(num_slabs, superblock.slab_nbytes)
        if not num_slabs:
            raise SsdRefused(
                f"nbytes={config.nbytes}: {path} was made for pages in slabs of"
                f" {superblock.slab_nbytes} bytes; give a larger size, or delete {config.path}"
                " (its pages are a cache)"
            )
        index, rows, life = _index(config.path / INDEX_NAME, superblock.uuid)
        undo.callback(index.close)
        # Pages whose end lies behind the end of the file (cut, or made smaller now) are gone.
        end = min(file.nbytes, config.nbytes)
        restored, headers, bad_rows = restore(*rows, superblock.uuid, slabs, end)
        if bad_rows:
            log.warning("%s: %d of %d rows dropped", config.path, len(bad_rows), len(rows[0]))
        pages = Catalogue(slabs, first_generation=life << GENERATION_BITS)
        pages.restore(restored)
        undo.pop_all()
        return Opened(lock, file, index, superblock.uuid, slabs, pages, headers, bad_rows)


def _directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SsdRefused(
            f"{path} cannot be made: {error.strerror}; give a directory that this user can write to"
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise SsdRefused(f"{path} cannot be written to; give this user the right to, or another")


def _room(config: SsdConfig, pages: Path) -> None:
    """The file system could hold the whole tier, now. Makes nothing."""
    path = config.path
    if path.exists() and not path.is_dir():
        raise SsdRefused(f"{path} is not a directory; give one, or a name that is not taken")
    if not path.parent.exists():
        raise SsdRefused(f"{path.parent} does not exist; make it, or mount the disk")
    stat = os.statvfs(path if path.exists() else path.parent)
    held = pages.stat().st_blocks * 512 if pages.exists() else 0
    room = stat.f_bavail * stat.f_frsize + held
    if config.nbytes > room:
        raise SsdRefused(
            f"nbytes={config.nbytes}: the disk of {path} has room for {room} bytes; give a"
            " smaller size, or free some"
        )


def _make(pages: Path, superblock: Superblock) -> None:
    """Make the page file with its first block, whole or not at all."""
    new = pages.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, superblock.pack())
        os.fsync(fd)
    finally:
        os.close(fd)
    new.rename(pages)
    folder = os.open(pages.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _whose(pages: Path) -> None:
    """Refuse a file that is not ours before it is made longer."""
    with pages.open("rb") as file:
        parse_superblock(file.read(BLOCK_NBYTES), str(pages))


def _superblock(file: PageFile, pages: Path) -> Superblock:
    with mmap.mmap(-1, BLOCK_NBYTES) as block, memoryview(block) as view:
        num = file.read(0, view)
        return parse_superblock(bytes(view[:num]), str(pages))


def _index(path: Path, uuid: bytes) -> tuple[Index, Rows, int]:
    """Open the index; a damaged one is made anew: what it named is lost, and only a cache."""
    try:
        return _read_index(path, uuid)
    except (OSError, sqlite3.OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SsdRefused(
            f"{path}: {reason}; give this user the right to write it, end what else has it open, or"
            " delete the directory (its pages are a cache)"
        ) from error
    except sqlite3.DatabaseError as error:
        log.error("%s is damaged (%s): made anew, its pages are lost; check the disk", path, error)
    for name in (path.name, f"{path.name}-wal", f"{path.name}-journal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
    try:
        return _read_index(path, uuid)
    except (OSError, sqlite3.Error) as error:
        raise SsdRefused(f"{path}: {error}; delete {path.parent}, check its disk") from error


def _read_index(path: Path, uuid: bytes) -> tuple[Index, Rows, int]:
    index = Index(path, uuid)
    try:
        first_life = 1 + secrets.randbits(FIRST_LIFE_BITS)
        return index, index.rows(), index.new_life(first_life)
    except BaseException:
        index.close()
        raise
