"""What one process may use of its machine: cores, threads, devices. Set before torch is imported.

Owns the environment variables and system calls; knows no roles. OpenMP reads its variables when
libgomp is loaded, CUDA when the driver is: therefore ``apply`` runs first in the process, and
asserts that torch is not there yet.

``OMP_WAIT_POLICY=PASSIVE`` is not a matter of taste: prefill and decode share cores, and OpenMP
threads that spin while they wait steal them from each other (two processes of two threads on two
cores are over four times slower with spinning).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping

from launch.errors import ConfigError

ARENAS_MAX = 2  # malloc arenas: every further one keeps freed memory for itself
PARENT_VARIABLE = "KVFERRY_PARENT_PID"
MOONCAKE_THREADS = "mooncake-"  # what the names of kvstore/mooncake/connection.py begin with

_M_ARENA_MAX = -8  # mallopt(3)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def parse_cores(text: str) -> list[int]:
    """Return the cores of ``"0,2-3"``.

    Raises:
        ConfigError: not a list of cores, or a core this process may not use.
    """
    usable = os.sched_getaffinity(0)
    cores: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ConfigError(f"--cores {text}: write a list like 0,1 or 0-3")
        cores += range(int(low), int(high or low) + 1)
    missing = sorted(set(cores) - usable)
    if missing:
        raise ConfigError(f"--cores {text}: core {missing[0]} is not one of {sorted(usable)}")
    return sorted(set(cores))


def parse_gpus(text: str) -> list[str]:
    """Return the device ids of ``"0,1"`` (numbers, or names as CUDA_VISIBLE_DEVICES takes them)."""
    gpus = [part.strip() for part in text.split(",")]
    if not all(gpus):
        raise ConfigError(f"--gpus {text}: write a list like 0,1")
    return gpus


def num_threads(threads: int | None) -> int:
    """Return the compute threads of this process: as asked, else its cores."""
    return threads if threads is not None else len(os.sched_getaffinity(0))


def apply(*, cores: str | None, threads: int | None, gpus: str | None) -> int:
    """Confine this process; return its number of compute threads."""
    allowed = parse_cores(cores) if cores is not None else None
    devices = parse_gpus(gpus) if gpus is not None else None
    assert "torch" not in sys.modules, "the environment must be set before torch is imported"
    if allowed is not None:
        os.sched_setaffinity(0, allowed)
    count = num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(count)
    os.environ["MKL_NUM_THREADS"] = str(count)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    bound_malloc()
    return count


def bound_malloc() -> None:
    """Bound the malloc arenas of this process (MALLOC_ARENA_MAX is read too early to be set)."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in musl
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, ARENAS_MAX)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that must not outlive this process."""
    return {**os.environ, **extra, PARENT_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """In a child of ``kvferry``: receive SIGTERM when the parent dies, however it dies."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before prctl
        raise SystemExit(0)


def end_if_a_call_hangs(exit_code: int) -> None:
    """End the process now, with its exit code, if a closed store left a call of Mooncake behind.

    The library crashes when the interpreter ends under its call (SIGSEGV was seen), and waiting for
    the call may take a minute.
    """
    if any(thread.name.startswith(MOONCAKE_THREADS) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
