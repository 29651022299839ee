"""Runs coroutines together; one alone without the cost of a task.

Owns nothing: an ``asyncio.TaskGroup`` for more than one. A page that is put or got alone should
not pay for the machinery of a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Return when all have; the first exception cancels the others and is raised."""
    if len(work) == 1:
        await work[0]
        return
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)
