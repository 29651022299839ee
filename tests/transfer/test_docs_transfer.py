"""``docs/transfer.md`` and ``docs/transfer-wire.md`` say what the code says.

The tables of the guide and of the wire page (limits, layouts, messages, codes) are parsed by their
headings, and each value is compared with the constant, codec or struct that it documents. A limit
that neither page names is an error as well. The guide's example is run.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from enum import EnumMeta
from fnmatch import fnmatchcase
from itertools import dropwhile, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import pytest
import xxhash
from msgspec import inspect as shapes

from launch.config import NodeOptions, UpOptions
from launch.doctor.rows import Row, Unavailable
from launch.doctor.table import HEADINGS
from launch.parts import MIN_SECRET_NCHARS
from transfer import (
    registry,
    rpc_frames,
    shm_control,
    shm_wire,
    tcp_codec,
    token,
    ucx_binding,
    ucx_codec,
    ucx_lifeline,
)
from transfer.config import TransferConfig
from transfer.counters import TransferCounters
from transfer.error_codes import STATUS_ERRORS
from transfer.interface import Priority

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")
WIRE = (ROOT / "docs" / "transfer-wire.md").read_text(encoding="utf-8")
PAGES = {"transfer.md": GUIDE, "transfer-wire.md": WIRE}
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1, "ms": 1}
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
# Files that do not load without their library: their constants are not the pages'.
BINDINGS = {name.rpartition(".")[2] for name in ucx_binding.BINDINGS.values()}
ADDRESSES = ("port", "ucx_port")  # fields of TransferConfig that are numbers, but no limits


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the head of the table.

    Each heading is on one of the two pages, once.
    """
    parts = "\n".join(PAGES.values()).split(f"\n#### {heading}\n")
    assert len(parts) == 2, f"{heading!r} heads {len(parts) - 1} tables of {', '.join(PAGES)}"
    lines = parts[1].partition("\n#")[0].splitlines()
    below = dropwhile(lambda line: line[:1] != "|", lines)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in takewhile(lambda line: line[:1] == "|", below)
    ]
    assert len(rows) > 2, f"the table {heading!r} is empty"
    return rows[2:]


def plain(cell: str) -> str:
    """Return what stands in backticks at the beginning of a cell; else the cell."""
    match = re.match(r"`([^`]*)`", cell)
    return match[1] if match else cell


def number(cell: str) -> float:
    """Return the value of ``4 MiB``, ``65,535``, ``0.5 s``. Milliseconds stay what they are."""
    match = re.fullmatch(r"([0-9][0-9,.]*) ?(\w*)", cell)
    assert match is not None, f"{cell!r} is no value: write 4 MiB, 65,535 or 0.5 s"
    assert match[2] in UNITS, f"{match[2]!r} is none of {', '.join(UNITS)}"
    return float(match[1].replace(",", "")) * UNITS[match[2]]


# Limits.


class Limit(NamedTuple):
    module: str
    name: str
    stated: float

    @property
    def value(self) -> float:
        if self.module == TransferConfig.__name__:
            return float(TransferConfig.model_fields[self.name].default)
        return float(getattr(importlib.import_module(f"transfer.{self.module}"), self.name))


def limits() -> list[Limit]:
    pages = "\n".join(PAGES.values())
    headings: list[str] = re.findall(r"^#### (Limits .*|Versions)$", pages, re.MULTILINE)
    return [
        Limit(plain(where), plain(name), number(stated))
        for heading in headings
        for name, stated, where, _ in table(heading)
    ]


def named_maxima() -> Iterator[tuple[str, str]]:
    """Yield module and name of every ``MAX_...`` and version that ``transfer`` defines."""
    for path in sorted((ROOT / "transfer").glob("*.py")):
        if path.stem in BINDINGS:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name.startswith("MAX_") or name.endswith("_VERSION"):
                    yield path.stem, name


@pytest.mark.parametrize("limit", limits(), ids=lambda limit: f"{limit.module}.{limit.name}")
def test_every_limit_of_the_pages_is_that_of_the_code(limit: Limit) -> None:
    assert limit.value == limit.stated


def test_every_maximum_of_the_code_is_on_a_page() -> None:
    stated = {(limit.module, limit.name) for limit in limits()}
    assert set(named_maxima()) - stated == set(), "add a row to a table of docs/transfer-wire.md"


def test_the_page_of_device_memory_states_the_same_limits() -> None:
    other = (ROOT / "docs" / "device-memory.md").read_text(encoding="utf-8")
    rows: list[tuple[str, str]] = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", other, re.MULTILINE)
    assert rows
    for name, value in rows:
        assert {limit.value for limit in limits() if limit.name == name} == {number(value.strip())}


def test_the_least_secret_is_what_the_command_line_asks_for() -> None:
    assert f"{MIN_SECRET_NCHARS} characters" in GUIDE


def test_every_limit_that_can_be_set_is_in_the_guide() -> None:
    stated = {plain(name) for name, *_ in table("Limits that can be set")}
    numeric = {
        name
        for name, field in TransferConfig.model_fields.items()
        if isinstance(field.default, int | float) and name not in ADDRESSES
    }
    assert numeric == stated


def test_a_knob_that_the_command_line_lacks_is_marked_so() -> None:
    knobs = {plain(name) for name, *_ in table("Limits that can be set")} | {"copy_threads"}
    assert not knobs & {*UpOptions.model_fields, *NodeOptions.model_fields}
    _, found, below = GUIDE.partition("\n| situation |")
    assert found
    rows = below.partition("\n\n")[0]
    named = re.findall(r"`(\w+)`( \*\(Python\)\*)?", rows)
    marks = {name: mark for name, mark in named if name in knobs}
    assert marks
    assert [name for name, mark in marks.items() if not mark] == []


# Fixed layouts.


class Layout(NamedTuple):
    heading: str
    sample: bytes  # as the codec encodes ``values``
    values: dict[str, object]


HEADER = tcp_codec.encode_header(tcp_codec.Op.DONE, 0x1122_3344_5566_7788, 0x99AA, status=0xBBCC)
FRAME = rpc_frames.encode_frame(rpc_frames.Reply(7, b"payload"))
LAYOUTS = [
    Layout(
        "tcp frame header",
        HEADER,
        {
            "magic": tcp_codec.MAGIC,
            "op": tcp_codec.Op.DONE,
            "status": 0xBBCC,
            "request_id": 0x1122_3344_5566_7788,
            "body_nbytes": 0x99AA,
        },
    ),
    Layout("spans", tcp_codec.pack_spans([(0x1234, 0x5678)]), {"offset": 0x1234, "nbytes": 0x5678}),
    Layout(
        "channel frame",
        FRAME[:9],
        {
            "version": rpc_frames.FRAME_VERSION,
            "checksum": xxhash.xxh3_64_intdigest(FRAME[9:]),
        },
    ),
    Layout("ucx card", ucx_lifeline._CARD_NBYTES.pack(0x1234), {"card_nbytes": 0x1234}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.heading)
def test_a_fixed_layout_is_what_the_codec_writes(layout: Layout) -> None:
    found: dict[str, object] = {}
    end = 0
    for offset, nbytes, kind, field in table(layout.heading):
        assert int(offset) == end, f"{field} does not follow what is before it"
        if int(offset) == len(layout.sample):
            break  # the body, of whatever length
        end += int(nbytes)
        raw = layout.sample[int(offset) : end]
        if kind in CODES:
            (found[plain(field)],) = struct.unpack(f"<{CODES[kind]}", raw)
        elif kind == "bytes":
            found[plain(field)] = raw
        else:
            assert kind == "pad", f"{kind} is no type of a fixed layout"
            assert raw == bytes(len(raw))
    assert found == layout.values
    assert end == len(layout.sample)


def test_the_magic_is_spelled_out() -> None:
    assert f"`{tcp_codec.MAGIC.decode()}`" in table("tcp frame header")[0][3]


def test_the_control_page_is_laid_out_as_the_page_says() -> None:
    (state_at, state_nbytes, *_), (words_at, words_nbytes, _, words) = table("shm control page")
    assert (int(state_at), int(words_at)) == (0, int(state_nbytes))
    assert int(words_at) + int(words_nbytes) == shm_control.CONTROL_NBYTES
    assert f"... {shm_control.MAX_REGIONS - 1}:" in words
    for state in shm_control.EngineState:
        assert f"{state.value} {state.name}" in WIRE
    slot, region_id = 5, 9 << 16 | 5
    page = shm_control.ControlPage()
    try:

        def word(offset: int) -> int:
            (value,) = struct.unpack("<Q", os.pread(page.fd, 8, offset))
            return int(value)

        assert word(int(state_at)) == shm_control.EngineState.OPEN
        assert shm_control.slot_of(region_id) == slot
        page.publish(region_id)
        assert word(int(words_at) + 8 * slot) == region_id
        page.move_away(region_id)
        assert word(int(words_at) + 8 * slot) == 2**64 - 1
        page.withdraw(region_id)
        assert word(int(words_at) + 8 * slot) == 0
    finally:
        page.close()


def test_the_bits_of_a_ucx_tag_are_what_the_page_says() -> None:
    fields: dict[str, int] = {}
    tag = ucx_codec.Tag(key=0x89AB_CDEF, request=0x1234, piece=0x5678)
    for bits, width, field in table("ucx tag"):
        high, low = map(int, bits.split(".."))
        assert high - low + 1 == int(width)
        fields[plain(field)] = tag.pack() >> low & (1 << int(width)) - 1
    assert fields == tag._asdict()


def test_the_signals_of_the_lifeline_are_what_the_page_says() -> None:
    signals = {name: getattr(ucx_lifeline, name)[0] for name in ("PING", "PONG", "GOODBYE")}
    assert ", ".join(f"{value} {name}" for name, value in signals.items()) in WIRE


# Codes.


def test_the_ops_of_tcp_are_those_of_the_codec() -> None:
    stated = {plain(name): int(op) for op, name, *_ in table("tcp ops")}
    assert stated == {op.name: op.value for op in tcp_codec.Op}


def test_the_error_codes_are_those_of_the_wire() -> None:
    stated = {int(code): plain(error) for code, error, _ in table("Error codes")}
    assert stated == {code: error.__name__ for code, error in enumerate(STATUS_ERRORS, 1)}
    assert shm_wire.NOT_SHARED == ucx_codec.UNPACKABLE == 255


def test_the_priorities_are_those_of_the_interface() -> None:
    assert ", ".join(f"{p.value} {p.name}" for p in Priority) in table("tcp bodies")[-1][4]


# Messages.

MESSAGES: list[tuple[str, ModuleType]] = [
    ("Token fields", token),
    ("tcp bodies", tcp_codec),
    ("shm packets", shm_wire),
    ("ucx messages", ucx_codec),
    ("channel bodies", rpc_frames),
    ("registry messages", registry),
]


def kind_of(shape: shapes.Type) -> str:
    """Return the MessagePack type of a field, in the words of the page."""
    match shape:
        case shapes.BoolType():
            return "bool"
        case shapes.IntType():
            return "int"
        case shapes.FloatType():
            return "float"
        case shapes.StrType() | shapes.LiteralType():
            return "str"
        case shapes.BytesType():
            return "bin"
        case shapes.ListType() | shapes.VarTupleType() | shapes.StructType(array_like=True):
            return "array"
        case shapes.DictType() | shapes.StructType():
            return "map"
        case shapes.UnionType(types=(one, shapes.NoneType())):
            return f"{kind_of(one)} or nil"
        case shapes.EnumType(cls=EnumMeta() as cls):
            return "int" if all(isinstance(each.value, int) for each in cls) else "str"
    raise AssertionError(f"the page has no word for {shape}")


def coded(message: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Return (at, field, type) of everything that ``message`` puts on the wire."""
    shape = shapes.type_info(message)
    assert isinstance(shape, shapes.StructType)
    rows: list[tuple[str, str]] = []
    if shape.tag is not None:
        name = "tag" if shape.array_like else str(shape.tag_field)
        rows.append((name, f"int {shape.tag}" if shape.array_like else f"str `{shape.tag}`"))
    rows += [(field.encode_name, kind_of(field.type)) for field in shape.fields]
    return [
        (str(index) if shape.array_like else "key", name, kind)
        for index, (name, kind) in enumerate(rows)
    ]


def stated(heading: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return the messages of a table; an empty first cell goes on with the message above."""
    messages: dict[str, list[tuple[str, str, str]]] = {}
    name = ""
    for message, at, field, kind, _ in table(heading):
        name = plain(message) or name
        messages.setdefault(name, []).append((at, plain(field), kind))
    return messages


def sent(module: ModuleType) -> set[str]:
    """Return the public structs that ``module`` defines, but for bases without fields of use."""
    return {
        name
        for name, each in vars(module).items()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__
        and not name.startswith("_")
        and each is not rpc_frames.Frame
    }


@pytest.mark.parametrize(("heading", "module"), MESSAGES, ids=[name for name, _ in MESSAGES])
def test_every_message_is_on_the_page_field_by_field(heading: str, module: ModuleType) -> None:
    on_page = stated(heading)
    assert on_page.keys() == sent(module)
    for name, rows in on_page.items():
        assert rows == coded(getattr(module, name)), name


@pytest.mark.parametrize(
    "message",
    [ucx_codec.Done(1, 2, "text"), rpc_frames.Cancel(3), tcp_codec.ProofBody(b"proof")],
    ids=lambda message: type(message).__name__,
)
def test_a_decoder_ignores_what_is_newer_than_it(message: Any) -> None:
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    newer = [*encoded, "new"] if isinstance(encoded, list) else {**encoded, "new": 1}
    known = type(message)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=known) == message


# Names.


def quoted(names: Sequence[str]) -> str:
    return r",\s+".join(re.escape(f"`{name}`") for name in names)


@pytest.mark.parametrize("shape", [Row, Unavailable], ids=lambda shape: shape.__name__)
def test_the_keys_of_the_doctor_are_those_that_it_prints(shape: type[msgspec.Struct]) -> None:
    assert re.search(quoted(shape.__struct_fields__), GUIDE)


def test_every_column_of_the_doctor_is_mapped_to_its_key() -> None:
    rows = table("doctor columns")
    assert tuple(plain(column) for column, *_ in rows) == HEADINGS
    keys = [key for _, cell, _ in rows for key in re.findall(r"`(\w+)`", cell)]
    assert set(keys) <= set(Row.__struct_fields__)
    assert len(keys) == len(set(keys))


def test_every_counter_is_named() -> None:
    assert {f for f in TransferCounters._fields if f"`{f}`" not in GUIDE} == set()


def anchors(page: str) -> set[str]:
    """Return what GitHub makes of the headings of a page."""
    headings: list[str] = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", PAGES[name])
    assert links
    assert [file for file, _ in links if not (ROOT / "docs" / file).exists()] == []
    within = [(file or name, anchor) for file, anchor in links if anchor]
    assert [each for each in within if each[1] not in anchors(PAGES[each[0]])] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_a_page_names_is_there(name: str) -> None:
    named = re.findall(r"`((?:tests|transfer|launch|benchmarks)/[\w./-]+)`", PAGES[name])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_module_has_one_place_on_the_map() -> None:
    _, _, below = WIRE.partition("\n## Where it is\n")
    patterns: list[str] = re.findall(
        r"`([\w*]+)`", "".join(re.findall(r"^\|([^|]*)\|", below, re.M))
    )
    for path in (ROOT / "transfer").glob("*.py"):
        places = [pattern for pattern in patterns if fnmatchcase(path.stem, pattern)]
        assert len(places) == 1, f"{path.name} is at {places} on the map of docs/transfer-wire.md"


@pytest.mark.net
def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bytes_read=4" in done.stdout
