"""A host that disappears without a word, made of two network namespaces.

Run as ``unshare -rn python -m tests.transfer.vanishing_host``: starts a peer in a second namespace
behind a virtual cable, takes that side's address away in the middle of an operation (its kernel
then answers nothing, as if switched off), and prints how long each kind of operation took to
notice, as JSON. Needs user namespaces and veth.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from pydantic import SecretStr

from tests.transfer.bulk_harness import MIB, ROOT
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.interface import Range, deadline_after

NBYTES = 64 * MIB
SECRET = "test"
KINDS = ("read", "write", "idle")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class FarHost:
    """One peer process in a namespace of its own, on a network of its own."""

    def __init__(self, number: int) -> None:
        self._here, self._there = f"10.99.{number}.1", f"10.99.{number}.2"
        self._near = f"near{number}"
        settings = json.dumps({"host": self._there, "cluster_secret": SECRET})
        python = f"{sys.executable} -m tests.transfer.bulk_peer tcp {NBYTES} x"
        script = f"read line; exec {python} '{settings}'"
        self.process = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", script],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _inside(self, *command: str) -> None:
        run("nsenter", "-t", str(self.process.pid), "-n", *command)

    def plug_in(self) -> bytes:
        """Connect the cable, start the peer, return its token."""
        run("ip", "link", "add", self._near, "type", "veth", "peer", "name", "far")
        own = subprocess.check_output(["readlink", "/proc/self/ns/net"])
        path = f"/proc/{self.process.pid}/ns/net"
        while subprocess.check_output(["readlink", path]) == own:
            pass  # unshare has not got that far
        run("ip", "link", "set", "far", "netns", str(self.process.pid))
        run("ip", "address", "add", f"{self._here}/24", "dev", self._near)
        run("ip", "link", "set", self._near, "up")
        self._inside("ip", "address", "add", f"{self._there}/24", "dev", "far")
        self._inside("ip", "link", "set", "far", "up")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline().decode())

    def vanish(self) -> None:
        self._inside("ip", "address", "del", f"{self._there}/24", "dev", "far")

    def remove(self) -> None:
        """The cable goes with the namespace of the process."""
        self.process.kill()
        self.process.wait()


async def seconds_to_notice(kind: str) -> tuple[str, float]:
    """Return the error and the seconds from vanishing to the end of the operation."""
    host = FarHost(KINDS.index(kind))
    engine = TransferEngine(TransferConfig(transport="tcp", cluster_secret=SecretStr(SECRET)))
    await engine.start()
    loop = asyncio.get_running_loop()
    try:
        token = host.plug_in()
        local = engine.allocate(NBYTES)
        await engine.read(token, [Range(0, 0, 8)], into=local, deadline_s=deadline_after(10))

        async def repeat() -> None:
            while True:
                whole, deadline_s = [Range(0, 0, NBYTES)], deadline_after(20)
                if kind == "write":
                    await engine.write(token, whole, source=local, deadline_s=deadline_s)
                else:
                    await engine.read(token, whole, into=local, deadline_s=deadline_s)

        task: asyncio.Task[None] | None = None
        if kind != "idle":
            task = asyncio.create_task(repeat())
            await asyncio.sleep(0.2)
        host.vanish()
        start = loop.time()
        try:
            await (task or repeat())
        except TransferError as error:
            return type(error).__name__, loop.time() - start
        raise AssertionError("a vanished host answered")
    finally:
        engine.abort()
        host.remove()


async def main() -> None:
    run("ip", "link", "set", "lo", "up")
    print(json.dumps({kind: await seconds_to_notice(kind) for kind in KINDS}))


if __name__ == "__main__":
    asyncio.run(main())
