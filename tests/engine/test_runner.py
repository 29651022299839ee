"""Claims about the parts between scheduler and model: the ragged batch, checks, sampling paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.batch import build_batch
from engine.loader import load_runner
from engine.request import FinishReason, SamplingParams
from engine.step import SampleInput, SeqStep
from kvstore.page import PageId
from tests.engine.checkpoints import make_model, save

ROOT = Path(__file__).resolve().parents[2]
EMPTY = np.zeros(0, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def test_the_ragged_batch_is_what_flashinfer_expects() -> None:
    prompt = np.arange(10, 30, dtype=np.int32)
    entry = SampleInput(GREEDY, prompt, EMPTY)
    steps = [
        SeqStep(prompt[3:10], 3, [PageId(5), PageId(7), PageId(9)]),  # 7 tokens, 10 positions
        SeqStep(prompt[8:9], 8, [PageId(2), PageId(1), PageId(3)], False, entry),
        SeqStep(prompt[:4], 0, [PageId(6)], True, entry),
    ]
    batch = build_batch(steps, page_size=4)
    ragged = batch.ragged
    assert ragged.qo_indptr.tolist() == [0, 7, 8, 12]
    assert ragged.kv_indptr.tolist() == [0, 3, 6, 7]
    assert ragged.kv_indices.tolist() == [5, 7, 9, 2, 1, 3, 6]
    assert ragged.kv_last_page_len.tolist() == [2, 1, 4]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 9, 8, 0, 1, 2, 3]
    assert ragged.slots.tolist() == [23, 28, 29, 30, 31, 36, 37, 0, 24, 25, 26, 27]
    assert batch.rows.tolist() == [7, 11]
    assert batch.tokens.tolist() == [*prompt[3:10], prompt[8], *prompt[:4]]
    for array in ragged[:4]:
        assert array.dtype == np.int32


def test_pages_beyond_the_positions_are_not_read() -> None:
    step = SeqStep(np.zeros(3, dtype=np.int32), 0, [PageId(4), PageId(99)])
    assert build_batch([step], page_size=4).ragged.kv_indices.tolist() == [4]


def test_sampling_stop_reasons_and_insane_steps(tmp_path: Path) -> None:
    directory = save(make_model("mistral"), tmp_path)
    runner = load_runner(directory, device="cpu", dtype="float32", num_pages=8)
    prompt = np.arange(3, 9, dtype=np.int32)
    table = [PageId(2)]

    def run(params: SamplingParams) -> tuple[int, FinishReason | None]:
        (out,) = runner.step([SeqStep(prompt, 0, table, True, SampleInput(params, prompt, EMPTY))])
        assert out is not None
        return out.token, out.stop

    token, stop = run(GREEDY)
    assert stop == FinishReason.LENGTH
    both = SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=(token,))
    assert run(both) == (token, FinishReason.STOP)
    hot = SamplingParams(temperature=3.0, max_tokens=9, seed=4)
    assert run(hot) == run(hot)
    assert (
        len({run(SamplingParams(temperature=3.0, max_tokens=9, seed=i))[0] for i in range(9)}) > 2
    )
    for bad in (
        SeqStep(np.array([160], dtype=np.int32), 0, table),
        SeqStep(prompt, 0, [PageId(0)]),
        SeqStep(prompt, 0, [PageId(8)]),
        SeqStep(prompt, 251, [PageId(1)] * 16),
    ):
        with pytest.raises(AssertionError):
            runner.step([bad])


def test_torch_free_parts_do_not_import_torch() -> None:
    code = (
        "import sys, engine, engine.request, engine.step, engine.sampling, engine.page_pool, "
        "engine.errors, engine.config, engine.model_config; sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert result.returncode == 0
