"""The text language of fault injection. Pure: text in, ``FaultRules`` out.

::

    rules     = entry *( ";" entry )
    entry     = "seed=" NUMBER / rule
    rule      = operation [ "@" transport ] 1*( kind / selector )   ; any order, exactly one kind
    operation = "read" / "write" / "any"
    kind      = "delay=" TIMES / "stall=" TIMES / "drop" / "reset" / "truncate"
              / "corrupt" [ "=" NUMBER ]                            ; bytes to flip, 1 by default
    selector  = "p=" 0..1          ; with this probability
              / "nth=" NUMBER      ; each so-many-th operation that the rule is about
              / "count=" NUMBER    ; so many faults at most
              / "peer=" NAME       ; host, host:port, loopback name or incarnation
              / "after=" SIZES     ; these bytes are spared; a random place by default
              / "from=" TIME / "until=" TIME                        ; since the engine started
    TIMES     = TIME [ ".." TIME ]      TIME = DECIMAL ( "us" / "ms" / "s" )
    SIZES     = SIZE [ ".." SIZE ]      SIZE = NUMBER [ "B" / "KiB" / "MiB" / "GiB" ]

For example ``read@tcp p=0.01 reset after=64KiB; write delay=50ms..200ms; any nth=9 corrupt``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transfer.fault_rules import (
    IN_THE_MIDDLE,
    MAX_CORRUPT_NBYTES,
    MAX_PAUSE_S,
    MAX_RULES,
    MAX_TEXT_CHARS,
    PAUSING,
    TRANSPORT_NAMES,
    FaultKind,
    FaultRule,
    FaultRules,
    Span,
)
from transfer.interface import Rights

_OPERATIONS: dict[str, Rights | None] = {"read": "r", "write": "w", "any": None}
_KINDS = {kind.value: kind for kind in FaultKind}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)")
_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB|GiB|)")


class FaultRuleInvalid(ValueError):
    """A rule that cannot be understood; the message has the rule, the position and the remedy."""


class _Word(NamedTuple):
    """One word of a rule: ``name`` or ``name=value``, and where it begins in the whole text."""

    name: str
    value: str | None
    position: int  # of the first character, from 0


class _Wrong(ValueError):
    """What is wrong with one word, and the remedy; becomes a ``FaultRuleInvalid``."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.position = position


def parse_rules(text: str) -> FaultRules:
    """Return the rules that ``text`` says.

    Raises:
        FaultRuleInvalid: the first thing that is wrong: its rule, position (characters, from 1,
            in ``text``) and the remedy.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise FaultRuleInvalid(f"{len(text)} characters of rules: {MAX_TEXT_CHARS} are the most")
    rules: list[FaultRule] = []
    seed: int | None = None
    for number, (entry, start) in enumerate(_entries(text), 1):
        words = [_word(match, start) for match in re.finditer(r"\S+", entry)]
        try:
            if words[0].name == "seed":
                seed = _seed(words, seed)
            else:
                rules.append(_rule(" ".join(entry.split()), words))
                _expect(len(rules) <= MAX_RULES, f"{MAX_RULES} rules are the most", words[0])
        except _Wrong as wrong:
            raise FaultRuleInvalid(
                f"fault rule {number} ({' '.join(entry.split())!r}), position "
                f"{wrong.position + 1}: {wrong}"
            ) from None
    if not rules:
        raise FaultRuleInvalid(
            f"{text!r} has no fault rule: write, for example, 'read p=0.1 reset'"
        )
    return FaultRules(tuple(rules), seed or 0)


def _entries(text: str) -> Iterator[tuple[str, int]]:
    """Yield each entry that is not blank, and where it begins."""
    for match in re.finditer(r"[^;]+", text):
        if match[0].strip():
            yield match[0], match.start()


def _word(match: re.Match[str], start: int) -> _Word:
    name, equals, value = match[0].partition("=")
    return _Word(name, value if equals else None, start + match.start())


def _expect(condition: object, problem: str, word: _Word) -> None:
    if not condition:
        raise _Wrong(problem, word.position)


def _seed(words: list[_Word], known: int | None) -> int:
    _expect(known is None, "a second seed: write one for all rules", words[0])
    _expect(len(words) == 1, "seed=NUMBER stands alone: end it with ';'", words[-1])
    return _number(words[0], 0, (1 << 63) - 1)


def _rule(text: str, words: list[_Word]) -> FaultRule:
    fields: dict[str, Any] = _head(words[0])
    seen: dict[str, _Word] = {}
    kinds: list[_Word] = []
    for word in words[1:]:
        _expect(word.name not in seen, f"{word.name!r} is there twice: leave one out", word)
        seen[word.name] = word
        if word.name in _KINDS:
            _expect(not kinds, "a second kind of fault: write a rule of its own for it", word)
            kinds.append(word)
            fields |= _kind(word)
        else:
            _expect(word.name in _SELECTORS, f"unknown word {word.name!r}: {_WORDS}", word)
            fields |= _SELECTORS[word.name](word)
    _expect(kinds, f"no kind of fault: add one of {', '.join(_KINDS)}", words[-1])
    rule = FaultRule(text=text, **fields)
    if rule.after_nbytes is not None and rule.kind not in IN_THE_MIDDLE:
        raise _Wrong(f"a {rule.kind.value} has no place: leave it out", seen["after"].position)
    if rule.from_s >= rule.until_s:
        raise _Wrong("the rule ends before it begins: until must be later", seen["until"].position)
    return rule


def _head(word: _Word) -> dict[str, Any]:
    operation, at, transport = word.name.partition("@")
    known = operation in _OPERATIONS and word.value is None
    _expect(known, "begin a rule with read, write or any, for example 'read@tcp p=0.1 drop'", word)
    if not at:
        return {"right": _OPERATIONS[operation]}
    names = ", ".join(TRANSPORT_NAMES)
    _expect(transport in TRANSPORT_NAMES, f"unknown transport {transport!r}: one of {names}", word)
    return {"right": _OPERATIONS[operation], "transport": transport}


def _kind(word: _Word) -> dict[str, Any]:
    kind = _KINDS[word.name]
    if kind in PAUSING:
        return {"kind": kind, "pause_s": _span(word, _time)}
    if kind is FaultKind.CORRUPT and word.value is not None:
        return {"kind": kind, "num_bytes": _number(word, 1, MAX_CORRUPT_NBYTES)}
    _expect(word.value is None, f"{word.name} takes no value: write {word.name}", word)
    return {"kind": kind}


def _probability(word: _Word) -> float:
    value = word.value or ""
    plain = re.fullmatch(r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?", value)
    _expect(plain and 0.0 < float(value) <= 1.0, "write p=0.01: more than 0, at most 1", word)
    return float(value)


def _peer(word: _Word) -> str:
    _expect(word.value, "write peer=HOST or peer=HOST:PORT", word)
    return word.value or ""


def _number(word: _Word, least: int, most: int) -> int:
    value = word.value or ""
    good = re.fullmatch(r"[0-9]{1,19}", value) and least <= int(value) <= most
    _expect(good, f"write {word.name}=NUMBER, from {least} to {most}", word)
    return int(value)


def _time(word: _Word, text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise _Wrong(f"{text!r} is no time: write {word.name}=50ms (us, ms or s)", word.position)
    seconds = float(match[1]) / _PER_SECOND[match[2]]
    _expect(seconds <= MAX_PAUSE_S, f"{text} is too long: at most {MAX_PAUSE_S:g}s", word)
    return seconds


def _size(word: _Word, text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None:
        problem = f"{text!r} is no size: write {word.name}=64KiB (B, KiB, MiB or GiB)"
        raise _Wrong(problem, word.position)
    return int(match[1]) * _BYTES[match[2]]


def _span(word: _Word, read: Callable[[_Word, str], float]) -> Span:
    low, dots, high = (word.value or "").partition("..")
    span = Span(read(word, low), read(word, high if dots else low))
    _expect(span.low <= span.high, f"{word.value} runs backwards: the lesser end first", word)
    return span


_SELECTORS: dict[str, Callable[[_Word], dict[str, Any]]] = {
    "p": lambda word: {"probability": _probability(word)},
    "nth": lambda word: {"every": _number(word, 1, 1 << 40)},
    "count": lambda word: {"limit": _number(word, 1, 1 << 40)},
    "peer": lambda word: {"peer": _peer(word)},
    "after": lambda word: {"after_nbytes": _span(word, _size)},
    "from": lambda word: {"from_s": _time(word, word.value or "")},
    "until": lambda word: {"until_s": _time(word, word.value or "")},
}
_WORDS = f"use {', '.join(_KINDS)}, {', '.join(f'{name}=' for name in _SELECTORS)}"
