"""The SSD tier beside plain direct I/O of the same file system, and how fast it starts.

``python -m benchmarks.ssd_tier [--folder DIR] [--json]``. Pages of 368,640 bytes are stored and
loaded through a tier, with many under way, and written and read by plain ``pwritev``/``preadv`` of
one thread, in turns; medians of five. The start is that of a tier of 10 GiB whose index is full and
whose page file is sparse: from ``open`` to the first page served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvstore.checksum import checksum_of
from kvstore.page import PageKey, PageSpec
from kvstore.server.tier import TierPage
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.ssd.config import BLOCK_NBYTES
from kvstore.ssd.header import SlotHeader, pack_header, slot_nbytes_of
from kvstore.ssd.index import Index
from kvstore.ssd.opening import INDEX_NAME, PAGES_NAME
from kvstore.ssd.superblock import parse_superblock
from kvstore.store import PageRecord

GIB = 1 << 30
LARGE = PageSpec(num_layers=36, num_kv_heads=2, head_dim=80, dtype="bfloat16")  # 368,640 bytes
SMALL = PageSpec(num_layers=4, num_kv_heads=2, head_dim=32, dtype="bfloat16")  # 16 KiB
AT_ONCE = 32
NUM_PAGES = 1000
ROUNDS = 5


def made(number: int, spec: PageSpec, checksum: bytes) -> TierPage:
    """Page ``number``, of bytes with that checksum."""
    record = PageRecord(
        key=PageKey(number.to_bytes(32, "little")),
        parent=bytes(32),
        depth=number,
        tokens=np.arange(number, number + spec.page_size, dtype="<i4").tobytes(),
        checksum=checksum,
        page_nbytes=spec.page_nbytes,
    )
    return TierPage(record, spec, bytes(32), 35, float(number))


async def through_tier(folder: Path) -> tuple[float, float]:
    """Bytes per second stored and loaded."""
    config = SsdConfig(path=folder / "tier", nbytes=GIB // 2, num_writers=2)
    tier = await SsdTier.open(config)
    data = np.random.default_rng(0).integers(0, 256, LARGE.page_nbytes, dtype=np.uint8)
    checksum = checksum_of(LARGE, data.data, LARGE.page_size)
    pages = [made(number, LARGE, checksum) for number in range(NUM_PAGES)]
    targets = [np.zeros(LARGE.page_nbytes, dtype=np.uint8) for _ in range(AT_ONCE)]

    async def store(start: int) -> None:
        for page in pages[start::AT_ONCE]:
            assert await tier.store(page, data.data)

    async def load(start: int) -> None:
        for page in pages[start::AT_ONCE]:
            assert await tier.load(page.record.key, targets[start].data)

    began = time.perf_counter()
    await asyncio.gather(*(store(start) for start in range(AT_ONCE)))
    stored = time.perf_counter()
    await tier.flush()
    flushed = time.perf_counter()
    await asyncio.gather(*(load(start) for start in range(AT_ONCE)))
    loaded = time.perf_counter()
    await tier.close()
    nbytes = NUM_PAGES * LARGE.page_nbytes
    return nbytes / (stored - began), nbytes / (loaded - flushed)


def plainly(folder: Path) -> tuple[float, float]:
    """Bytes per second of one thread that writes and reads a new file directly."""
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    nbytes = LARGE.page_nbytes
    with mmap.mmap(-1, nbytes) as buffer:
        began = time.perf_counter()
        for number in range(NUM_PAGES):
            os.pwritev(fd, [buffer], number * nbytes)
        written = time.perf_counter()
        for number in range(NUM_PAGES):
            os.preadv(fd, [buffer], number * nbytes)
        ended = time.perf_counter()
    os.close(fd)
    return NUM_PAGES * nbytes / (written - began), NUM_PAGES * nbytes / (ended - written)


async def fill_sparsely(folder: Path, nbytes: int, spec: PageSpec) -> int:
    """Make a tier whose index names a page in every slot; only the last one has bytes.

    Returns the number of that page: also the number of pages, less one.
    """
    config = SsdConfig(path=folder, nbytes=nbytes)
    await (await SsdTier.open(config)).close()
    path = folder / PAGES_NAME
    with path.open("rb") as file:
        superblock = parse_superblock(file.read(BLOCK_NBYTES), str(path))
    slot_nbytes, slab_nbytes = slot_nbytes_of(spec), superblock.slab_nbytes
    offsets = [
        BLOCK_NBYTES + slab * slab_nbytes + slot * slot_nbytes
        for slab in range((nbytes - BLOCK_NBYTES) // slab_nbytes)
        for slot in range(slab_nbytes // slot_nbytes)
    ]
    data = np.random.default_rng(0).integers(0, 256, spec.page_nbytes, dtype=np.uint8)
    checksum = checksum_of(spec, data.data, spec.page_size)
    rows: dict[int, bytes | None] = {}
    header = b""
    for number, offset in enumerate(offsets):
        page = made(number, spec, checksum)
        header = rows[offset] = pack_header(SlotHeader(page, superblock.uuid, offset, number))
    with path.open("r+b") as file:
        file.seek(offsets[-1])
        file.write(header + data.tobytes())
    index = Index(folder / INDEX_NAME, superblock.uuid)
    index.apply(rows, durable=True)
    index.close()
    return len(offsets) - 1


async def starts_in(folder: Path, nbytes: int, last: int, spec: PageSpec) -> dict[str, float]:
    """Seconds of each step from ``open`` to the first page served."""
    marks = [time.perf_counter()]
    tier = await SsdTier.open(SsdConfig(path=folder, nbytes=nbytes))
    marks.append(time.perf_counter())
    num_pages = sum(1 for _ in tier.contents())
    marks.append(time.perf_counter())
    into = np.zeros(spec.page_nbytes, dtype=np.uint8)
    assert await tier.load(PageKey(last.to_bytes(32, "little")), into.data) is not None
    marks.append(time.perf_counter())
    await tier.close()
    steps = [after - before for before, after in pairwise(marks)]
    return {
        "pages": num_pages,
        "open_s": steps[0],
        "contents_s": steps[1],
        "first_page_s": steps[2],
        "all_s": sum(steps),
    }


async def measure(folder: Path) -> dict[str, object]:
    tier, plain = [], []
    for number in range(ROUNDS):
        place = folder / f"round-{number}"
        place.mkdir()
        tier.append(await through_tier(place))
        plain.append(plainly(place))
        for file in sorted(place.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    result: dict[str, object] = {}
    for column, name in enumerate(("write", "read")):
        ours = statistics.median(round_[column] for round_ in tier)
        theirs = statistics.median(round_[column] for round_ in plain)
        result[name] = {
            "tier_gb_s": round(ours / 1e9, 3),
            "plain_gb_s": round(theirs / 1e9, 3),
            "ratio": round(ours / theirs, 2),
        }
    for spec in (LARGE, SMALL):
        place = folder / f"start-{spec.page_nbytes}"
        last = await fill_sparsely(place, 10 * GIB, spec)
        steps = await starts_in(place, 10 * GIB, last, spec)
        result[f"start_10GiB_of_{spec.page_nbytes}"] = {k: round(v, 3) for k, v in steps.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the file system to measure")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = asyncio.run(measure(Path(folder)))
    if given.json:
        print(json.dumps(result, indent=1))
        return
    for name, values in result.items():
        print(f"{name:24}", values)


if __name__ == "__main__":
    main()
