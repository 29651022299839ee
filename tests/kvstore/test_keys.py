"""Claims about page keys: no two different inputs meet, equal inputs agree everywhere."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import namespace_of, page_key, page_keys
from kvstore.page import KEY_NBYTES, PageSpec

SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32")
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)

PRINT_KEYS = """
from kvstore.keys import namespace_of, page_keys
from kvstore.page import KEY_NBYTES, PageSpec
spec = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16)
namespace = namespace_of("weights", spec, adapter="a", salt="b")
print([key.hex() for key in page_keys(namespace, range(100), 16)])
"""


def test_adapters_and_salts_never_meet() -> None:
    """ "a" + "bc" is not "ab" + "c"; an absent one is not an empty one; neither is the other."""
    words = [None, "", "a", "ab", "abc", "bc", "c", "x", "\x00", "\x01x"]
    namespaces = [
        namespace_of("weights", SPEC, adapter=adapter, salt=salt)
        for adapter, salt in itertools.product(words, words)
    ]
    assert len(set(namespaces)) == len(namespaces)


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 32},
        {"page_size": 32},
        {"dtype": "bfloat16"},
    ],
)
def test_every_field_of_the_spec_separates(other: dict[str, object]) -> None:
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    assert namespace_of("weights", SPEC) != namespace_of("weights", PageSpec(**fields | other))


def test_digits_do_not_move_between_fields_of_the_spec() -> None:
    one = PageSpec(num_layers=1, num_kv_heads=11, head_dim=16)
    two = PageSpec(num_layers=11, num_kv_heads=1, head_dim=16)
    assert namespace_of("weights", one) != namespace_of("weights", two)


def test_other_weights_share_no_key() -> None:
    one, two = (page_keys(namespace_of(w, SPEC), range(64), 16) for w in ("w1", "w2"))
    assert not set(one) & set(two)


def test_fresh_processes_agree_whatever_their_hash_seed() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(printed) == 1
    namespace = namespace_of("weights", SPEC, adapter="a", salt="b")
    here = [key.hex() for key in page_keys(namespace, range(100), 16)]
    assert printed == {f"{here}\n".encode()}


def test_a_page_behind_another_prefix_has_another_key() -> None:
    namespace = namespace_of("weights", SPEC)
    shared = list(range(100, 116))
    one = page_keys(namespace, [1] * 16 + shared, 16)
    two = page_keys(namespace, [2] * 16 + shared, 16)
    assert one[1] != two[1]


@given(TOKENS, st.integers(1, 17))
def test_a_key_commits_to_exactly_the_tokens_up_to_its_end(tokens: list[int], size: int) -> None:
    namespace = namespace_of("weights", SPEC)
    keys = page_keys(namespace, tokens, size)
    assert len(keys) == -(-len(tokens) // size)
    assert all(len(key) == KEY_NBYTES for key in keys)
    assert len(set(keys)) == len(keys)
    parent = namespace
    for index, key in enumerate(keys):
        page = tokens[index * size : (index + 1) * size]
        assert key == page_key(parent, page)
        assert page_keys(namespace, tokens[: (index + 1) * size], size) == keys[: index + 1]
        parent = key  # type: ignore[assignment]
    changed = [*tokens[:-1], tokens[-1] ^ 1]
    assert page_keys(namespace, changed, size)[-1] != keys[-1]
    assert page_keys(namespace, changed, size)[:-1] == keys[:-1]


def test_a_tail_of_zeros_is_not_a_longer_tail() -> None:
    namespace = namespace_of("weights", SPEC)
    tails = [page_key(namespace, [0] * count) for count in range(1, 17)]
    assert len(set(tails)) == 16


def test_media_separate_pages_of_equal_tokens() -> None:
    namespace = namespace_of("weights", SPEC)
    keys = {page_key(namespace, [1], media) for media in ([], [b"ab"], [b"a", b"b"], [b"b"])}
    assert len(keys) == 4
