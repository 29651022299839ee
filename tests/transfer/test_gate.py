"""A closed gate means that nobody is inside."""

from __future__ import annotations

import threading

from transfer.gate import Gate, closed_gate


def test_close_waits_for_those_inside_and_refuses_newcomers() -> None:
    gate, order = Gate(), list[str]()
    assert gate.enter()
    assert gate.enter()

    def close() -> None:
        gate.close()
        order.append("closed")

    closer = threading.Thread(target=close)
    closer.start()
    while gate.is_open:
        pass
    assert not gate.enter()
    gate.leave()
    order.append("one left")
    order.append("last leaves")
    gate.leave()
    closer.join(10)
    assert order == ["one left", "last leaves", "closed"]


def test_closing_twice_is_fine() -> None:
    gate = closed_gate()
    gate.close()
    assert not gate.is_open
