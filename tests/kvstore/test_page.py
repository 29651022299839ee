"""Claims about page geometry."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.page import PageSpec

SPEC = PageSpec(num_layers=3, num_kv_heads=2, head_dim=4, page_size=8, dtype="float32")


def test_sizes_follow_from_the_shape() -> None:
    assert SPEC.shape == (2, 3, 2, 8, 4)
    assert SPEC.page_nbytes == int(np.prod(SPEC.shape)) * 4
    assert SPEC.token_nbytes * SPEC.page_size == SPEC.page_nbytes


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2)])
def test_pages_cover_tokens_the_tail_included(tokens: int, pages: int) -> None:
    assert SPEC.num_pages_for(tokens) == pages


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_valid_bytes_are_the_first_slots_of_every_run(num_tokens: int) -> None:
    page = np.random.default_rng(0).random(SPEC.shape, dtype=np.float32)
    expected = np.ascontiguousarray(page[:, :, :, :num_tokens]).tobytes()
    assert SPEC.valid_bytes(memoryview(page.tobytes()), num_tokens).tobytes() == expected


def test_a_head_range_is_one_contiguous_byte_range() -> None:
    page = np.arange(int(np.prod(SPEC.shape)), dtype=np.float32).reshape(SPEC.shape)
    half = SPEC.page_nbytes // 2
    assert page[1].tobytes() == page.tobytes()[half:]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("head_dim", -1), ("page_size", 0), ("page_size", 4096), ("dtype", "int3")],
)
def test_a_spec_that_cannot_be_names_the_value(field: str, value: object) -> None:
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | {field: value}
    with pytest.raises(ValueError, match=str(value)):
        PageSpec(**fields)
