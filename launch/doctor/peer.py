"""How the doctor reaches its other side: in this process, in a child, or on another machine.

Owns the child process, which ends with this one whatever happens (killed on the way out; told by
the kernel should this process be killed). All three are the same service behind a control channel.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from launch.cluster import python_path
from launch.doctor.messages import AreYouThere, Done
from launch.doctor.options import DoctorOptions
from launch.doctor.server import DoctorService, hello
from launch.errors import StartError
from launch.process_env import child_environment
from transfer.channel import Channel, Network
from transfer.errors import HelloRefused, RemoteFailed, TransferError
from transfer.interface import deadline_after

START_TIMEOUT_S = 60.0  # of a child: a Python interpreter and its imports, on a busy machine
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0  # of the question whether the other side is there at all

_SERVING = re.compile(r"--peer (\S+:\d+)`")


class Link(NamedTuple):
    """An open way to the other side."""

    channel: Channel
    is_remote: bool  # on another machine, as far as is known
    pid: int | None = None  # of the child, where the other side is one


async def answers(link: Link) -> bool:
    """Return whether the other side still answers, whatever became of a transport to it."""
    try:
        await link.channel.request(AreYouThere(), Done, deadline_s=deadline_after(ANSWER_TIMEOUT_S))
    except RemoteFailed:
        return True
    except TransferError:
        return False
    return True


async def _connect(network: Network, address: str) -> Channel:
    """Open a channel to ``host:port``.

    Raises:
        StartError: nobody answers there, or something that is no doctor.
    """
    try:
        return await network.connect(
            f"tcp://{address}", hello(), deadline_s=deadline_after(CONNECT_TIMEOUT_S)
        )
    except HelloRefused as error:
        raise StartError(f"--peer {address}: no kvferry doctor of this version: {error}") from error
    except TransferError as error:
        raise StartError(
            f"--peer {address}: nobody answered within {CONNECT_TIMEOUT_S:g} s: start "
            "`kvferry doctor --serve` there, or its secret differs"
        ) from error


@asynccontextmanager
async def in_this_process(
    network: Network, options: DoctorOptions, secret: str | None
) -> AsyncIterator[Link]:
    """The other side as a second engine of this process."""
    listener = await DoctorService(options, secret).listen(network, 0)
    try:
        channel = await _connect(network, listener.address.removeprefix("tcp://"))
        try:
            yield Link(channel, is_remote=False)
        finally:
            await channel.close()
    finally:
        await listener.close()


@asynccontextmanager
async def in_a_child(network: Network, options: DoctorOptions) -> AsyncIterator[Link]:
    """The other side as a process of this machine.

    Raises:
        StartError: the process ended, or did not answer in time.
    """
    process = await asyncio.create_subprocess_exec(
        *child_argv(options),
        env=child_environment(python_path()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the child
    )
    try:
        channel = await _connect(network, await _address(process))
        try:
            yield Link(channel, is_remote=False, pid=process.pid)
        finally:
            await channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def elsewhere(network: Network, address: str) -> AsyncIterator[Link]:
    """The other side as ``kvferry doctor --serve`` at ``address``.

    Raises:
        StartError: nobody answers there.
    """
    channel = await _connect(network, address)
    try:
        yield Link(channel, is_remote=True)
    finally:
        await channel.close()


def child_argv(options: DoctorOptions) -> list[str]:
    """Return the command line of the other side on this machine."""
    secret = ["--secret-file", options.secret_file] if options.secret_file else []
    serve = ["doctor", "--serve", "--port", "0", "--log-level", options.log_level]
    return [sys.executable, "-m", "launch.main", *serve, *secret]


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await process.stdout.readline()).decode(errors="replace"):
                if match := _SERVING.search(line):
                    return match[1]
    except TimeoutError:
        raise StartError(f"the peer process did not serve within {START_TIMEOUT_S:g} s") from None
    raise StartError("the peer process ended before it served: see its error above")
