"""The one list of transports that keep the contract.

Owns which there are, how a check is run on each, what each can do beyond the others, and why one is
skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from tests.transfer.contract import real_world, sim_world
from tests.transfer.contract.world import Check, Trait
from transfer.config import TRANSPORTS

HAS_UCX = any(importlib.util.find_spec(name) for name in ("ucxx", "ucp"))
UCX_MISSING = "needs UCX: pip install ucxx-cu12"
WITHIN_ONE_PROCESS = frozenset({"loopback", "sim"})


class Contender(NamedTuple):
    """One transport as the suite sees it."""

    name: str
    run: Callable[..., None]
    traits: frozenset[Trait]
    marks: tuple[pytest.MarkDecorator, ...] = ()


CONTENDERS = {
    each.name: each
    for each in (
        Contender("loopback", real_world.run, frozenset({Trait.DEVICE_MEMORY})),
        Contender("shm", real_world.run, frozenset({Trait.DEVICE_MEMORY})),
        Contender("tcp", real_world.run, frozenset(Trait)),
        Contender(
            "ucx",
            real_world.run,
            frozenset({Trait.SECRET, Trait.CONNECTS, Trait.DEVICE_MEMORY}),
            (pytest.mark.skipif(not HAS_UCX, reason=UCX_MISSING),),
        ),
        Contender("auto", real_world.run, frozenset({Trait.DEVICE_MEMORY})),
        Contender("sim", sim_world.run, frozenset()),
    )
    if each.name == "sim" or each.name in TRANSPORTS
}


def all_that_have(trait: Trait | None) -> list[Any]:
    """Return the transports with ``trait``, all for None, as parameters of a test."""
    every = CONTENDERS.values()
    return _parameters(each for each in every if trait is None or trait in each.traits)


def that_are_real() -> list[Any]:
    """Return the transports that are not simulated."""
    return _parameters(each for each in CONTENDERS.values() if each.name != "sim")


def that_cross_processes() -> list[Any]:
    """Return the transports between processes."""
    return _parameters(each for each in CONTENDERS.values() if each.name not in WITHIN_ONE_PROCESS)


def _parameters(contenders: Iterable[Contender]) -> list[Any]:
    return [pytest.param(each.name, marks=each.marks) for each in contenders]


def run(transport: str, check: Check, **parameters: Any) -> None:
    """Run one check on one transport."""
    CONTENDERS[transport].run(transport, check, **parameters)
