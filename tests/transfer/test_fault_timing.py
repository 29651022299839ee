"""When an injected fault happens, exactly: a virtual clock, and a transport that takes notes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.sim.loop import SimLoop
from transfer.counters import CounterBoard
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, TransferError
from transfer.fault_injection import FaultInjector
from transfer.fault_rules import FaultRules
from transfer.fault_text import parse_rules
from transfer.interface import Range, deadline_after
from transfer.region import RegionTable
from transfer.token import TOKEN_VERSION, Endpoint, Token
from transfer.transports import Move, Transport

ENDPOINT = Endpoint("incarnation", "process", "host", tcp="10.0.0.1:9000")
NBYTES = 1000
MOVE_S = 1.0


class Notes:
    """A transport that moves nothing, takes a second for it, and says when it did what."""

    name = "sim"

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self._moving = 0

    def note(self, what: str) -> None:
        self.lines.append((asyncio.get_running_loop().time(), what))

    async def start(self) -> None:
        self.note("start")

    async def move(self, move: Move) -> None:
        self.note(f"{move.right} {sum(r.nbytes for r in move.ranges)}")
        self._moving += 1
        try:
            await asyncio.sleep(MOVE_S)
        finally:
            self._moving -= 1

    def disrupt(self, endpoint: Endpoint) -> None:
        assert endpoint is ENDPOINT
        self.note(f"disrupt, {self._moving} moving")

    async def close(self) -> None:
        self.note("close")


class Wire:
    """A wrapped transport, and operations on it."""

    def __init__(self, rules: str) -> None:
        self.notes = Notes()
        self.table = RegionTable(lambda *_: b"")
        self.injector = FaultInjector(parse_rules(rules), CounterBoard(), self.table.register_host)
        self.transport: Transport = self.injector.wrap({"sim": self.notes})["sim"]
        self.region = self.table.register_host(memoryview(bytearray(NBYTES)))

    async def move(self, right: str = "r", timeout_s: float = 1e6) -> str:
        """Run one operation; return how it ended."""
        token = Token(TOKEN_VERSION, ENDPOINT, 1, NBYTES, "rw", bytes(16), False)
        ranges = [Range(0, 0, 600), Range(700, 600, 400)]
        move = Move(
            "r" if right == "r" else "w", token, ranges, self.region, deadline_after(timeout_s)
        )
        try:
            await self.transport.move(move)
        except TransferError as error:
            self.notes.note(type(error).__name__)
            return type(error).__name__
        self.notes.note("done")
        return "done"


def run(main: Coroutine[Any, Any, None]) -> None:
    loop = SimLoop(random.Random(1))
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def lines_of(rules: str, right: str = "r", timeout_s: float = 1e6) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []

    async def main() -> None:
        wire = Wire(rules)
        await wire.move(right, timeout_s)
        found.extend(wire.notes.lines)

    run(main())
    return found


def test_without_rules_the_transports_are_left_alone() -> None:
    notes: Transport = Notes()
    injector = FaultInjector(
        FaultRules(), CounterBoard(), RegionTable(lambda *_: b"").register_host
    )
    assert injector.wrap({"sim": notes}) == {"sim": notes}


def test_a_delay_comes_first() -> None:
    assert lines_of("any delay=3600s") == [(3600.0, "r 1000"), (3601.0, "done")]
    assert lines_of("any delay=3600s", timeout_s=5) == [(5.0, DeadlineExceeded.__name__)]


def test_a_stall_lies_between_the_bytes() -> None:
    expected = [(0.0, "r 700"), (11.0, "r 300"), (12.0, "done")]
    assert lines_of("any stall=10s after=700") == expected
    late = [(0.0, "r 700"), (4.0, DeadlineExceeded.__name__)]
    assert lines_of("any stall=10s after=700", timeout_s=4) == late


def test_a_drop_ends_at_the_deadline() -> None:
    assert lines_of("any drop", timeout_s=60) == [(60.0, DeadlineExceeded.__name__)]


def test_a_truncation_breaks_the_connection_behind_the_prefix() -> None:
    expected = [(0.0, "w 1"), (1.0, "disrupt, 0 moving"), (1.0, PeerLost.__name__)]
    assert lines_of("any truncate after=1", right="w") == expected


def test_a_reset_breaks_the_connection_while_the_rest_is_on_its_way() -> None:
    assert lines_of("any reset after=600") == [
        (0.0, "r 600"),
        (1.0, "r 400"),
        (1.0, "disrupt, 1 moving"),
        (2.0, "disrupt, 0 moving"),  # this transport went on in spite of the first
        (2.0, PeerLost.__name__),
    ]


def test_a_corrupted_write_is_written_over_and_its_scratch_memory_given_back() -> None:
    async def main() -> None:
        wire = Wire("any corrupt=3")
        assert await wire.move("w") == "done"
        assert [line for _, line in wire.notes.lines] == ["w 1000", "w 3", "done"]
        before = wire.table.register_host(memoryview(bytearray(1)))
        assert await wire.move("w") == "done"
        after = wire.table.register_host(memoryview(bytearray(1)))
        assert after.region_id & 0xFFFF == (before.region_id & 0xFFFF) + 1, "a slot is still taken"

    run(main())


def test_a_window_counts_from_the_start_of_the_engine() -> None:
    async def main() -> None:
        await asyncio.sleep(100)
        wire = Wire("any drop from=10s until=20s")
        ends = []
        for _ in range(5):
            ends.append(await wire.move(timeout_s=5))
            await asyncio.sleep(4)
        assert ends == ["done", "done", "DeadlineExceeded", "DeadlineExceeded", "done"]

    run(main())


@pytest.mark.parametrize("rules", ["any drop", "any delay=9s", "any stall=9s"])
def test_closing_ends_what_is_held_up_and_what_comes_later(rules: str) -> None:
    async def main() -> None:
        wire = Wire(rules)
        held = asyncio.create_task(wire.move())
        await asyncio.sleep(5)
        await wire.transport.close()
        assert await held == PeerClosed.__name__
        assert asyncio.get_running_loop().time() == 5.0
        assert await wire.move() == PeerClosed.__name__

    run(main())
