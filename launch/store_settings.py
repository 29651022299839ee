"""From the options of a page store to its configs, with every check that can be made beforehand.

Owns the words of each refusal: the option, the value, the remedy. Knows no processes: ``store``
uses it for itself, ``up`` for all the stores that it is about to start.
"""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.config import StoreConfig
from launch.config import PageStoreOptions
from launch.errors import ConfigError
from launch.option_words import reason_of
from launch.runtime import config_errors
from launch.sizes import human_size, in_units, parse_size, segment_size

if TYPE_CHECKING:
    from kvstore.ssd import SsdConfig

SSD_FORM = "write PATH:SIZE, for example /mnt/nvme/kvferry:512GiB"
QUOTA_FORM = "write NAMESPACE=FRACTION, 64 hex digits (`kvferry namespace` prints them) and 0..1"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def store_config(options: PageStoreOptions, bind: str) -> StoreConfig:
    """Return the configuration of one store node.

    Raises:
        ConfigError: a size, a quota or the watermarks cannot work.
    """
    if options.low_watermark > options.high_watermark:
        raise ConfigError(
            f"--low-watermark {options.low_watermark}: above --high-watermark "
            f"{options.high_watermark}: give it too, lower than that"
        )
    segment_nbytes, quotas = segment_size(options.segment), parse_quotas(options.quota)
    with config_errors("page store"):
        return StoreConfig(
            segment_nbytes=segment_nbytes,
            bind=bind,
            eviction=options.policy,
            replicas=options.replicas,
            quotas=quotas,
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
        )


def parse_quotas(texts: tuple[str, ...]) -> dict[str, float]:
    """Return the fractions by namespace.

    Raises:
        ConfigError: not NAMESPACE=FRACTION, a namespace twice, or more than everything in all.
    """
    quotas: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        fraction = _fraction(number)
        if not _NAMESPACE.fullmatch(name) or fraction is None:
            raise ConfigError(f"--quota {text}: {QUOTA_FORM}")
        if name in quotas:
            raise ConfigError(f"--quota {text}: this namespace has one already: give it once")
        quotas[name] = fraction
    total = math.fsum(quotas.values())
    if total > 1:
        raise ConfigError(
            f"--quota {texts[-1]}: all quotas together are {total:g} of the memory: give at most 1"
        )
    return quotas


def _fraction(text: str) -> float | None:
    try:
        fraction = float(text)
    except ValueError:
        return None
    return fraction if math.isfinite(fraction) and 0 < fraction <= 1 else None


def ssd_config(text: str) -> SsdConfig:
    """Return what ``--ssd PATH:SIZE`` asks for; whether the disk has it is seen when it is opened.

    Raises:
        ConfigError: not PATH:SIZE, no size, or one that no tier can have.
    """
    from kvstore.ssd import SsdConfig

    path, nbytes = parse_ssd(text)
    try:
        return SsdConfig(path=path, nbytes=nbytes)
    except ValueError as error:
        raise ConfigError(f"--ssd {text}: {in_units(reason_of(error))}") from error


def parse_ssd(text: str) -> tuple[Path, int]:
    """Return path and bytes of PATH:SIZE; the path may have colons.

    Raises:
        ConfigError: it is not that.
    """
    path, colon, size = text.rpartition(":")
    if not colon or not path or not size:
        raise ConfigError(f"--ssd {text}: {SSD_FORM}")
    try:
        return Path(path), parse_size(size, "--ssd")
    except ConfigError:
        raise ConfigError(f"--ssd {text}: {size!r} is no size: {SSD_FORM}") from None


def ssd_of(text: str | None, name: str) -> str | None:
    """Return the ``--ssd`` of the store ``name`` of ``up``: a directory of its own in the given."""
    if text is None:
        return None
    path, colon, size = text.rpartition(":")
    return f"{path.rstrip('/') or '/'}/{name}{colon}{size}"


def check_stores(options: PageStoreOptions, num_stores: int) -> None:
    """Refuse here what each of ``num_stores`` on this machine would refuse, or all together.

    Makes nothing: something else may be refused yet. ``make_ssd_directory`` follows.

    Raises:
        ConfigError: with the value and the remedy.
    """
    if not num_stores:
        return
    segment_size(options.segment, num_stores=num_stores)
    store_config(options, "tcp://127.0.0.1:0")
    if options.replicas > num_stores:
        raise ConfigError(
            f"--replicas {options.replicas}: more than the {num_stores} store nodes: "
            f"start more (--store {options.replicas})"
        )
    if options.ssd is not None:
        ssd_config(options.ssd)
        _check_disk(options.ssd, num_stores)


def make_ssd_directory(options: PageStoreOptions) -> None:
    """Make the directory of all stores' directories, when everything else has been accepted.

    Raises:
        ConfigError: it cannot be made after all.
    """
    if options.ssd is None:
        return
    path, _ = parse_ssd(options.ssd)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(_no_directory(options.ssd, error.strerror)) from error


def _check_disk(text: str, num_stores: int) -> None:
    path, nbytes = parse_ssd(text)
    try:
        above = _existing(text, path)
        stat = os.statvfs(above)
    except OSError as error:
        raise ConfigError(_no_directory(text, error.strerror)) from error
    if not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--ssd {text}: give a directory that this user can write to")
    if not stat.f_blocks:  # /proc and the like
        raise ConfigError(f"--ssd {text}: {above} keeps no files: give a directory on a disk")
    held = sum(file.stat().st_blocks * 512 for file in path.glob("*/*") if file.is_file())
    room = stat.f_bavail * stat.f_frsize + held
    if nbytes * num_stores > room:
        times = f" times {num_stores} stores" if num_stores > 1 else ""
        raise ConfigError(
            f"--ssd {text}{times}: the disk has room for {human_size(room)}: "
            "give a smaller size, or free some"
        )


def _existing(text: str, path: Path) -> Path:
    """Return the directory, or the one that it would be made in."""
    if path.exists():
        if not path.is_dir():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        return path
    if not path.parent.exists():
        raise ConfigError(f"--ssd {text}: {path.parent} does not exist: make it, or mount the disk")
    if not path.parent.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return path.parent


def _no_directory(text: str, reason: str | None) -> str:
    return f"--ssd {text}: {reason}: give a directory that this user can write to"
