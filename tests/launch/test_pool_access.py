"""Nodes on device memory: the same tokens, through staging pages. The CPU stands in for a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from engine.device_pages import PoolPages
from engine.fake import FakeRunner, fake_generate
from engine.request import (
    DecodeRequest,
    GenerateRequest,
    PrefillDone,
    PrefillRequest,
    RequestId,
    SamplingParams,
    TokensOut,
)
from kvstore.device.staged import StagedStore
from kvstore.device.staging import DeviceRegion
from launch.config import ComputeOptions
from launch.errors import ConfigError
from launch.model_store import ResolvedModel
from launch.pool_access import reach_pool, stage_pool
from launch.runner_factory import make_runner
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from tests.engine.checkpoints import make_model, save
from tests.kvstore.memory import MemoryStore
from tests.prefill_node.harness import (
    LocalMembership,
    LocalNetwork,
    LocalTransfer,
    caller,
    pack,
    prompt_of,
)
from transfer.identity import Role, new_identity

NUM_PAGES = 64
PARAMS = SamplingParams(temperature=0.0, seed=7, max_tokens=24, ignore_eos=True)


@asynccontextmanager
async def node_on(
    kind: type[Any], config: Any, memory: MemoryStore, num_staging_pages: int
) -> AsyncIterator[Any]:
    """A node whose pool is reached through staging pages only."""
    runner = FakeRunner(num_pages=NUM_PAGES)
    store = StagedStore(
        memory,
        transfer=LocalTransfer(),
        pages=PoolPages(runner.pool, num_staging_pages),
        spec=runner.info.spec,
    )
    node = kind(
        config,
        identity=new_identity(Role.PREFILL if kind is PrefillNode else Role.DECODE),
        network=LocalNetwork(),
        transfer=LocalTransfer(),
        store=store,
        membership=LocalMembership(),
        runner=runner,
        region=store.region,
    )
    await node.start()
    yield node
    await node.close()
    assert store.region.revoked
    assert store.staging.num_held == 0
    node.check()


@pytest.mark.parametrize("num_staging_pages", [1, 8])
@pytest.mark.parametrize("num_tokens", [5, 64, 330])
async def test_prefill_and_decode_on_device_memory_give_the_models_tokens(
    num_staging_pages: int, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    request = GenerateRequest(request_id=RequestId("r"), prompt=pack(prompt), sampling=PARAMS)
    expected = [out.token for out in fake_generate(prompt, PARAMS)]
    memory = MemoryStore(FakeRunner(num_pages=2).info.spec)
    async with node_on(PrefillNode, PrefillConfig(), memory, num_staging_pages) as node:
        events = [event async for event in node.prefill(PrefillRequest(request), caller())]
    assert events[0].output.token == expected[0]
    assert isinstance(events[1], PrefillDone)
    num_prompt_pages = -(-num_tokens // 16)
    assert len(memory.pages) == num_prompt_pages
    async with node_on(DecodeNode, DecodeConfig(), memory, num_staging_pages) as node:
        message = DecodeRequest(request=request, expect_prefill=False)
        items = [item async for item in node.decode(message, caller())]
        assert node.counters()["num_pull_read"] == num_prompt_pages
    tokens = [out.token for item in items if isinstance(item, TokensOut) for out in item.outputs]
    assert tokens == expected
    assert len(memory.pages) > num_prompt_pages, "generated pages were not written back"


async def test_a_host_pool_is_reached_directly_and_a_device_pool_through_staging() -> None:
    pool = FakeRunner(num_pages=NUM_PAGES).pool
    memory = MemoryStore(pool.spec)
    direct = reach_pool(memory, pool, LocalTransfer())
    assert direct.store is memory
    assert direct.region.nbytes == pool.nbytes
    staged = stage_pool(memory, pool, LocalTransfer())
    assert isinstance(staged.store, StagedStore)
    assert isinstance(staged.region, DeviceRegion)
    assert staged.region.nbytes == pool.nbytes
    assert staged.store.staging.region.nbytes <= pool.nbytes, "more staging than pages"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_where_there_is_none_is_one_line(tmp_path: Path) -> None:
    directory = save(make_model("qwen2"), tmp_path)
    for name, path in (("tiny", directory), ("fake", None)):
        options = ComputeOptions.of(model=name, device="cuda", num_pages=8)
        with pytest.raises(ConfigError, match="cuda") as error:
            make_runner(options, ResolvedModel(name, path), 1)
        assert "--device cpu" in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_a_pool_on_a_gpu_is_staged_through_pinned_memory(tmp_path: Path) -> None:
    options = ComputeOptions.of(model="tiny", device="cuda", num_pages=8)
    runner = make_runner(options, ResolvedModel("tiny", save(make_model("qwen2"), tmp_path)), 1)
    access = reach_pool(MemoryStore(runner.info.spec), runner.pool, LocalTransfer())
    assert isinstance(access.region, DeviceRegion)
