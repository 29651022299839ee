"""Claims about health, ready, metrics, models, tokenize and the admin routes."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.tokenizer import ByteTokenizer
from tests.gateway.fake_node import keys_of
from tests.gateway.fakes import FakeCluster
from tests.gateway.http import CHAT, COMPLETIONS, door
from transfer.counters import TransferCounters
from transfer.identity import Role
from transfer.membership import PAGE_STORE_LOSSES, PAGE_STORE_LOST


async def test_health_is_about_this_process_only() -> None:
    async with door(FakeCluster(num_prefill=0, num_decode=0)) as d:
        response = await d.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "ok")


async def test_a_dead_service_thread_turns_health_red() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        alive = {"registry": True}
        app = create_app(
            GatewayConfig(model="fake"),
            cluster.dispatcher,
            ByteTokenizer(),
            cluster.membership,
            health_checks={"registry": lambda: alive["registry"]},
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert (await client.get("/health")).status_code == 200
            alive["registry"] = False
            response = await client.get("/health")
            assert response.status_code == 503
            assert response.json()["checks"] == {"dispatcher": True, "registry": False}


async def test_a_dead_link_task_turns_health_red() -> None:
    async with door() as d:
        (link,) = d.cluster.dispatcher.placement.links.of_role(Role.DECODE)
        link._task.cancel()
        await d.cluster.settle()
        assert (await d.client.get("/health")).status_code == 503


async def test_ready_needs_a_decode_node_and_lists_the_rest() -> None:
    async with door(FakeCluster(with_store=False)) as d:
        response = await d.client.get("/ready")
        assert response.status_code == 200
        assert any("no store node" in text for text in response.json()["degraded"])
        d.cluster.remove("p0")
        response = await d.client.get("/ready")
        assert response.status_code == 200
        assert any("no usable prefill" in text for text in response.json()["degraded"])
        d.cluster.remove("d0")
        response = await d.client.get("/ready")
        assert response.status_code == 503
        assert response.json()["ready"] is False


async def test_ready_names_who_keeps_the_members_and_does_not_answer() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        cluster.membership.connected = False
        door_of_etcd = GatewayConfig(model="fake", members_at="etcd (etcd://h/x)")
        for config, named in (
            (GatewayConfig(model="fake"), "the registry"),
            (door_of_etcd, "etcd (etcd://h/x)"),
        ):
            app = create_app(config, cluster.dispatcher, ByteTokenizer(), cluster.membership)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                response = await client.get("/ready")
            assert response.status_code == 200, "the last view serves"
            (said,) = [text for text in response.json()["degraded"] if "membership" in text]
            assert said == f"membership: {named} does not answer; the last view is used"


async def test_metrics_count_requests_tokens_and_cached_tokens() -> None:
    async with door() as d:
        d.cluster.p().cached_local, d.cluster.p().cached_store = 2, 1
        await d.complete("hello", max_tokens=3)
        await d.stream(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        await d.post(COMPLETIONS, {"prompt": ""})
        await d.client.get("/nowhere")
        text = (await d.client.get("/metrics")).text
        samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        http = {key: v for key, v in samples.items() if key[0] == "kvferry_http_requests_total"}
        assert (
            http[("kvferry_http_requests_total", (("route", COMPLETIONS), ("status", "200")))] == 1
        )
        assert (
            http[("kvferry_http_requests_total", (("route", COMPLETIONS), ("status", "400")))] == 1
        )
        assert http[("kvferry_http_requests_total", (("route", CHAT), ("status", "200")))] == 1
        assert http[("kvferry_http_requests_total", (("route", "unknown"), ("status", "404")))] == 1
        assert samples[("kvferry_output_tokens_total", ())] == 5
        assert samples[("kvferry_cached_tokens_total", (("tier", "local"),))] == 4
        assert samples[("kvferry_ttft_seconds_count", ())] == 2
        assert samples[("kvferry_itl_seconds_count", ())] == 3
        assert samples[("kvferry_nodes", (("role", "decode"), ("state", "usable")))] == 1
        assert samples[("kvferry_in_flight", ())] == 0


async def test_expected_and_actual_hits_are_both_exported() -> None:
    async with door() as d:
        prompt = list(range(40))
        d.cluster.p().publish(stored=keys_of(prompt)[:2])
        await d.cluster.settle()
        d.cluster.p().cached_local = 16
        await d.complete(prompt)
        text = (await d.client.get("/metrics")).text
        assert "kvferry_cached_tokens_expected_total 32.0" in text
        assert 'kvferry_cached_tokens_total{tier="local"} 16.0' in text


async def test_transfers_of_every_node_are_exported_and_go_with_it() -> None:
    async with door() as d:
        counts = TransferCounters(operations=4, ranges_asked=500, ranges_sent=12, faults_injected=1)
        d.cluster.p().counters = {f"transfer_{k}": float(v) for k, v in counts._asdict().items()}
        d.cluster.show()
        text = (await d.client.get("/metrics")).text
        for name, value in counts._asdict().items():
            line = f'kvferry_transfer_{name}_total{{node="p0",role="prefill"}} {float(value)}'
            assert line in text
        assert 'kvferry_transfer_operations_total{node="d0"' not in text  # it says nothing
        d.cluster.remove("p0")
        assert "kvferry_transfer_operations_total{" not in (await d.client.get("/metrics")).text


async def test_an_engine_that_does_not_answer_a_node_is_exported() -> None:
    async with door() as d:
        node = d.cluster.p()
        node.counters = {PAGE_STORE_LOSSES: 3.0}
        d.cluster.show()
        assert "kvferry_page_store_lost{" not in (await d.client.get("/metrics")).text
        node.gauges = {**node.gauges, PAGE_STORE_LOST: 1.0}
        d.cluster.show()
        text = (await d.client.get("/metrics")).text
        assert 'kvferry_page_store_lost{node="p0",role="prefill"} 1.0' in text
        assert 'kvferry_page_store_losses_total{node="p0",role="prefill"} 3.0' in text


async def test_models_list_and_card() -> None:
    async with door(aliases=("org/alias",)) as d:
        body = (await d.client.get("/v1/models")).json()
        assert [card["id"] for card in body["data"]] == ["fake", "org/alias"]
        card = (await d.client.get("/v1/models/org/alias")).json()
        assert (card["object"], card["max_model_len"]) == ("model", 2048)


async def test_tokenize_and_back() -> None:
    async with door() as d:
        body = (await d.post("/tokenize", {"prompt": "hé"})).json()
        assert body == {"count": 4, "max_model_len": 2048, "tokens": [256, 104, 195, 169]}
        text = (await d.post("/detokenize", {"tokens": [104, 195, 169]})).json()["prompt"]
        assert text == "hé"
        messages = [{"role": "user", "content": "x"}]
        body = (await d.post("/tokenize", {"messages": messages})).json()
        assert bytes(body["tokens"]).decode() == "user: x\nassistant:"
        assert (await d.post("/tokenize", {})).status_code == 400
        assert (await d.post("/detokenize", {"tokens": [5000]})).status_code == 400


async def test_explain_shows_every_candidate_with_its_terms() -> None:
    async with door(FakeCluster(num_prefill=2, num_decode=2)) as d:
        prompt = list(range(40))
        d.cluster.p(1).publish(stored=keys_of(prompt, "t")[:2])
        await d.cluster.settle()
        body = (await d.post("/admin/explain", {"prompt": prompt, "cache_salt": "t"})).json()
        best, other = body["candidates"]["prefill"]
        assert (best["node_id"], best["cached_tokens"]) == ("p1", 32)
        assert best["score"] > other["score"]
        assert {"cached_term", "queue_term", "passed_over"} <= best.keys()
        assert len(body["candidates"]["decode"]) == 2
        assert d.cluster.p(1).requests == [], "explaining dispatches nothing"
        body = (await d.post("/admin/explain", {"prompt": prompt})).json()
        assert all(c["cached_tokens"] == 0 for c in body["candidates"]["prefill"]), "other salt"


async def test_the_context_length_is_what_the_largest_decode_pool_holds() -> None:
    cluster = FakeCluster()
    async with door(cluster) as d:
        member = cluster.d().member
        labels = {**member.info.labels, "num_pages": "10"}
        small = msgspec.structs.replace(member.info, labels=labels)
        members = [cluster.p().member, msgspec.structs.replace(member, info=small)]
        cluster.membership.show(members)
        card = (await d.client.get("/v1/models")).json()["data"][0]
        assert card["max_model_len"] == 160
        answer = await d.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 200, "without max_tokens: as long as fits"


async def test_cluster_lists_members_with_their_state() -> None:
    async with door() as d:
        body = (await d.client.get("/admin/cluster")).json()
        roles = {member["node_id"]: member for member in body["members"]}
        assert roles.keys() == {"p0", "d0", "s0"}
        assert roles["d0"]["reachable"]
        assert roles["d0"]["index_in_sync"]
        assert roles["p0"]["contract"]["page_size"] == "16"


@pytest.mark.parametrize(
    ("host", "token", "status"),
    [
        ("127.0.0.1", None, 200),
        ("::1", None, 200),
        ("10.0.0.9", None, 403),
        ("10.0.0.9", "wrong", 403),
        ("10.0.0.9", "secret", 200),
        ("not an address", None, 403),
    ],
)
async def test_admin_is_for_loopback_or_the_token(
    host: str, token: str | None, status: int
) -> None:
    async with door(admin_token="secret") as d:
        transport = httpx.ASGITransport(app=d.app, client=(host, 1))
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            response = await client.get("/admin/cluster", headers=headers)
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["code"] == "forbidden"


async def test_without_a_configured_token_no_token_opens_admin() -> None:
    async with door() as d:
        transport = httpx.ASGITransport(app=d.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer None"}):
                response = await client.get("/admin/cluster", headers=headers)
                assert response.status_code == 403
