"""The parts of a store node tell the time by one clock."""

from __future__ import annotations

import ast
from pathlib import Path

from kvstore import server
from kvstore.server import polls, tiering


def test_the_node_asks_one_place_for_the_time_of_the_loop() -> None:
    assert server.__file__ is not None
    asking = []
    for path in sorted(Path(server.__file__).parent.glob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())))
        if any(isinstance(node, ast.Attribute) and node.attr == "time" for node in calls):
            asking.append(path.name)
    assert asking == ["polls.py"]


def test_tiering_knows_no_clock_but_the_one_it_is_given() -> None:
    assert not [name for name, value in vars(tiering).items() if value is polls.now_s]
