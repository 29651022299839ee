"""One transport of this machine with one region of memory: what both sides of a measurement hold.

Owns the engine's life and the answer to "is this transport available here". Knows no peer.
"""

from __future__ import annotations

from typing import Self

from launch.doctor.options import DoctorOptions
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.region import HostRegion

REMEDIES = {
    "loopback": "it reaches memory of the same process only: measure it without --peer and "
    "--stalled-peer",
    "shm": "run both sides on one Linux host, in one network namespace, or use tcp",
    "tcp": "check the address and the firewall between the two sides",
    "ucx": "UCX_TLS and UCX_NET_DEVICES choose its paths: leave them out, or name what both sides "
    "have (`ucx_info -d` lists it)",
}
INSTALL_UCX = "pip install 'ucxx-cu12>=0.40' on both sides"
GONE = (
    "the other side went away or stopped answering while it was measured: see how it ended, start "
    "it again and measure anew"
)


def remedy_of(transport: str, reason: str) -> str:
    """Return what to do about a transport that is not available; ``reason`` is the engine's."""
    missing = "pip install" in reason or "does not load" in reason
    return INSTALL_UCX if transport == "ucx" and missing else REMEDIES[transport]


class TransportUnavailable(Exception):
    """The transport does not work between these two sides; the message says why."""


class Memory:
    """A started engine and its region. ``close`` ends both."""

    def __init__(self, engine: TransferEngine, region: HostRegion) -> None:
        self.engine = engine
        self.region = region

    @classmethod
    async def open(
        cls, transport: str, nbytes: int, options: DoctorOptions, secret: str | None
    ) -> Self:
        """Start the engine as a node would.

        Raises:
            TransportUnavailable: this machine or this installation does not have the transport.
        """
        engine = TransferEngine(_config(transport, options, secret))
        try:
            await engine.start()
            return cls(engine, engine.allocate(nbytes))
        except (TransferError, OSError) as error:
            engine.abort()
            raise TransportUnavailable(str(error)) from error
        except BaseException:
            engine.abort()
            raise

    @property
    def view(self) -> memoryview:
        return self.region.view

    @property
    def via(self) -> str:
        """Transports and devices that the engine uses, for people."""
        return " ".join(self.engine.describe().split())

    async def close(self) -> None:
        await self.engine.close()


def _config(transport: str, options: DoctorOptions, secret: str | None) -> TransferConfig:
    """What a node with these options would give its engine."""
    settings = {
        "transport": transport,
        "host": options.host,
        "advertise_host": options.advertise_host,
        "cluster_secret": secret,
    }
    try:
        return TransferConfig.model_validate(settings)
    except ValueError as error:
        raise TransportUnavailable(_reason(error)) from error


def _reason(error: ValueError) -> str:
    """What a pydantic error says, without its frame."""
    details = getattr(error, "errors", None)
    return str(details()[0]["msg"]).removeprefix("Value error, ") if details else str(error)
