"""The seat of this process in a Mooncake cluster: made in the background, kept by the library.

Owns the attempts to reach the master and everything that reading and writing share. Once set up,
the library reconnects by itself; until then there is no store: nothing is found, nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from kvstore.mooncake.appearances import Appearances
from kvstore.mooncake.binding import Library, NativeStore
from kvstore.mooncake.calls import done_by, within
from kvstore.mooncake.config import READ_SLABS, WRITE_SLABS, MooncakeConfig
from kvstore.mooncake.slabs import ObjectLayout, SlabPool
from kvstore.page import PageKey, PageSpec
from transfer.blocking_calls import BlockingCalls
from transfer.interface import deadline_after, remaining_s

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 5.0


class Connection:
    """One client of the cluster. Make it inside a running loop."""

    def __init__(self, config: MooncakeConfig, spec: PageSpec, library: Library) -> None:
        self.config = config
        self.spec = spec
        self.library = library
        self.counters: Counter[str] = Counter()
        self.layout = ObjectLayout(spec)
        self.read_slabs = SlabPool(self.layout, READ_SLABS)
        self.write_slabs = SlabPool(self.layout, WRITE_SLABS)
        # Separate threads, so that reads that hang delay neither writes nor questions.
        self.reads = BlockingCalls("mooncake-read", READ_SLABS)
        self.writes = BlockingCalls("mooncake-write", WRITE_SLABS)
        self.questions = BlockingCalls("mooncake-ask", 2)
        self.copies = BlockingCalls("mooncake-copy", 2)
        self.appearances = Appearances(
            self.are_there, poll_s=config.poll_s, poll_max_s=config.poll_max_s
        )
        self.writing: dict[PageKey, asyncio.Future[None]] = {}
        self.native: NativeStore | None = None
        self.connected = asyncio.Event()
        self._jobs: dict[asyncio.Task[None], None] = {}
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def name_of(self, key: PageKey) -> str:
        """The key of a page's object in Mooncake."""
        return f"{self.config.prefix}/{key.hex()}"

    async def are_there(self, names: Sequence[str], deadline_s: float | None = None) -> list[bool]:
        """Which objects are committed; none when the master does not say so in time."""
        native, nothing = self.native, [False] * len(names)
        if native is None:
            return nothing
        deadline_s = deadline_after(PROBE_TIMEOUT_S) if deadline_s is None else deadline_s
        call = self.questions.start(native.batch_is_exist, list(names))
        if not await done_by(call, deadline_s):
            self.counters["late_calls"] += 1
            return nothing
        codes = call.result()
        self.counters["broken_matches"] += any(code < 0 for code in codes)
        return [code == 1 for code in codes] if len(codes) == len(names) else nothing

    def remove(self, names: list[str]) -> None:
        """Remove damaged objects, in the background."""
        if self.native is not None:
            self.counters["pages_removed"] += len(names)
            self.questions.start(self.native.batch_remove, names, True)

    def spawn(self, job: asyncio.Task[None]) -> asyncio.Task[None]:
        """Own ``job``: it may outlive the call that started it, not this connection."""
        self._jobs[job] = None
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return job

    # ---- coming and going

    async def _connect(self) -> None:
        is_first = True
        while True:
            reason = await self._attempt()
            if reason is None:
                self.connected.set()
                return
            if is_first:
                logger.warning(
                    "mooncake://%s: %s: pages are neither found nor kept until it answers",
                    self.config.master,
                    reason,
                )
            is_first = False
            await asyncio.sleep(self.config.retry_s)

    async def _attempt(self) -> str | None:
        """Try once; return what went wrong."""
        host, _, port = self.config.master.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return "no master there"
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        native = self.library.new_store()
        code = await self.questions.start(self._set_up, native)
        if code != 0:
            return f"the master accepts no client (code {code})"
        self.native = native
        return None

    def still(self, native: NativeStore) -> bool:
        """True when calls of ``native`` may be followed by others; False once this is closing."""
        return self.native is native

    def _set_up(self, native: NativeStore) -> int:
        config = self.config
        return native.setup(
            config.host,
            config.metadata,
            config.segment_nbytes,
            0,  # memory of the library's own for calls that kvferry does not use
            config.protocol,
            config.devices,
            config.master,
        )

    async def close(self) -> None:
        """Begin nothing more, finish within ``close_s`` what is under way, leave the cluster.

        What Mooncake does not end in that time is left to its threads, which end with the process;
        the master forgets this client by itself then.
        """
        native, self.native = self.native, None
        self._connecting.cancel()
        await asyncio.wait({self._connecting})
        await self.appearances.close()
        deadline_s = deadline_after(self.config.close_s)
        await self._end_jobs()
        kinds = (self.reads, self.writes, self.copies, self.questions)
        idle = [await calls.idle(max(0.0, remaining_s(deadline_s))) for calls in kinds]
        if native is not None and not (all(idle) and await self._has_left(native)):
            logger.warning("calls of Mooncake hang: they are left behind, its master not told")
        for calls in kinds:
            calls.close()

    async def _end_jobs(self) -> None:
        jobs = list(self._jobs)
        if not jobs:
            return
        _, late = await asyncio.wait(jobs, timeout=self.config.close_s)
        for job in late:
            job.cancel()
        if late:
            await asyncio.wait(late)

    async def _has_left(self, native: NativeStore) -> bool:
        leaving = self.questions.start(self._leave, native)
        return await done_by(leaving, deadline_after(self.config.close_s))

    def _leave(self, native: NativeStore) -> None:
        self.read_slabs.unregister()
        self.write_slabs.unregister()
        native.close()

    async def wait_until_connected(self, deadline_s: float) -> bool:
        await within(self.connected.wait(), deadline_s)
        return self.connected.is_set()
