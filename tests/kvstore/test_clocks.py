"""The parts of a store node tell the time by one clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import server
from kvstore.server import polls, tiering

MODULES = ("time", "datetime")  # who imports nothing of them knows none of their clocks
OF_A_LOOP = "time"
CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time")


def clocks_in(source: str) -> list[str]:
    """What of a source is a clock, by whatever name it goes there."""
    return [clock for node in ast.walk(ast.parse(source)) for clock in _clocks(node)]


def _clocks(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (name.name for name in names if name.name.split(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module), names=names):
            if module.split(".")[0] in MODULES:
                yield from (f"{module}.{name.name}" for name in names)
        case ast.Attribute(attr=attr) if attr == OF_A_LOOP or attr.removesuffix("_ns") in CLOCKS:
            yield attr
        case ast.Constant(value=str(text)) if text in MODULES:  # getattr, import_module
            yield repr(text)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import time as t",
        "import asyncio, datetime as d",
        "from time import monotonic",
        "from time import perf_counter_ns as now",
        "from datetime import datetime as d",
        "def f():\n    from time import time",
        "a = loop.time",
        "a = loop.time()",
        "a = asyncio.get_running_loop().time()",
        "a = clock.monotonic_ns()",
        "a = getattr(loop, 'time')()",
        "a = __import__('time')",
    ],
)
def test_a_clock_is_known_by_any_name(source: str) -> None:
    assert clocks_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "from kvstore.server.polls import now_s",
        "a = ledger.now_s + ledger.now",
        "async with asyncio.timeout_at(until_s): pass",
        "time = 3\na = 'some time'",
    ],
)
def test_what_only_sounds_like_a_clock_is_none(source: str) -> None:
    assert clocks_in(source) == []


def test_the_node_asks_one_place_for_the_time_of_the_loop() -> None:
    assert server.__file__ is not None
    root = Path(server.__file__).parent
    sources = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    found = {path: clocks_in(source) for path, source in sources.items()}
    asking = {path: clocks for path, clocks in found.items() if clocks}
    assert asking == {"polls.py": ["time"]}


def test_tiering_knows_no_clock_but_the_one_it_is_given() -> None:
    """Neither that of the node nor another of its kind, nor the module to ask it of."""
    named = {name: getattr(value, "__name__", "") for name, value in vars(tiering).items()}
    assert not [name for name, what in named.items() if what in ("now_s", "_now_s")]
    assert polls not in vars(tiering).values()
