"""The registry's core, without a clock: leases, contract, replacement, views."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from transfer.errors import HelloRefused
from transfer.identity import Identity, Incarnation, NodeId, Role
from transfer.membership import NodeInfo, NodeStatus, SeatHolder, SeatQuery, SeatTaken
from transfer.registry import GAUGE_INTERVAL_S, LEASE_TTL_S, Registry


def info(name: str, life: int = 1, role: Role = Role.PREFILL, **contract: str) -> NodeInfo:
    identity = Identity(node_id=NodeId(name), role=role, incarnation=Incarnation(f"{name}/{life}"))
    return NodeInfo(identity=identity, address=f"tcp://{name}:1", contract=contract)


def beat(registry: Registry, now_s: float, node: NodeInfo, **gauges: float) -> str:
    identity = node.identity
    return registry.heartbeat(
        now_s, identity.node_id, identity.incarnation, NodeStatus(gauges=gauges)
    )


def names(registry: Registry, now_s: float = 0.0) -> list[str]:
    return [member.node_id for member in registry.view(now_s).members]


def test_a_lease_ends_without_heartbeats_and_not_with_them() -> None:
    registry = Registry()
    a, b = info("a"), info("b")
    registry.register(0.0, a, NodeStatus())
    registry.register(0.0, b, NodeStatus())
    assert beat(registry, LEASE_TTL_S - 0.01, a) == "ok"
    assert registry.next_timer_s() == LEASE_TTL_S
    assert registry.tick(LEASE_TTL_S) == ["b"]
    assert names(registry) == ["a"]
    assert beat(registry, LEASE_TTL_S, b) == "unknown"
    registry.register(LEASE_TTL_S, b, NodeStatus())
    assert names(registry) == ["a", "b"]


def test_the_first_member_sets_the_contract_and_the_last_one_takes_it_along() -> None:
    registry = Registry()
    registry.register(0.0, info("a", page_size="16", model="m"), NodeStatus())
    registry.register(0.0, info("s", role=Role.STORE), NodeStatus())  # states nothing
    registry.register(0.0, info("b", page_size="16", extra="x"), NodeStatus())
    with pytest.raises(HelloRefused) as refused:
        registry.register(0.0, info("c", page_size="32", model="m"), NodeStatus())
    for part in ("page_size=16", "page_size=32", "prefill c", "prefill a", "start the node with"):
        assert part in str(refused.value)
    assert names(registry) == ["a", "b", "s"]
    registry.leave(0.0, NodeId("a"), Incarnation("a/1"))
    registry.tick(LEASE_TTL_S)
    registry.register(LEASE_TTL_S, info("c", page_size="32"), NodeStatus())
    assert names(registry) == ["c"]


def test_a_restart_may_change_the_contract_that_only_it_states() -> None:
    registry = Registry()
    registry.register(0.0, info("a", page_size="16"), NodeStatus())
    registry.register(0.1, info("a", 2, page_size="32"), NodeStatus())
    assert registry.view(0.1).members[0].info.contract == {"page_size": "32"}


def test_messages_of_a_replaced_incarnation_change_nothing() -> None:
    registry = Registry()
    old, new = info("a", 1), info("a", 2)
    registry.register(0.0, old, NodeStatus())
    registry.register(0.1, new, NodeStatus())
    version = registry.version
    assert beat(registry, 0.2, old, num_running=9) == "superseded"
    assert registry.leave(0.2, NodeId("a"), old.identity.incarnation) == "superseded"
    assert registry.version == version
    assert registry.view(0.2).members[0].info == new


def test_draining_is_published_at_once_and_gauges_at_most_every_interval() -> None:
    registry = Registry()
    a = info("a")
    registry.register(0.0, a, NodeStatus())
    version = registry.version
    for step in range(1, 100):
        beat(registry, step * 0.01, a, num_running=step)
        registry.tick(step * 0.01)
    assert registry.version - version == 1  # at 0.5 s
    registry.tick(2 * GAUGE_INTERVAL_S)
    assert registry.version - version == 2
    assert registry.view(1.0).members[0].status.gauges == {"num_running": 99}
    draining = NodeStatus(draining=True, gauges={"num_running": 99})
    registry.heartbeat(1.01, NodeId("a"), a.identity.incarnation, draining)
    assert registry.version - version == 3
    assert registry.view(1.01).with_role(Role.PREFILL) == ()


def test_unchanged_gauges_publish_nothing() -> None:
    registry = Registry()
    a = info("a")
    registry.register(0.0, a, NodeStatus(gauges={"x": 1.0}))
    version = registry.version
    for step in range(1, 20):
        beat(registry, step * 0.5, a, x=1.0)
        registry.tick(step * 0.5)
    assert registry.version == version


def test_a_pause_of_the_registry_itself_expires_nobody() -> None:
    registry = Registry()
    registry.register(0.0, info("a"), NodeStatus())
    registry.forgive(60.0)
    assert registry.tick(60.0) == []
    assert registry.tick(60.0 + LEASE_TTL_S) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_agree_with_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    registry = Registry()
    model: dict[str, tuple[int, float]] = {}  # name -> (life, last heard)
    now_s = 0.0
    for _ in range(400):
        now_s += rng.expovariate(4)
        model = {n: seat for n, seat in model.items() if now_s < seat[1] + LEASE_TTL_S}
        registry.tick(now_s)
        name, life = rng.choice("abcd"), rng.randrange(1, 4)
        node = info(name, life)
        match rng.randrange(3):
            case 0:
                registry.register(now_s, node, NodeStatus())
                model[name] = (life, now_s)
            case 1:
                known = model.get(name)
                expected = "ok" if known and known[0] == life else "superseded"
                assert beat(registry, now_s, node) == (expected if known else "unknown")
                if known and known[0] == life:
                    model[name] = (life, now_s)
            case _:
                registry.leave(now_s, node.identity.node_id, node.identity.incarnation)
                if model.get(name, (0, 0.0))[0] == life:
                    del model[name]
        view = registry.view(now_s)
        got = {str(m.node_id): m.info.identity.incarnation for m in view.members}
        assert got == {n: f"{n}/{seat[0]}" for n, seat in model.items()}
        assert list(got) == sorted(got)
        assert all(0 <= m.heartbeat_age_s < LEASE_TTL_S for m in view.members)


def test_the_holder_of_a_seat_is_told_to_others_while_its_lease_runs() -> None:
    registry = Registry()
    holder = info("a")
    registry.register(0.0, holder, NodeStatus())
    elsewhere = structs.replace(info("a", 2), address="tcp://elsewhere:1")
    first = registry.holder(0.1, elsewhere)
    assert first is not None
    assert (first.incarnation, first.address) == ("a/1", "tcp://a:1")
    assert registry.holder(0.1, holder) is None, "its own"
    assert registry.holder(0.1, info("a", 2)) is None, "started again at the same address"
    nowhere = structs.replace(info("a", 2), address="")
    assert registry.holder(0.1, nowhere) is not None, "no address is not the same address"
    registry.forgive(0.2)
    assert registry.holder(0.2, elsewhere) == first, "nobody has heard it"
    beat(registry, 0.3, holder)
    heard = registry.holder(0.3, elsewhere)
    assert heard is not None
    assert heard.is_alive(first)
    assert registry.holder(0.3 + LEASE_TTL_S, elsewhere) is None


def test_a_holder_that_registers_again_is_alive() -> None:
    registry = Registry()
    elsewhere = structs.replace(info("a", 2), address="tcp://elsewhere:1")
    registry.register(0.0, info("a"), NodeStatus())
    first = registry.holder(0.0, elsewhere)
    registry.register(0.1, info("a"), NodeStatus())
    again = registry.holder(0.1, elsewhere)
    assert first is not None
    assert again is not None
    assert again.is_alive(first)


def holder(life: int, num_signs: int, *, draining: bool = False) -> SeatHolder:
    return SeatHolder(
        incarnation=f"a/{life}", address="tcp://a:1", num_signs=num_signs, draining=draining
    )


def test_a_seat_is_waited_for_while_its_holder_may_be_dead_and_taken_once_it_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    query = SeatQuery(NodeId("a"))
    assert not query.is_free(holder(1, 5))
    assert not query.is_free(holder(1, 5)), "not heard since"
    with pytest.raises(SeatTaken, match=r"tcp://a:1 \(incarnation a/1\)"):
        query.is_free(holder(1, 6))
    assert query.is_free(None), "its lease has ended"
    assert [record.getMessage() for record in caplog.records] == [
        "a waits until the seat of the process at tcp://a:1 is free, or that one is heard"
    ]


def test_a_holder_that_leaves_or_is_replaced_is_waited_for() -> None:
    query = SeatQuery(NodeId("a"))
    assert not query.is_free(holder(1, 5))
    assert not query.is_free(holder(1, 6, draining=True)), "about to leave"
    assert not query.is_free(holder(2, 7)), "another process: one sign of it proves nothing"
    with pytest.raises(SeatTaken):
        query.is_free(holder(2, 8))
    assert SeatQuery(NodeId("a")).is_free(None), "nobody has it"
