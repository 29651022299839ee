"""The choice of the page store by ``--store``."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvstore.config import StoreConfig
from kvstore.mooncake import MooncakeStore
from kvstore.server.node import StoreNode
from kvstore.store import PageStore
from launch.cluster import plan
from launch.config import NodeOptions, UpOptions
from launch.errors import ConfigError
from launch.main import main
from launch.page_store import check_store, mooncake_config, stated
from launch.up import check
from tests.kvstore.fakes import FakeNetwork, FakeTransfer, World
from transfer.errors import HelloRefused
from transfer.identity import Role, new_identity
from transfer.membership import (
    Member,
    MembershipView,
    NodeInfo,
    NodeStatus,
    ViewCallback,
    check_contract,
)

ADDRESS = "mooncake://10.0.0.7:50051?segment=1GiB"


class Seat:
    """Remembers what was said at joining."""

    view = MembershipView()
    connected = True
    superseded = False

    def __init__(self) -> None:
        self.joined: list[NodeInfo] = []
        self.said: Callable[[], NodeStatus] = NodeStatus

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        self.joined.append(info)
        self.said = status

    def subscribe(self, callback: ViewCallback) -> None:
        callback(self.view)

    async def leave(self) -> None:
        self.joined.clear()


def info_of(role: Role, contract: dict[str, str]) -> NodeInfo:
    return NodeInfo(identity=new_identity(role), address="tcp://127.0.0.1:1", contract=contract)


def test_without_the_option_pages_are_in_the_clusters_own_nodes() -> None:
    options = NodeOptions.of()
    assert mooncake_config(options) is None
    check_store(options.store)


def test_the_address_of_the_node_is_the_one_that_mooncake_is_told() -> None:
    options = NodeOptions.of(store=ADDRESS, advertise_host="10.0.0.8")
    config = mooncake_config(options)
    assert config is not None
    assert (config.master, config.host) == ("10.0.0.7:50051", "10.0.0.8")
    assert config.segment_nbytes == 1 << 30


def test_a_wrong_address_is_one_line_that_says_how_to_write_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["decode", "--model", "fake", "--store", "redis://10.0.0.7"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvferry: error: --store redis://10.0.0.7: write mooncake://MASTER:PORT")
    assert said.count("\n") == 1


def test_a_missing_library_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"--store mooncake.*pip install"):
        check_store(ADDRESS)


def up(**told: object) -> UpOptions:
    return UpOptions.of(model="fake", store=ADDRESS, port=1, join_port=2, **told)


def test_up_on_an_engine_that_exists_starts_no_store_and_tells_every_node() -> None:
    specs = {spec.name: list(spec.argv) for spec in plan(up(prefill=2))}
    assert list(specs) == ["gateway", "prefill-1", "prefill-2", "decode-1"]
    for name, argv in specs.items():
        told = dict(itertools.pairwise(argv))
        assert told.get("--store") == (None if name == "gateway" else ADDRESS)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"segment": "2GiB"}, "--segment 2GiB: says something about store processes"),
        ({"ssd": "/x:1GiB"}, "--ssd /x:1GiB: .* starts none: leave one of the two out"),
        ({"replicas": 2}, r"--replicas 2: .*copies: \?replicas=N behind its address"),
        ({"quota": (f"{'a' * 64}=0.1",)}, "--quota .*: says something about store"),
    ],
)
def test_up_on_an_engine_refuses_what_is_said_about_stores(
    told: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.page_store.Library", object)
    check(up())
    with pytest.raises(ConfigError, match=words):
        check(up(**told))


class Engine(MooncakeStore):
    """One whose master went away twice, without a client."""

    def __init__(self) -> None: ...

    @property
    def is_lost(self) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        return {"master_losses": 2}


OWN, OTHER = NodeOptions.of(), NodeOptions.of(store=ADDRESS)


async def joined(options: NodeOptions, role: Role, store: PageStore) -> Seat:
    seat = Seat()
    info = info_of(role, {"model": "m"})
    await stated(options, seat, store).join(info, lambda: NodeStatus(gauges={"num_pages": 1.0}))
    return seat


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    ("options", "named"), [(OWN, "kvferry"), (OTHER, "mooncake://10.0.0.7:50051")]
)
async def test_a_node_states_the_engine_that_keeps_its_pages(
    role: Role, options: NodeOptions, named: str
) -> None:
    seat = await joined(options, role, Engine())
    assert seat.joined[0].contract == {"model": "m", "page_store": named}


async def test_heartbeats_tell_whether_the_engine_answers() -> None:
    seat = await joined(OTHER, Role.DECODE, Engine())
    assert seat.said().gauges == {"num_pages": 1.0, "page_store_lost": 1.0}
    assert seat.said().counters == {"page_store_losses": 2.0}
    seat = await joined(OWN, Role.DECODE, Engine())
    assert seat.said().gauges == {"num_pages": 1.0}


@pytest.mark.parametrize("first", [OWN, OTHER])
async def test_nodes_on_different_engines_refuse_each_other_with_both_sides(
    first: NodeOptions,
) -> None:
    second = OTHER if first is OWN else OWN
    [live] = (await joined(first, Role.DECODE, Engine())).joined
    [new] = (await joined(second, Role.PREFILL, Engine())).joined
    check_contract(live, live)
    with pytest.raises(HelloRefused) as refused:
        check_contract(new, live)
    for info in (live, new):
        assert f"page_store={info.contract['page_store']}" in str(refused.value)


async def test_a_store_node_refuses_and_is_refused_by_nodes_on_another_engine() -> None:
    seat, world = Seat(), World()
    transfer = FakeTransfer(world)
    await transfer.start()
    node = StoreNode(
        StoreConfig(segment_nbytes=1 << 20),
        identity=new_identity(Role.STORE),
        network=FakeNetwork(world),
        transfer=transfer,
        membership=seat,
    )
    await node.start()
    [store] = seat.joined
    await node.close()
    await transfer.close()
    [own] = (await joined(OWN, Role.DECODE, Engine())).joined
    [other] = (await joined(OTHER, Role.DECODE, Engine())).joined
    check_contract(own, store)
    for new, live in ((other, store), (store, other)):
        with pytest.raises(HelloRefused, match=r"page_store=.* against .*page_store="):
            check_contract(new, live)


@pytest.mark.parametrize(
    ("role", "contract", "has_store"),
    [
        (Role.STORE, {}, True),
        (Role.PREFILL, {}, False),
        (Role.PREFILL, {"page_store": "kvferry"}, False),
        (Role.PREFILL, {"page_store": "mooncake://10.0.0.7:50051"}, True),
    ],
)
def test_pages_can_move_over_a_store_node_or_the_engine_that_is_stated(
    role: Role, contract: dict[str, str], has_store: bool
) -> None:
    member = Member(info=info_of(role, contract), status=NodeStatus())
    assert MembershipView(members=(member,)).has_store is has_store
    assert not MembershipView().has_store


_LEFT_BEHIND = """
import atexit, sys, threading
from launch import process_env
atexit.register(print, "the interpreter ended")
hang = threading.Event().wait
threading.Thread(target=hang, name=sys.argv[1], daemon=True).start()
process_env.end_if_a_call_hangs(3)
"""


@pytest.mark.net
@pytest.mark.parametrize(("name", "ended"), [("mooncake-read-0", (3, "")), ("other", (0, "the "))])
def test_a_call_of_mooncake_left_behind_neither_holds_nor_crashes_the_end(
    name: str, ended: tuple[int, str]
) -> None:
    command = [sys.executable, "-c", _LEFT_BEHIND, name]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout[:4]) == ended, run.stderr
