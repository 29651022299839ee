"""Checksums and identity: what makes a page believable."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest

from kvstore.checksum import INLINE_NBYTES_MAX, PageBytes, checksum_of, checksums
from kvstore.page import PageKey, PageSpec
from kvstore.store import GetOutcome, PageIdentity, PageRecord
from kvstore.verify import verify
from tests.kvstore.pages import SPEC, bytes_of, sequence


def record_of(page: PageIdentity) -> PageRecord:
    return PageRecord(
        key=page.key,
        parent=page.parent,
        depth=page.depth,
        tokens=page.tokens,
        checksum=checksum_of(SPEC, bytes_of(page).data, page.num_tokens),
        page_nbytes=SPEC.page_nbytes,
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_every_valid_byte_counts_and_no_other(num_tokens: int) -> None:
    page = sequence(range(num_tokens))[0]
    record = record_of(page)
    blob = bytearray(bytes_of(page).data)
    num_detected = 0
    for i in range(len(blob)):
        blob[i] ^= 0x10
        outcome = verify(record, page, SPEC, memoryview(blob))
        num_detected += outcome is GetOutcome.CORRUPT
        blob[i] ^= 0x10
    assert num_detected == SPEC.token_nbytes * num_tokens
    assert verify(record, page, SPEC, memoryview(blob)) is GetOutcome.READ


@pytest.mark.parametrize(
    "change",
    [
        {"key": PageKey(b"k" * 32)},
        {"parent": b"p" * 32},
        {"depth": 7},
        {"tokens": b"\1\0\0\0" * 4},
        {"checksum": b"c" * 16},
        {"checksum": b""},
        {"page_nbytes": 1},
    ],
)
def test_a_record_that_differs_in_one_field_is_corrupt(change: dict[str, object]) -> None:
    page = sequence(range(4))[0]
    record = msgspec.structs.replace(record_of(page), **change)
    assert verify(record, page, SPEC, bytes_of(page).data) is GetOutcome.CORRUPT


async def test_large_pages_are_hashed_off_the_loop() -> None:
    spec = PageSpec(num_layers=8, num_kv_heads=8, head_dim=128, page_size=16, dtype="float32")
    blob = memoryview(bytes(spec.page_nbytes))
    assert spec.page_nbytes > INLINE_NBYTES_MAX
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    sums = await checksums([PageBytes(spec, blob, 16)] * 8)
    counter.cancel()
    await asyncio.gather(counter, return_exceptions=True)
    assert sums == [checksum_of(spec, blob, 16)] * 8
    assert turns > 1


def test_the_package_is_free_of_torch_and_small() -> None:
    script = (
        "import sys, importlib, pkgutil, psutil, kvstore\n"
        "for m in pkgutil.walk_packages(kvstore.__path__, 'kvstore.'):\n"
        "    importlib.import_module(m.name)\n"
        "assert kvstore.StoreClient and kvstore.StoreNode\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "rss = psutil.Process().memory_info().rss >> 20\n"
        "assert rss < 120, rss"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
