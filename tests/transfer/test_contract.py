"""Every check of ``tests/transfer/contract`` on every transport, under the name of the check."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import uvloop

from tests.transfer.contract import MODULES, endings, real_world, transports
from tests.transfer.contract.world import Check

CHECKS = [importlib.import_module(f"tests.transfer.contract.{name}") for name in MODULES]


def checks_of(module: ModuleType) -> list[Check]:
    """Return the functions named ``test_*`` that ``module`` itself defines."""
    found = inspect.getmembers(module, inspect.iscoroutinefunction)
    return [
        check
        for name, check in found
        if name.startswith("test_") and check.__module__ == module.__name__
    ]


def on_every_transport(check: Check) -> Callable[..., None]:
    """Return a test with the parameters and marks of ``check``, and its transport for its world."""

    def test(transport: str, **parameters: Any) -> None:
        transports.run(transport, check, **parameters)

    _, *parameters = inspect.signature(check).parameters.values()
    transport = inspect.Parameter("transport", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = transports.all_that_have(getattr(check, "needs", None))
    test.__name__, test.__doc__ = check.__name__, check.__doc__
    test.__signature__ = inspect.Signature([transport, *parameters])  # type: ignore[attr-defined]
    test.pytestmark = [  # type: ignore[attr-defined]
        pytest.mark.parametrize("transport", names).mark,
        *getattr(check, "pytestmark", []),
    ]
    return test


for _module in CHECKS:
    for _check in checks_of(_module):
        assert _check.__name__ not in globals(), f"two checks are named {_check.__name__}"
        globals()[_check.__name__] = on_every_transport(_check)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("transport", transports.that_are_real())
def test_an_application_on_uvloop_is_served_like_any_other(transport: str, kind: str) -> None:
    """The engine keeps loops of its own for its threads; that of the application may be any."""
    for ending in ("deadline", "cancel"):
        check = endings.test_an_operation_that_ended_half_way_does_not_touch_its_memory_again
        new_loop = uvloop.new_event_loop
        real_world.run(transport, check, new_loop=new_loop, kind=kind, ending=ending)


def test_no_module_of_checks_is_forgotten_and_each_transport_is_listed() -> None:
    assert all(checks_of(module) for module in CHECKS)
    assert {"loopback", "shm", "tcp", "auto", "sim"} <= set(transports.CONTENDERS)
