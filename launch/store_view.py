"""The page stores of a cluster as an operator sees them: one summary per node, and its tables.

Owns which numbers matter and how they are laid out: no table is wider than 100 columns while node
ids have at most 14 characters. Pure; ``status.py`` asks the nodes. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.messages import StoreStats
from launch.sizes import human_size
from transfer.membership import Member

NAMESPACES_SHOWN = 10
EVICTION_REASONS = ("watermark", "demand", "quota", "slab")
PAGE_HEADINGS = (
    "store",
    "ready",
    "spilled",
    "writing",
    "owed",
    "memory used",
    "SSD used",
    "matched",
)
WORK_HEADINGS = (
    *("store", "up", "life", *EVICTION_REASONS),
    *("read", "leases", "waits", "missing"),
)
NAMESPACE_HEADINGS = ("namespace", "pages", "memory", "SSD")
SSD_LABEL = "ssd_given_nbytes"  # of a store: what its operator wrote with --ssd
UNNAMED = "(none named)"
NEARLY_ALL = 0.99  # of a size that was given: less than that is worth a word


class Answer(NamedTuple):
    """What a store node said when asked, or why it could not be asked."""

    stats: StoreStats | None
    error: str = ""


def summary(member: Member, answer: Answer) -> dict[str, Any]:
    """Return one store node as plain data; without an answer, as of its last heartbeat."""
    stats = answer.stats
    stated = member.status.gauges if stats is None else stats.numbers
    numbers = Counter({name: int(value) for name, value in stated.items() if value == value})
    return {
        "policy": member.info.labels.get("policy", ""),
        "replicas": member.info.contract.get("replicas", "1"),
        "incarnation": member.info.identity.incarnation,
        "uptime_s": None if stats is None else round(stated.get("uptime_s", 0.0), 1),
        "answered": stats is not None,
        "error": answer.error,
        **_held(numbers),
        "ssd": _ssd(numbers, stats, member.info.labels.get(SSD_LABEL)),
        "match_hit_ratio": _ratio(numbers["hits"], numbers["misses"]),
        "pages_read": numbers["leased_pages"],
        "unspilled": numbers["evicted_unspilled"],
        "evicted": {reason: numbers[f"evicted_{reason}"] for reason in EVICTION_REASONS},
        "leases": numbers["num_leases"],
        "reservations": numbers["num_writing"],
        "waits": numbers["num_waits"],
        "replicas_missing": numbers["replicas_missing"],
        "repairing": bool(numbers["repairing"]),
        "namespaces": [] if stats is None else [_namespace(*use) for use in _used(stats)],
    }


def _held(numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "pages": {
            "ready": numbers["num_pages"],
            "spilled": numbers["num_spilled"],
            "writing": numbers["num_writing"],
            "owed": numbers["num_owed"],
        },
        "memory": {
            "nbytes": numbers["segment_nbytes"],
            "used_nbytes": numbers["segment_nbytes"] - numbers["free_nbytes"],
            "pinned_nbytes": numbers["pinned_nbytes"],
        },
    }


def _ssd(
    numbers: Mapping[str, int], stats: StoreStats | None, given: str | None
) -> dict[str, Any] | None:
    """The SSD of a node; None when it has none. ``given`` is the size that the operator wrote."""
    if "ssd_nbytes" not in numbers:
        return None
    unknown = "its log says why"
    reason = unknown if stats is None else stats.facts.get("ssd_degraded", unknown)
    return {
        "nbytes": numbers["ssd_nbytes"],
        "given_nbytes": int(given) if given is not None and given.isdecimal() else None,
        "used_nbytes": numbers["ssd_used_nbytes"],
        "pages": numbers["ssd_pages"],
        "degraded": reason if numbers["ssd_degraded"] else None,
    }


def _ratio(hits: int, misses: int) -> float | None:
    return round(hits / (hits + misses), 4) if hits + misses else None


def _used(stats: StoreStats) -> Iterable[tuple[str, int, int, int]]:
    for usage in stats.namespaces:
        yield usage.namespace.hex(), usage.num_pages, usage.memory_nbytes, usage.ssd_nbytes


def _namespace(name: str, num_pages: int, memory_nbytes: int, ssd_nbytes: int) -> dict[str, Any]:
    return {
        "namespace": name,
        "pages": num_pages,
        "memory_nbytes": memory_nbytes,
        "ssd_nbytes": ssd_nbytes,
    }


def by_namespace(stores: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what each namespace holds on all stores together, the largest first."""
    totals: dict[str, list[int]] = {}
    for store in stores:
        for use in store["namespaces"]:
            total = totals.setdefault(use["namespace"], [0, 0, 0])
            for at, name in enumerate(("pages", "memory_nbytes", "ssd_nbytes")):
                total[at] += use[name]
    found = [_namespace(name, *total) for name, total in totals.items()]
    return sorted(found, key=lambda u: (-u["memory_nbytes"] - u["ssd_nbytes"], u["namespace"]))


# ---- for people


def store_text(stores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables of all stores, by node id; empty when there is none."""
    if not stores:
        return ""
    parts = [
        _title(stores),
        columns(PAGE_HEADINGS, [_page_row(name, store) for name, store in stores.items()]),
        "pages evicted by reason, promises, copies owed to other nodes:",
        columns(WORK_HEADINGS, [_work_row(name, store) for name, store in stores.items()]),
    ]
    spaces = by_namespace(stores.values())
    if spaces:
        rows = [_namespace_row(use) for use in spaces[:NAMESPACES_SHOWN]]
        parts.append(columns(NAMESPACE_HEADINGS, rows))
    if len(spaces) > NAMESPACES_SHOWN:
        parts.append(f"and {len(spaces) - NAMESPACES_SHOWN} smaller namespaces")
    return "\n".join([*parts, *_usable(stores), *_troubles(stores)])


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns of whatever width they need: nothing is ever cut."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def short_count(number: int) -> str:
    """Return a count in at most five characters: 99999, 100k, 1.2M, 346M, 1.2G."""
    if number < 100_000:
        return str(number)
    scaled: float = number
    for unit in ("k", "M", "G"):
        scaled /= 1000
        if scaled < 999.5 or unit == "G":
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    raise AssertionError


def short_size(nbytes: int) -> str:
    """Return a size in at most eight characters: 99.9 GiB, 512 GiB."""
    number, unit = human_size(nbytes).split()
    return f"{number if float(number) < 99.95 else f'{float(number):.0f}'} {unit}"


def _title(stores: Mapping[str, Mapping[str, Any]]) -> str:
    policies = {store["policy"]: None for store in stores.values()}
    policy = ", ".join(policies) or "unknown"
    if len(policies) > 1:
        policy = ", ".join(f"{name} {store['policy']}" for name, store in stores.items())
    replicas = max((store["replicas"] for store in stores.values()), key=len)
    return f"page store: policy {policy}; every page on {_copies(replicas, len(stores))}"


def _copies(replicas: str, num_stores: int) -> str:
    if replicas.isdecimal() and int(replicas) > num_stores:
        return f"{num_stores} node{'s' if num_stores > 1 else ''}, {replicas} wanted"
    return f"{replicas} of {num_stores} nodes"


def _page_row(name: str, store: Mapping[str, Any]) -> tuple[str, ...]:
    pages, ssd, ratio = store["pages"], store["ssd"], store["match_hit_ratio"]
    return (
        name,
        *(short_count(pages[state]) for state in ("ready", "spilled", "writing", "owed")),
        _filled(store["memory"]),
        "-" if ssd is None else _filled(ssd),
        "-" if ratio is None else f"{100 * ratio:.1f} %",
    )


def _filled(tier: Mapping[str, int]) -> str:
    used, unit = short_size(tier["used_nbytes"]).split()
    total, total_unit = short_size(tier["nbytes"]).split()
    return f"{used}{f' {unit}' if unit != total_unit else ''} of {total} {total_unit}"


def _work_row(name: str, store: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        "-" if store["uptime_s"] is None else _duration(store["uptime_s"]),
        store["incarnation"][:6],
        *(short_count(store["evicted"][reason]) for reason in EVICTION_REASONS),
        short_count(store["pages_read"]),
        short_count(store["leases"]),
        short_count(store["waits"]),
        short_count(store["replicas_missing"]),
    )


def _namespace_row(use: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        use["namespace"] or UNNAMED,
        short_count(use["pages"]),
        short_size(use["memory_nbytes"]),
        short_size(use["ssd_nbytes"]),
    )


def _duration(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f} d {hours % 24:.0f} h"
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} m"
    return f"{minutes:.0f} m {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def _usable(stores: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """What became of the sizes that were given with ``--ssd``, where the table shows less."""
    said: dict[str, list[str]] = {}
    for name, store in stores.items():
        ssd = store["ssd"]
        if ssd is None or ssd["given_nbytes"] is None:
            continue
        usable, given = short_size(ssd["nbytes"]), short_size(ssd["given_nbytes"])
        if ssd["nbytes"] < NEARLY_ALL * ssd["given_nbytes"] and usable != given:
            said.setdefault(f"{usable} of the {given} of --ssd", []).append(name)
    for text, names in said.items():
        yield f"{', '.join(names)}: {text} hold pages: its file has a header and whole slabs"


def _troubles(stores: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, store in stores.items():
        if not store["answered"]:
            yield f"{name} did not answer ({store['error']}): its numbers are its last heartbeat's"
        if store["repairing"]:
            yield f"{name} is repairing: it compares its pages with those of other nodes"
        if store["ssd"] is not None and store["ssd"]["degraded"] is not None:
            yield f"{name}: THE SSD TAKES NO PAGES: {store['ssd']['degraded']}"
        if store["unspilled"]:
            num = short_count(store["unspilled"])
            yield f"{name}: {num} pages left memory without a copy on the SSD"
