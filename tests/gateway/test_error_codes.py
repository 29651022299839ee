"""Nodes and gateway share one list of error codes, and every code has its one outcome."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.request import ErrorCode
from gateway.errors import GatewayError, GenerationFailed, InvalidRequest, TimedOut, TooManyRequests
from tests.gateway.fake_node import Fault
from tests.gateway.fakes import FakeCluster, collect
from transfer.errors import RemoteFailed

ROOT = Path(__file__).resolve().parents[2]
NUM_FAULTS = 50  # more than any retry

OUTCOMES: dict[ErrorCode, type[GatewayError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.TOO_LONG: InvalidRequest,
    ErrorCode.OVERLOADED: TooManyRequests,
    ErrorCode.DRAINING: TooManyRequests,
    ErrorCode.DEADLINE_EXCEEDED: TimedOut,
    ErrorCode.CLOSED: GenerationFailed,
    ErrorCode.ENGINE_FAILED: GenerationFailed,
    ErrorCode.SUPERSEDED: GenerationFailed,
}


@pytest.mark.parametrize("code", ErrorCode)
async def test_every_code_of_a_decode_leg_has_its_outcome(code: ErrorCode) -> None:
    async with FakeCluster(num_prefill=0).running() as cluster:
        faults = [Fault(0, RemoteFailed(str(code), "why")) for _ in range(NUM_FAULTS)]
        cluster.d().faults = faults
        with pytest.raises(OUTCOMES[code]):
            await collect(cluster)


@pytest.mark.parametrize("code", ErrorCode)
async def test_a_prefill_leg_that_fails_leaves_the_prompt_to_decode_unless_time_is_up(
    code: ErrorCode,
) -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().faults = [Fault(0, RemoteFailed(str(code), "why")) for _ in range(NUM_FAULTS)]
        if code is ErrorCode.DEADLINE_EXCEEDED:
            with pytest.raises(TimedOut):
                await collect(cluster)
        else:
            tokens, _ = await collect(cluster)
            assert len(tokens) == 8


def codes_sent(path: Path) -> Iterator[str]:
    """Codes of ``RemoteFailed(...)`` and ``Refusal(...)`` that a file writes as literals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            first = node.args[0] if node.args else None
            if node.func.id in ("RemoteFailed", "Refusal") and isinstance(first, ast.Constant):
                yield str(first.value)


@pytest.mark.parametrize("package", ["prefill_node", "decode_node"])
def test_nodes_send_no_code_that_is_not_named(package: str) -> None:
    files = sorted((ROOT / package).glob("*.py"))
    assert files
    named = {str(code) for code in ErrorCode}
    strange = {(path.name, code) for path in files for code in codes_sent(path)}
    assert {item for item in strange if item[1] not in named} == set()
