"""Sizes that people write: ``512MiB``, ``1GiB``, ``2g``; and how many pages fit in one.

Knows neither options nor devices; of the machine only how much memory it has.
"""

from __future__ import annotations

import os
import re

from kvstore.page import PageSpec
from launch.errors import ConfigError

SEGMENT_NBYTES_MIN = 1 << 20

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_COUNTED = re.compile(r"\bnbytes=\d+: |\b(\d+) bytes\b")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Return the bytes of ``text``; units are binary.

    Raises:
        ConfigError: not a size, or zero; the message names ``option``.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if nbytes <= 0:
        raise ConfigError(f"{option} {text}: write a size like 512MiB or 2GiB")
    return nbytes


def segment_size(text: str, *, num_stores: int = 1) -> int:
    """Return the bytes that ``--segment`` asks for in each of ``num_stores`` on this machine.

    Raises:
        ConfigError: not a size, too small to hold pages, or more than this machine has.
    """
    nbytes = parse_size(text, "--segment")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes < SEGMENT_NBYTES_MIN:
        raise ConfigError(f"--segment {text}: holds no pages: give at least 1MiB, better 1GiB")
    if nbytes * num_stores > memory:
        times = f" times {num_stores} stores" if num_stores > 1 else ""
        raise ConfigError(
            f"--segment {text}{times}: more than the {human_size(memory)} of memory of this "
            "machine: give less"
        )
    return nbytes


def pages_in(nbytes: int, spec: PageSpec, what: str) -> int:
    """Return how many pages of ``spec`` fit in ``nbytes``, which people know as ``what``.

    Raises:
        ConfigError: fewer than 2 (page 0 is the scratch page).
    """
    num_pages = nbytes // spec.page_nbytes
    if num_pages < 2:
        raise ConfigError(
            f"{what}: a page has {exact_size(spec.page_nbytes)}: give at least "
            f"{exact_size(2 * spec.page_nbytes)}"
        )
    return num_pages


def exact_size(nbytes: int) -> str:
    """Return ``nbytes`` with a unit, and as what can be given back as a size."""
    return f"{human_size(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def in_units(reason: str) -> str:
    """Return a refusal of a package that counts bytes, in the units that people write.

    ``nbytes=N`` at its beginning is the value itself, which the caller has named as it was written.
    """
    return _COUNTED.sub(lambda match: human_size(int(match[1])) if match[1] else "", reason)


def human_size(nbytes: float) -> str:
    """Return ``nbytes`` with a unit, for people."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
