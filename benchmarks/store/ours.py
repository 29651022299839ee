"""kvferry's own page store: a node in a process of its own, a client in this one."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from benchmarks.store.members import FixedMembership, read_member
from benchmarks.store.subject import Bytes, Pages
from kvstore.client.store_client import StoreClient
from kvstore.page import PageKey, PageSpec
from kvstore.store import GetOutcome, GetPage, PageIdentity, PutOutcome, PutPage
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after
from transfer.zmq_network import ZmqNetwork

OP_S = 30.0  # no operation of the benchmark takes longer unless something is wrong
START_S = 60.0
_TOKENS = bytes(64)  # 16 of them


def spec_of(page_nbytes: int) -> PageSpec:
    """A geometry whose page has ``page_nbytes`` bytes: 16 tokens, one head, one layer."""
    per_token = 16 * 2
    assert page_nbytes % per_token == 0, page_nbytes
    return PageSpec(num_layers=1, num_kv_heads=1, head_dim=page_nbytes // per_token, dtype="uint8")


def identity_of(key: bytes) -> PageIdentity:
    """A page without ancestors: of what the benchmark measures, ancestry is no part."""
    return PageIdentity(key=PageKey(key), parent=bytes(32), depth=0, tokens=_TOKENS)


class KvferryStore:
    """``Subject`` over ``StoreClient``. Every get verifies the checksums of its pages."""

    def __init__(self, transport: str, page_nbytes: int, batch: int, segment_nbytes: int) -> None:
        self.name = f"kvferry {transport}"
        self.spec = spec_of(page_nbytes)
        self._transport = transport
        self._batch = batch
        self._segment_nbytes = segment_nbytes

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.store.node"),
            *("--transfer", self._transport, "--segment-nbytes", str(self._segment_nbytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        info = read_member(await self._line())
        self._network = ZmqNetwork()
        self._transfer = TransferEngine(TransferConfig(transport=self._transport))
        await self._transfer.start()
        nbytes = self._batch * self.spec.page_nbytes
        self.source = self._transfer.allocate(nbytes)
        self._into = self._transfer.allocate(nbytes)
        self.client = StoreClient(
            identity=new_identity(Role.OBSERVER),
            network=self._network,
            transfer=self._transfer,
            membership=FixedMembership(info),
            spec=self.spec,
        )

    async def _line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the store node ended; see its messages above")
        return line.decode()

    def pages(self) -> Pages:
        """The registered memory that ``put`` and ``get`` work on."""
        return Pages(_array(self.source.view), _array(self._into.view), self.spec.page_nbytes)

    async def put(self, keys: list[bytes]) -> None:
        nbytes = self.spec.page_nbytes
        pages = [PutPage(identity_of(key), i * nbytes) for i, key in enumerate(keys)]
        result = await self.client.put(pages, source=self.source, deadline_s=deadline_after(OP_S))
        if any(outcome is not PutOutcome.STORED for outcome in result.outcomes):
            raise RuntimeError(f"not stored: {set(result.outcomes)}")

    async def get(self, keys: list[bytes]) -> None:
        nbytes = self.spec.page_nbytes
        pages = [GetPage(identity_of(key), i * nbytes) for i, key in enumerate(keys)]
        result = await self.client.get(pages, into=self._into, deadline_s=deadline_after(OP_S))
        if any(outcome is not GetOutcome.READ for outcome in result.outcomes):
            raise RuntimeError(f"not read: {set(result.outcomes)}")

    async def clear(self) -> None:
        await self.client.quiet()
        await self.client.clear(deadline_s=deadline_after(OP_S))

    async def rss_nbytes(self) -> int:
        """Resident bytes of the node's process."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"rss\n")
        return int(await self._line())

    async def close(self) -> None:
        await self.client.close()
        await self._transfer.close()
        await self._network.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def _array(view: memoryview) -> Bytes:
    return np.frombuffer(view, dtype=np.uint8)
