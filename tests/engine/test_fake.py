"""Claims about the fake model: equal to its reference, and upset by any wrong byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.fake import FAKE_BOS, FAKE_EOS, FAKE_VOCAB_SIZE, FakeRunner, fake_generate
from engine.request import FinishReason, SamplingParams, TokenOut
from engine.step import SampleInput, SeqStep
from kvstore.page import PageId

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = np.frombuffer(b"the quick brown fox jumps over the lazy dog", dtype=np.uint8).astype(
    np.int32
)


def int32s(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


class Sequencer:
    """Drives one sequence through a runner."""

    def __init__(
        self, runner: FakeRunner, prompt: np.ndarray, params: SamplingParams, pages: Sequence[int]
    ) -> None:
        self.runner, self.prompt, self.params = runner, prompt, params
        self.pages = [PageId(p) for p in pages]
        self.done = 0
        self.output: list[TokenOut] = []

    def next_step(self, chunk: int) -> SeqStep:
        sequence = np.concatenate([self.prompt, int32s([t.token for t in self.output])])
        tokens = sequence[self.done : self.done + chunk]
        ends = self.done + len(tokens) == len(sequence)
        entry = SampleInput(self.params, self.prompt, sequence[len(self.prompt) :])
        return SeqStep(tokens, self.done, self.pages, True, entry if ends else None)

    def accept(self, step: SeqStep, out: TokenOut | None) -> None:
        self.done += len(step.tokens)
        if out is not None:
            self.output.append(out)

    @property
    def finished(self) -> bool:
        return bool(self.output) and self.output[-1].stop is not None

    def run(self, chunk: int = 512) -> list[TokenOut]:
        while not self.finished:
            step = self.next_step(chunk)
            self.accept(step, self.runner.step([step])[0])
        return self.output


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_chunking_and_page_size_gives_the_reference(chunk: int, page_size: int) -> None:
    runner = FakeRunner(num_pages=200, page_size=page_size)
    pages = list(range(199, 199 - -(-100 // page_size), -1))
    assert Sequencer(runner, PROMPT, GREEDY, pages).run(chunk) == fake_generate(PROMPT, GREEDY)


def test_geometry_does_not_change_tokens() -> None:
    runner = FakeRunner(num_pages=20, num_layers=5, num_kv_heads=3, head_dim=32)
    out = Sequencer(runner, PROMPT, GREEDY, range(3, 12)).run()
    assert out == fake_generate(PROMPT, GREEDY)


def test_mixed_batches_give_each_sequence_its_reference() -> None:
    rng = np.random.default_rng(7)
    runner = FakeRunner(num_pages=200)
    sequencers = []
    for i in range(12):
        prompt = int32s(rng.integers(0, 256, rng.integers(1, 70)))
        params = SamplingParams(temperature=float(i % 3), seed=i, max_tokens=20, top_p=0.9)
        pages = rng.permutation(np.arange(1 + i * 10, 11 + i * 10)).tolist()
        sequencers.append(Sequencer(runner, prompt, params, pages))
    while running := [s for s in sequencers if not s.finished]:
        steps = [s.next_step(int(rng.integers(1, 30))) for s in running]
        for sequencer, step, out in zip(running, steps, runner.step(steps), strict=True):
            sequencer.accept(step, out)
    for sequencer in sequencers:
        assert sequencer.output == fake_generate(sequencer.prompt, sequencer.params)


def test_emitted_tokens_continue_the_same_output() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    full = fake_generate(PROMPT, params)
    for cut in (1, 7, 29):
        assert fake_generate(PROMPT, params, [t.token for t in full[:cut]]) == full[cut:]


def test_every_valid_byte_matters_and_no_other() -> None:
    runner = FakeRunner(num_pages=6, page_size=4, num_kv_heads=1, head_dim=8)
    table = [PageId(4), PageId(2), PageId(5)]
    runner.step([SeqStep(PROMPT[:9], 0, table)])
    entry = SampleInput(SamplingParams(temperature=0.0, logprobs=0), PROMPT[:9], int32s([]))
    probe = [SeqStep(PROMPT[8:9], 8, table, False, entry)]
    (expected,) = runner.step(probe)
    pages = runner.pool.pages.numpy()
    for page in range(6):
        for index in np.ndindex(pages.shape[1:]):
            slot = index[3]
            valid = page in table and table.index(PageId(page)) * 4 + slot < 9
            pages[(page, *index)] ^= 0x10
            (out,) = runner.step(probe)
            assert (out != expected) == valid, (page, index)
            pages[(page, *index)] ^= 0x10


def test_swapped_pages_or_a_foreign_page_change_the_output() -> None:
    runner = FakeRunner(num_pages=12, page_size=4)
    entry = SampleInput(SamplingParams(temperature=0.0, logprobs=0), PROMPT[:12], int32s([]))
    runner.step([SeqStep(PROMPT[:12], 0, [PageId(1), PageId(2), PageId(3)])])
    runner.step([SeqStep(PROMPT[4:16], 0, [PageId(4), PageId(5), PageId(6)])])
    outs = [
        runner.step([SeqStep(PROMPT[11:12], 11, [PageId(p) for p in table], False, entry)])[0]
        for table in ((1, 2, 3), (2, 1, 3), (1, 4, 3), (1, 2, 6))
    ]
    assert all(out != outs[0] for out in outs[1:])


def test_write_kv_false_gives_the_same_token_and_writes_nothing() -> None:
    runner = FakeRunner(num_pages=6)
    table = [PageId(3), PageId(1), PageId(2)]
    entry = SampleInput(GREEDY, PROMPT, int32s([]))
    (first,) = runner.step([SeqStep(PROMPT, 0, table, True, entry)])
    before = runner.pool.storage.clone()
    (again,) = runner.step([SeqStep(PROMPT[-1:], len(PROMPT) - 1, table, False, entry)])
    assert again == first
    assert runner.pool.storage.equal(before)


def test_eos_ends_and_only_likely_tokens_come_out_greedily() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2000)
    outs = [fake_generate(int32s([FAKE_BOS, i]), params) for i in range(20)]
    assert {out[-1].stop for out in outs} == {FinishReason.STOP}
    assert all(out[-1].token == FAKE_EOS for out in outs)
    tokens = {t.token for out in outs for t in out[:-1]}
    assert tokens <= set(range(32, 127))
    assert len(tokens) > 60


def test_unused_tokens_never_come_even_when_hot() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=400, ignore_eos=True, seed=1)
    tokens = {t.token for t in fake_generate(PROMPT, params)}
    assert not tokens & {FAKE_BOS, FAKE_VOCAB_SIZE - 1}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (SeqStep(PROMPT[:5], 0, [PageId(0)]), "scratch"),
        (SeqStep(PROMPT[:5], 0, [PageId(10)]), "page 10 of 10"),
        (SeqStep(PROMPT[:17], 0, [PageId(1)]), "1 pages for 17"),
        (SeqStep(PROMPT[:17], 0, [PageId(1), PageId(1)]), "twice"),
        (SeqStep(PROMPT[:0], 0, [PageId(1)]), "no tokens"),
        (SeqStep(int32s([259]), 0, [PageId(1)]), "259"),
        (SeqStep(int32s([1]), 32, [PageId(1), PageId(2), PageId(3)]), "ends at 33"),
    ],
)
def test_insane_page_tables_are_named(step: SeqStep, message: str) -> None:
    runner = FakeRunner(num_pages=10, max_model_len=32)
    with pytest.raises(AssertionError, match=message):
        runner.step([step])


def test_writing_a_slot_that_another_sequence_attends_to_is_refused() -> None:
    runner = FakeRunner(num_pages=10)
    shared = [PageId(1)]
    runner.step([SeqStep(PROMPT[:8], 0, shared)])
    with pytest.raises(AssertionError, match="writes page 1 slot 4"):
        runner.step(
            [
                SeqStep(PROMPT[:1], 4, shared),
                SeqStep(PROMPT[:1], 8, [PageId(1)], False),
            ]
        )
    runner.step([SeqStep(PROMPT[:1], 8, shared), SeqStep(PROMPT[7:8], 7, shared, False)])


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=12"):
        FakeRunner(num_pages=4, head_dim=12)
