"""The verdict on the disk, said aloud.

Owns the clock and the log lines around ``kvstore/ssd/health.py``: one line when the tier stops to
take pages, one when it works again.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.ssd.config import SsdConfig
from kvstore.ssd.health import DiskHealth

log = logging.getLogger(__name__)


class DiskState:
    """What the rest of the tier reports to and asks."""

    def __init__(self, config: SsdConfig) -> None:
        self._config = config
        self._health = DiskHealth(config.retry_s, config.read_errors_max)
        self._now_s = asyncio.get_running_loop().time

    @property
    def degraded(self) -> str | None:
        return self._health.degraded

    def may_write(self) -> bool:
        return self._health.may_write(self._now_s())

    def may_read(self) -> bool:
        return self._health.may_read(self._now_s())

    def wrote(self) -> None:
        self._say(was_off=self._health.wrote())

    def read(self) -> None:
        self._say(was_off=self._health.read())

    def write_failed(self, error: OSError) -> None:
        self._say(was_on=self._health.write_failed(f"write: {error}", self._now_s()))

    def read_failed(self, error: OSError) -> None:
        self._say(was_on=self._health.read_failed(f"read: {error}", self._now_s()))

    def index_outcome(self, problem: str | None) -> None:
        if problem is None:
            self._say(was_off=self._health.index_wrote())
        else:
            self._say(was_on=self._health.index_failed(problem))

    def _say(self, *, was_on: bool = False, was_off: bool = False) -> None:
        if was_on:
            log.error(
                "SSD tier %s takes no pages: %s; the node goes on with memory only, pages on the"
                " SSD are served while they can be read; tried again every %.0f s",
                *(self._config.path, self.degraded, self._config.retry_s),
            )
        elif was_off and self.degraded is None:
            log.warning("SSD tier %s works again", self._config.path)
