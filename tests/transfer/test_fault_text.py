"""The language of fault injection: what it means, and how it refuses."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.transfer.bulk_harness import ROOT
from transfer.config import TransferConfig
from transfer.fault_rules import MAX_RULES, MAX_TEXT_CHARS, FaultKind, FaultRule, Span
from transfer.fault_text import FaultRuleInvalid, parse_rules


def one(text: str) -> FaultRule:
    (rule,) = parse_rules(text).rules
    return rule


def test_several_rules_and_a_seed_are_read_in_order() -> None:
    rules = parse_rules(
        "read@tcp p=0.01 reset after=64KiB; write peer=127.0.0.1:9000 delay=50ms..200ms; "
        "any  nth=100 corrupt;; seed=7;"
    )
    reset, delay, corrupt = rules.rules
    assert rules.seed == 7
    assert reset == FaultRule(
        text="read@tcp p=0.01 reset after=64KiB",
        kind=FaultKind.RESET,
        right="r",
        transport="tcp",
        probability=0.01,
        after_nbytes=Span(65_536, 65_536),
    )
    assert (delay.right, delay.peer, delay.pause_s) == ("w", "127.0.0.1:9000", Span(0.05, 0.2))
    assert (corrupt.right, corrupt.every, corrupt.num_bytes) == (None, 100, 1)
    assert corrupt.text == "any nth=100 corrupt"


def test_words_may_stand_in_any_order_and_units_are_exact() -> None:
    rule = one("write count=3 after=1B..2MiB stall=5us until=2s from=1ms")
    assert (rule.kind, rule.limit) == (FaultKind.STALL, 3)
    assert rule.after_nbytes == Span(1, 2 << 20)
    assert rule.pause_s == Span(5e-6, 5e-6)
    assert (rule.from_s, rule.until_s) == (0.001, 2.0)
    assert one("any drop").until_s == math.inf
    assert one("any corrupt=16").num_bytes == 16


def test_what_is_described_is_read_back() -> None:
    rules = parse_rules("any@shm   truncate after=0..9; read corrupt=2 peer=::1; seed=12")
    assert rules.describe() == "any@shm truncate after=0..9; read corrupt=2 peer=::1; seed=12"
    assert parse_rules(rules.describe()) == rules


WRONG = [
    ("", 0, "has no fault rule: write, for example"),
    ("seed=7", 0, "has no fault rule"),
    ("reed drop", 1, "begin a rule with read, write or any"),
    ("p=0.5 read drop", 1, "begin a rule with read, write or any"),
    ("read@udp drop", 1, "unknown transport 'udp': one of loopback, shm, tcp"),
    ("read", 1, "no kind of fault: add one of delay, drop, reset"),
    ("read drop reset", 11, "a second kind of fault"),
    ("read drop drop", 11, "'drop' is there twice"),
    ("read p=0.1 p=0.2 drop", 12, "'p' is there twice"),
    ("read drop p=0", 11, "write p=0.01: more than 0, at most 1"),
    ("read drop p=1.5", 11, "write p=0.01"),
    ("read drop p=nan", 11, "write p=0.01"),
    ("read drop nth=0", 11, "write nth=NUMBER, from 1"),
    ("read drop count=many", 11, "write count=NUMBER"),
    ("read drop peer=", 11, "write peer=HOST or peer=HOST:PORT"),
    ("read drop=1", 6, "drop takes no value"),
    ("read delay", 6, "'' is no time: write delay=50ms"),
    ("read delay=5", 6, "'5' is no time: write delay=50ms"),
    ("read delay=2s..1s", 6, "2s..1s runs backwards"),
    ("read stall=99999s", 6, "too long: at most 3600s"),
    ("read reset after=64kb", 12, "'64kb' is no size: write after=64KiB"),
    ("read corrupt=0", 6, "write corrupt=NUMBER, from 1 to 4096"),
    ("read drop after=1", 11, "a drop has no place"),
    ("read drop from=2s until=1s", 19, "the rule ends before it begins"),
    ("read drop hard", 11, "unknown word 'hard': use delay"),
    ("read drop; write drip; seed=1", 18, "unknown word 'drip'"),
    ("read drop; seed=1; seed=2", 20, "a second seed"),
    ("read drop; seed=x", 12, "write seed=NUMBER"),
    ("read drop; seed=1 drop", 19, "seed=NUMBER stands alone"),
]


@pytest.mark.parametrize(("text", "position", "remedy"), WRONG, ids=[w[0] or "-" for w in WRONG])
def test_a_bad_rule_is_refused_with_rule_position_and_remedy(
    text: str, position: int, remedy: str
) -> None:
    with pytest.raises(FaultRuleInvalid) as caught:
        parse_rules(text)
    message = str(caught.value)
    assert remedy in message
    if position:
        assert f"position {position}:" in message
        rule = text[: position - 1].count(";")
        assert f"fault rule {rule + 1} ({text.split(';')[rule].strip()!r})" in message


def test_the_size_of_the_text_is_bounded() -> None:
    with pytest.raises(FaultRuleInvalid, match=f"{MAX_RULES} rules are the most"):
        parse_rules("any drop;" * (MAX_RULES + 1))
    with pytest.raises(FaultRuleInvalid, match=f"{MAX_TEXT_CHARS} are the most"):
        parse_rules(" " * (MAX_TEXT_CHARS + 1))


@given(st.text(alphabet="readwritanydopsetmc@=.;0159 KiBµ٣²", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_rules(text)
    except FaultRuleInvalid:
        pass


def test_a_configuration_with_a_bad_rule_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown word 'sometimes'"):
        TransferConfig(inject="read drop sometimes")


def test_the_documentation_names_every_word_and_its_example_is_understood() -> None:
    page = (ROOT / "docs" / "fault-injection.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"--inject '([^']+)'", page)
    assert len(parse_rules(example).rules) == 3
    words = [kind.value for kind in FaultKind]
    words += [f"{name}=" for name in ("p", "nth", "count", "peer", "after", "from", "until")]
    assert [word for word in words if f"`{word}" not in page] == []
    (refusal,) = re.findall(r"fault rule 2 .*", page)
    with pytest.raises(FaultRuleInvalid, match=re.escape(refusal)):
        parse_rules("any drop; write delay=5")
