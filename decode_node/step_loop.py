"""The one task that drives the engine: admit, plan, run, take in, again.

Owns the order of things and the engine's thread; decides nothing. Idle, it waits for ``wake``: no
timer runs. A step in which the engine raises fails the sequences of that step and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from decode_node.scheduler import Admitted, Scheduler, StepResult
from decode_node.sequence import Sequence
from engine.step import Runner

logger = logging.getLogger(__name__)

ENGINE_FAILURES_MAX = 3  # steps that fail in a row before the node calls itself unhealthy


class StepLoop:
    """See the module.

    Args:
        scheduler: decides.
        runner: computes, on one thread of its own.
        on_admitted: begins a pull.
        on_result: hands out tokens and ends.
        on_failed: the engine raised in a step of these sequences.
        on_turn: called once per turn, after all decisions (KV events go out here).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        on_admitted: Callable[[Admitted], None],
        on_result: Callable[[StepResult], None],
        on_failed: Callable[[list[Sequence], BaseException], None],
        on_turn: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._on_admitted = on_admitted
        self._on_result = on_result
        self._on_failed = on_failed
        self._on_turn = on_turn
        self._wake = asyncio.Event()
        self._stopping = False
        self._failures_in_row = 0
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self.counters = dict.fromkeys(("steps", "step_tokens", "failed_steps"), 0)

    def start(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode-engine")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="decode-loop")
        self._task.add_done_callback(self._ended)

    def wake(self) -> None:
        """Something changed: admit and plan again."""
        self._wake.set()

    @property
    def healthy(self) -> bool:
        """The loop runs, and the engine's last steps did not all fail."""
        running = self._task is not None and not self._task.done()
        return running and self._failures_in_row < ENGINE_FAILURES_MAX

    async def close(self) -> None:
        """Let the running step end, take in its outcome, stop; idempotent."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        if self._executor is not None:
            self._executor.shutdown()

    def abort(self) -> None:
        """Stop at once; a step in the engine's thread runs out, its outcome is dropped."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if not await self._turn():
                await self._wake.wait()

    async def _turn(self) -> bool:
        """One step; False when there is nothing to do before the next wake-up."""
        for admitted in self._scheduler.admit():
            self._on_admitted(admitted)
        num_retracted = self._scheduler.num_retracted
        planned = self._scheduler.plan()
        self._on_turn()
        if not planned:
            await asyncio.sleep(0)
            return self._scheduler.num_retracted > num_retracted  # whose pages may admit others
        steps = [part.step for part in planned]
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, self._runner.step, steps)
        await asyncio.wait({future})
        self.counters["steps"] += 1
        error = future.exception()
        if error is None:
            self._failures_in_row = 0
            self.counters["step_tokens"] += sum(len(step.tokens) for step in steps)
            self._on_result(self._scheduler.complete(planned, future.result()))
        else:
            self._failures_in_row += 1
            self.counters["failed_steps"] += 1
            logger.error("the engine failed in a step of %d sequences", len(steps), exc_info=error)
            self._on_failed(self._scheduler.fail(planned), error)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the step loop has died", exc_info=task.exception())
