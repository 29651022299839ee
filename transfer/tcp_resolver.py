"""Turns host names into addresses without ever blocking the I/O loop.

Owns the threads in which names are looked up. A look-up cannot be cancelled, and one that hangs may
do so for minutes: each runs in a daemon thread, which neither the loop nor the end of the process
waits for, and those who ask for a name that is being looked up wait for the same one. So a name
server that is silent costs one thread for each name, at most ``MAX_LOOKUPS`` in all; literal
addresses never come here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from transfer.errors import PeerUnreachable

MAX_LOOKUPS = 16
MAX_ADDRESSES = 8  # of one name that are tried


class Address(NamedTuple):
    """One way to reach a host."""

    family: int
    host: str
    port: int


Lookup = Callable[[str, int], list[Address]]


def look_up(host: str, port: int) -> list[Address]:
    """Ask the system; blocks. Raises ``OSError``, or ``ValueError`` for what cannot be a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [Address(int(family), str(to[0]), int(to[1])) for family, _, _, _, to in found]


class Resolver:
    """Lives on one loop."""

    def __init__(self, lookup: Lookup = look_up) -> None:
        self._lookup = lookup
        self._running: dict[tuple[str, int], asyncio.Future[list[Address]]] = {}

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of ``host``, at most ``MAX_ADDRESSES``; may be cancelled.

        Raises:
            PeerUnreachable: the name does not resolve, too many look-ups hang, or there is no
                thread left for one more.
        """
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            found = await asyncio.shield(self._future(host, port))
            return found[:MAX_ADDRESSES]
        return [Address(socket.AF_INET6 if version == 6 else socket.AF_INET, host, port)]

    def _future(self, host: str, port: int) -> asyncio.Future[list[Address]]:
        """Return the look-up under way for this name, or begin one."""
        key = (host, port)
        future = self._running.get(key)
        if future is not None:
            return future
        if len(self._running) >= MAX_LOOKUPS:
            raise PeerUnreachable(
                f"cannot look up {host!r}: {MAX_LOOKUPS} look-ups hang already; check the name "
                "server, or use addresses instead of names"
            )
        future = asyncio.get_running_loop().create_future()
        self._running[key] = future
        try:
            self._begin(key, future)
        except RuntimeError as error:
            del self._running[key]
            raise PeerUnreachable(f"cannot look up {host!r}: no thread for it ({error})") from error
        return future

    def _begin(self, key: tuple[str, int], future: asyncio.Future[list[Address]]) -> None:
        """Look up in a thread. Raises RuntimeError if the system has none left."""
        loop = asyncio.get_running_loop()

        def report(found: list[Address], error: Exception | None) -> None:
            del self._running[key]
            if error is None:
                future.set_result(found)
            else:
                future.set_exception(PeerUnreachable(f"{key[0]!r} does not resolve: {error}"))
                future.exception()  # whoever asked may have gone

        def work() -> None:
            found: list[Address] = []
            problem: Exception | None = None
            try:
                found = self._lookup(*key)
            except (OSError, ValueError) as error:  # ValueError: not a name at all
                problem = error
            try:
                loop.call_soon_threadsafe(report, found, problem)
            except RuntimeError:
                return  # the loop has ended meanwhile, and nobody waits

        threading.Thread(target=work, name="kvferry-lookup", daemon=True).start()
