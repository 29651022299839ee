"""The index: which slot holds which page, on disk, in SQLite.

Owns the database and its schema. Synchronous: one thread at a time uses it. A row is the header of
its slot, which checks itself (``kvstore/ssd/header.py``); the page file alone decides whether a
page is good, so the index may be behind or ahead of it after a crash.

::

    pages(offset INTEGER PRIMARY KEY, header BLOB)     meta(name TEXT PRIMARY KEY, value BLOB)

Why SQLite: it is in the standard library, and its write-ahead log survives kill -9 and power loss.
LMDB reads faster (520,000 rows: 0.31 s against 0.73 s; 29,000 rows: 0.01 s against 0.04 s) but maps
its file: an I/O error of the disk would be a SIGBUS that ends the node, where SQLite raises. For
the same reason the database is opened in exclusive mode, without shared memory beside it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from kvstore.ssd.config import SsdRefused

log = logging.getLogger(__name__)

WAL_NBYTES_MAX = 64 << 20  # what the log is cut to after a checkpoint
BUSY_S = 1.0
MODE = 0o600  # the headers hold the tokens of prompts
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages(offset INTEGER PRIMARY KEY, header BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""


class Index:
    """Open or make the database at ``path``.

    Raises:
        OSError, sqlite3.Error: it cannot be read or written, or is damaged.
        SsdRefused: it belongs to another page file.
    """

    def __init__(self, path: Path, uuid: bytes) -> None:
        _make_private(path)
        self._db = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
            self._claim(path, uuid)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit={WAL_NBYTES_MAX}")
        self._db.executescript(_SCHEMA)

    def _claim(self, path: Path, uuid: bytes) -> None:
        self._db.execute("INSERT OR IGNORE INTO meta VALUES('uuid', ?)", (uuid,))
        found = self._db.execute("SELECT value FROM meta WHERE name='uuid'").fetchone()[0]
        if found != uuid:
            raise SsdRefused(
                f"{path} belongs to another page file (tier {found.hex()}, not {uuid.hex()});"
                " put back the file that belongs to it, or delete both"
            )

    def new_life(self, first: int) -> int:
        """Count this start, durably; a new index counts from ``first``."""
        self._db.execute(
            "INSERT INTO meta VALUES('life', ?) ON CONFLICT(name) DO UPDATE SET value = value + 1",
            (first,),
        )
        self._checkpoint()
        life = self._db.execute("SELECT value FROM meta WHERE name='life'").fetchone()[0]
        return int(life)

    def rows(self) -> tuple[list[int], list[bytes]]:
        """Offset and header of all rows, unverified."""
        offsets: list[int] = []
        headers: list[bytes] = []
        for offset, header in self._db.execute("SELECT offset, header FROM pages"):
            offsets.append(offset)
            headers.append(header if isinstance(header, bytes) else b"")
        return offsets, headers

    def apply(self, changes: Mapping[int, bytes | None], *, durable: bool = False) -> None:
        """Set the header of every offset, or remove its row; all or nothing.

        ``durable``: this and all before is on the disk, not only in the operating system, when
        this returns.
        """
        gone = [(offset,) for offset, header in changes.items() if header is None]
        here = [(offset, header) for offset, header in changes.items() if header is not None]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("DELETE FROM pages WHERE offset = ?", gone)
            self._db.executemany("INSERT OR REPLACE INTO pages VALUES(?, ?)", here)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if durable:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Move the log into the database, both synced."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        self._db.close()


def _make_private(path: Path) -> None:
    """Make the database, before SQLite does with the umask's mode, or take others' rights away.

    SQLite gives what it makes beside a database (``-wal``, ``-shm``) the mode of the database.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm", f"{path.name}-journal"):
        file = path.with_name(name)
        if not file.exists() or not file.stat().st_mode & 0o077:
            continue
        try:
            file.chmod(MODE)
        except OSError as error:  # of another user, or a file system without modes
            log.warning("%s: others may read it: %s", file, error.strerror)
