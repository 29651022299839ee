"""``kvferry doctor``: verify and time every transfer path beside its physical limit.

Owns the run as a whole: which side is reached how, the order of the transports, what is printed and
the exit code.

Runs on the event loop that nodes run on, with their settings: what is measured is what they get.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from launch.doctor.grid import Case, choose_cases
from launch.doctor.measure import measure, unavailable
from launch.doctor.memory import GONE
from launch.doctor.options import DoctorOptions
from launch.doctor.peer import Link, elsewhere, in_a_child, in_this_process
from launch.doctor.rows import Finding, Row, Unavailable, encode_finding
from launch.doctor.stall import measure_stalled
from launch.doctor.table import Report, progress, show
from launch.doctor.verdict import check
from launch.errors import ConfigError
from launch.parts import SECRET_VARIABLE, make_network, read_secret
from launch.runtime import run_command, run_role, setup_logging
from transfer.config import is_local_host

if TYPE_CHECKING:
    from transfer.zmq_network import ZmqNetwork


def run(options: DoctorOptions) -> None:
    """Run the command to its end.

    Raises:
        LaunchError: a wrong option, no other side, or ``RequirementUnmet``.
    """
    setup_logging(options.log_level)
    secret = read_secret(options)
    _keep_ucx_off_stdout()
    if options.serve:
        if options.peer is not None:
            raise ConfigError(
                f"--peer {options.peer}: with --serve this is the side that waits: leave one out"
            )
        from launch.doctor.server import DoctorRole

        run_role(DoctorRole(options, secret), drain_timeout_s=0.0)
        return
    _check_peer(options, secret)
    cases = choose_cases(options.pages, options.batch, full=options.full)
    # SIGTERM as well: what was measured is not lost
    findings = run_command(_report(options, secret, cases), signals=(SIGINT, SIGTERM))
    check(findings, options.require, options.min_ratio)


def _keep_ucx_off_stdout() -> None:
    """Its log goes there by default. UCX is not loaded yet; children inherit it."""
    if os.environ.get("UCX_LOG_FILE", "stdout").startswith("stdout"):
        os.environ["UCX_LOG_FILE"] = "stderr"


def _check_peer(options: DoctorOptions, secret: str | None) -> None:
    if options.peer is None:
        return
    if options.stalled_peer:
        raise ConfigError("--stalled-peer: stops a process of this machine: leave --peer out")
    if secret is None and not is_local_host(options.peer_host):
        raise ConfigError(
            f"--peer {options.peer}: another machine, which needs the cluster secret that its "
            f"`kvferry doctor --serve` was given: --secret-file (or {SECRET_VARIABLE})"
        )


async def _report(options: DoctorOptions, secret: str | None, cases: list[Case]) -> list[Finding]:
    """Measure and print; return everything that was found.

    Whatever ends it early, Ctrl-C included, what was measured until then is shown.
    """
    findings: list[Finding] = []
    each = 1 if options.stalled_peer else 3 * len(cases) + 1
    steps = len(options.measured) * each
    network = make_network(secret)
    try:
        with progress(steps, rows_follow=options.as_json) as report:
            async with aclosing(_measure_all(network, options, secret, cases, report)) as found:
                async for finding in found:
                    findings.append(finding)
                    if options.as_json:
                        print(encode_finding(finding), flush=True)
    finally:
        if findings and not options.as_json:
            show(findings)
        await network.close()
    return findings


async def _measure_all(
    network: ZmqNetwork,
    options: DoctorOptions,
    secret: str | None,
    cases: list[Case],
    report: Report,
) -> AsyncGenerator[Finding, None]:
    if options.stalled_peer:
        for transport in options.measured:
            if transport == "loopback":
                yield unavailable(transport, "a peer that can be stopped is another process")
            else:
                yield await measure_stalled(transport, network, options, secret)
            report(f"{transport}, one of four stopped")
        return
    async with AsyncExitStack() as stack:
        links, gone = _Links(network, options, secret, stack), False
        for transport in options.measured:
            if gone and transport != "loopback":
                yield Unavailable(
                    transport=transport, reason="not tried any more", remedy=GONE, failed=True
                )
                continue
            link = await links.to(transport)
            if link is None:
                yield unavailable(transport, "the other side is another process")
                continue
            async with aclosing(measure(transport, link, cases, options, secret)) as found:
                async for finding in found:
                    report(finding.name if isinstance(finding, Row) else finding.transport)
                    gone = isinstance(finding, Unavailable) and finding.remedy == GONE
                    yield finding


class _Links:
    """The ways to the other side; each is opened when it is first needed."""

    def __init__(
        self,
        network: ZmqNetwork,
        options: DoctorOptions,
        secret: str | None,
        stack: AsyncExitStack,
    ) -> None:
        self._network = network
        self._options = options
        self._secret = secret
        self._stack = stack
        self._outside: Link | None = None

    async def to(self, transport: str) -> Link | None:
        """Return the link for ``transport``; None where it cannot reach the other side."""
        options = self._options
        if transport == "loopback":
            if options.peer is not None:
                return None
            inside = in_this_process(self._network, options, self._secret)
            return await self._stack.enter_async_context(inside)
        if self._outside is None:
            if options.peer is not None:
                opening = elsewhere(self._network, options.peer)
            else:
                opening = in_a_child(self._network, options)
            self._outside = await self._stack.enter_async_context(opening)
        return self._outside
