"""Seeded tests of a session that has cores to spare are shared with helper processes."""

from __future__ import annotations

import functools
import gc
import inspect
from pathlib import Path

import pytest

from tests.sim.helpers import Helpers, num_idle_cores

FEW_TESTS = 40  # not worth starting a process for
HERE = Path(__file__).parent
HELPERS = pytest.StashKey[Helpers]()


def _name(item: pytest.Item) -> str | None:
    """``module:function seed`` of a test that is a function of its seed alone."""
    if not isinstance(item, pytest.Function) or item.path.parent != HERE:
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    function = item.function
    if list(parameters) != ["seed"] or list(inspect.signature(function).parameters) != ["seed"]:
        return None
    return f"{function.__module__}:{function.__qualname__} {parameters['seed']}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the helpers with the first test here, and let none of them be idle."""
    stash = item.config.stash
    if HELPERS not in stash:
        tests = [name for name in map(_name, item.session.items) if name is not None]
        num_helpers = num_idle_cores() if len(tests) > FEW_TESTS else 0
        stash[HELPERS] = Helpers(tests, num_helpers)
        gc.collect()
        gc.freeze()  # what was imported stays: it need not be looked at after every seed
    stash[HELPERS].feed()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Nothing is left to do for a test that a helper has run to its end."""
    name = _name(pyfuncitem)
    if name is None:
        return None
    run = functools.partial(pyfuncitem.obj, pyfuncitem.callspec.params["seed"])
    return pyfuncitem.config.stash[HELPERS].has_run(name, run) or None


def pytest_sessionfinish(session: pytest.Session) -> None:
    helpers = session.config.stash.get(HELPERS, None)
    if helpers is not None:
        helpers.close()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which tests did not run where they were meant to."""
    helpers = config.stash.get(HELPERS, None)
    lines = [] if helpers is None else helpers.report()
    if lines:
        terminalreporter.section("helper processes")
    for line in lines:
        terminalreporter.line(line)
