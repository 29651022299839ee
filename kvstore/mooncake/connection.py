"""The seat of this process in a Mooncake cluster: made in the background, kept by the library.

Owns the attempts to reach the master and everything that reading and writing share. Once set up,
the library reconnects by itself. Until then, and while the master is lost (``watch.py``), there is
no store: nothing is found, nothing is kept.
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
from kvstore.mooncake.slabs import ObjectLayout, Slab, SlabPool
from kvstore.mooncake.watch import MasterWatch
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
        self._probes = BlockingCalls("mooncake-probe", 1)
        self.watch = MasterWatch(config, self.counters, self._master_answers)
        self.appearances = Appearances(
            self.are_there, poll_s=config.poll_s, poll_max_s=config.poll_max_s
        )
        self.writing: dict[PageKey, asyncio.Future[None]] = {}
        self._native: NativeStore | None = None
        self.connected = asyncio.Event()
        self._jobs: dict[asyncio.Task[None], None] = {}
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    @property
    def native(self) -> NativeStore | None:
        """The library's client; None while calls of it would lead nowhere."""
        return None if self.watch.is_lost else self._native

    def name_of(self, key: PageKey) -> str:
        """The key of a page's object in Mooncake."""
        return f"{self.config.prefix}/{key.hex()}"

    async def are_there(self, names: Sequence[str], deadline_s: float | None = None) -> list[bool]:
        """Which objects are committed; none when the master does not say so in time."""
        native, nothing = self.native, [False] * len(names)
        if native is None:
            return nothing
        deadline_s = deadline_after(PROBE_TIMEOUT_S) if deadline_s is None else deadline_s
        call = self.watch.follow(self.questions.start(native.batch_is_exist, list(names)))
        if not await self.watch.done_by(call, deadline_s):
            self.counters["late_calls"] += 1
            return nothing
        codes = call.result()
        self.counters["broken_matches"] += any(code < 0 for code in codes)
        return [code == 1 for code in codes] if len(codes) == len(names) else nothing

    def remove(self, names: list[str]) -> None:
        """Remove damaged objects, in the background."""
        if self.native is not None:
            self.counters["pages_removed"] += len(names)
            self.watch.follow(self.questions.start(self.native.batch_remove, names, True))

    async def slab_of(self, pool: SlabPool, deadline_s: float) -> Slab | None:
        """Take one of ``pool``; None when there was none until the deadline or a loss."""
        return await self.watch.within(pool.take(deadline_s), deadline_s)

    def spawn(self, job: asyncio.Task[None]) -> asyncio.Task[None]:
        """Own ``job``: it may outlive the call that started it, not this connection."""
        self._jobs[job] = None
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return job

    # ---- coming and going

    async def _connect(self) -> None:
        while True:
            reason = await self._attempt()
            if reason is None:
                self.watch.find()
                self.connected.set()
                return
            self.watch.miss(reason)
            await asyncio.sleep(self.config.retry_s)

    async def _attempt(self) -> str | None:
        """Try once; return what went wrong."""
        try:
            return await self._set_up_once()
        except Exception as error:  # noqa: BLE001 - the library's, of whatever kind: tried again
            return f"its library failed ({error!r})"

    async def _set_up_once(self) -> str | None:
        if not await self._port_is_open():
            return "no master there"
        native = self.library.new_store()
        code = await self.questions.start(self._set_up, native)
        if code != 0:
            return f"the master accepts no client (code {code})"
        self._native = native
        return None

    async def _port_is_open(self) -> bool:
        """Somebody listens where the master should be."""
        host, _, port = self.config.master.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def _master_answers(self) -> bool:
        """Ask for a page that nobody has, on a thread that no other call can hold up."""
        native = self._native
        if native is None or not await self._port_is_open():
            return False
        codes = await self._probes.start(native.batch_is_exist, [f"{self.config.prefix}/probe"])
        return len(codes) == 1 and codes[0] >= 0

    def still(self, native: NativeStore) -> bool:
        """True when calls of ``native`` may be followed by others; not once this is closing, nor
        while the master is lost."""
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
        native, self._native = self._native, None
        self._connecting.cancel()
        await asyncio.wait({self._connecting})
        await self.watch.close()
        await self.appearances.close()
        deadline_s = deadline_after(self.config.close_s)
        await self._end_jobs()
        kinds = (self.reads, self.writes, self.copies, self.questions, self._probes)
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
