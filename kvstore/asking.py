"""What may be asked of a page store: one check at the door of every back end.

Owns the ``ValueError`` of a call that no store could serve: a mistake of the program that makes it,
not of the world, and found before anything is done. Knows no store.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

from kvstore.page import KEY_NBYTES, PageKey, PageSpec
from kvstore.store import GetPage, PageIdentity, PutPage
from kvstore.verify import well_formed
from transfer.interface import Region

_FINITE_MAX = sys.float_info.max


def check_deadline(deadline_s: float) -> None:
    """Check that ``deadline_s`` is a time of the loop's clock, past or to come.

    Raises:
        ValueError: it is none.
    """
    number = isinstance(deadline_s, (int, float))
    if not number or not -_FINITE_MAX <= deadline_s <= _FINITE_MAX:
        remedy = "a finite time of the loop's clock: transfer.interface.deadline_after(seconds)"
        raise ValueError(f"deadline_s={deadline_s!r}: must be {remedy}")


def check_keys(keys: Sequence[PageKey], deadline_s: float) -> None:
    """Check what ``match`` is asked.

    Raises:
        ValueError: a key is none, or the deadline.
    """
    check_deadline(deadline_s)
    num = len(keys)  # often thousands: counted without a loop
    all_bytes = list(map(type, keys)).count(bytes) == num
    if all_bytes and list(map(len, keys)).count(KEY_NBYTES) == num:
        return
    for i, key in enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_NBYTES:
            raise ValueError(f"keys[{i}]={key!r}: must be {KEY_NBYTES} bytes")


def check_pages(
    pages: Sequence[PutPage] | Sequence[GetPage],
    spec: PageSpec,
    region: Region,
    deadline_s: float,
) -> None:
    """Check what ``put`` or ``get`` is asked, whose bytes are to lie in ``region``.

    Raises:
        ValueError: a page cannot be one of ``spec``, or does not lie in ``region``, or the deadline
            is none.
    """
    check_deadline(deadline_s)
    last = region.nbytes - spec.page_nbytes
    for i, (identity, offset) in enumerate(pages):
        try:
            if not (_typed(identity) and well_formed(identity, spec)):
                raise ValueError(f"pages[{i}] is no page of {spec}: {_described(identity)}")
            if not 0 <= operator.index(offset) <= last:
                place = f"{offset}..{offset + spec.page_nbytes}"
                raise ValueError(f"pages[{i}] at {place}: the region has {region.nbytes} bytes")
        except TypeError:
            raise ValueError(f"pages[{i}] at {offset!r}: must be an int") from None


def _typed(identity: PageIdentity) -> bool:
    """Nothing else arrives at a node, and it would not say of which page."""
    same = type(identity.key) is type(identity.parent) is type(identity.tokens) is bytes
    return same and type(identity.depth) is int


def _described(identity: PageIdentity) -> str:
    """All but the bytes themselves: they may be somebody's prompt."""
    sizes = []
    for name in ("key", "parent", "tokens"):
        value = getattr(identity, name)
        size = f"{len(value)} bytes" if type(value) is bytes else repr(type(value))
        sizes.append(f"{name} of {size}")
    its_own = ", its own parent" if identity.key == identity.parent else ""
    return f"{', '.join(sizes)}, depth {identity.depth!r}{its_own}"
