"""Replays a request trace through real store nodes and prints the token hit ratio.

    python -m benchmarks.trace_replay TRACE [--pages 5000 --pages 20000 ...] [--nodes 1]
                                            [--policy lru --policy heat ...] [--json]

``TRACE`` has one JSON object a line with ``input_length`` and ``hash_ids`` (Mooncake's format): one
id stands for a page of 512 tokens and its whole prefix. Every request matches its pages, counts the
tokens of the prefix that is there, and puts the rest. Nodes and client are the real ones, over real
channels; a page has as few bytes as a geometry allows. ``--pages 0`` means: room for all of them.
Watermarks are at the top, so that ``--pages`` is the capacity, as in the published tables.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop

from benchmarks.store.members import SharedMembership
from kvstore.client.store_client import StoreClient
from kvstore.config import StoreConfig
from kvstore.page import PageKey, PageSpec
from kvstore.server.node import StoreNode
from kvstore.store import PageIdentity, PutOutcome, PutPage
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after
from transfer.zmq_network import ZmqNetwork

SPEC = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=512, dtype="uint8")
NAMESPACE = bytes(32)
OP_S = 60.0


class Request(msgspec.Struct, frozen=True):
    """One line of the trace."""

    input_length: int
    hash_ids: list[int]


class Result(NamedTuple):
    """What one replay saw."""

    policy: str
    num_nodes: int
    pages_per_node: int
    hit_tokens: int
    tokens: int
    messages_per_request: float
    fullest_over_mean: float
    took_s: float

    @property
    def ratio(self) -> float:
        return self.hit_tokens / self.tokens


def read_trace(path: Path) -> list[Request]:
    """Read a trace.

    Raises:
        OSError, msgspec.MsgspecError: there is none, or it is of another format.
    """
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Request) for line in lines if line]


def identities_of(request: Request) -> Iterator[PageIdentity]:
    """The pages of a request; an id commits to its prefix, so it can stand for the key."""
    parent = NAMESPACE
    for depth, number in enumerate(request.hash_ids):
        num_tokens = min(SPEC.page_size, request.input_length - depth * SPEC.page_size)
        key = PageKey(hashlib.sha256(b"trace %d" % number).digest())
        tokens = np.full(num_tokens, number, dtype="<i4").tobytes()
        yield PageIdentity(key=key, parent=parent, depth=depth, tokens=tokens)
        parent = key


async def replay(
    trace: Sequence[Request], *, policy: str, num_nodes: int, pages_per_node: int
) -> Result:
    """Replay ``trace`` one request after the other."""
    membership, network = SharedMembership(), ZmqNetwork()
    transfer = TransferEngine(TransferConfig(transport="loopback"))
    await transfer.start()
    settings = {"eviction": policy, "high_watermark": 1.0, "low_watermark": 1.0}
    config = StoreConfig.model_validate(
        {**settings, "segment_nbytes": pages_per_node * SPEC.page_nbytes}
    )
    nodes = [
        StoreNode(
            config,
            identity=new_identity(Role.STORE, f"store-{i}"),
            network=network,
            transfer=transfer,
            membership=membership,
        )
        for i in range(num_nodes)
    ]
    for node in nodes:
        await node.start()
    client = StoreClient(
        identity=new_identity(Role.OBSERVER),
        network=network,
        transfer=transfer,
        membership=membership,
        spec=SPEC,
    )
    started_s = perf_counter()
    try:
        hit_tokens, num_messages = await _serve_all(trace, client, transfer)
        took_s = perf_counter() - started_s
        counts = [node.numbers()["num_pages"] for node in nodes]
    finally:
        await client.close()
        for node in nodes:
            await node.close()
        await transfer.close()
        await network.close()
    return Result(
        policy=policy,
        num_nodes=num_nodes,
        pages_per_node=pages_per_node,
        hit_tokens=hit_tokens,
        tokens=sum(request.input_length for request in trace),
        messages_per_request=num_messages / len(trace),
        fullest_over_mean=max(counts) / (sum(counts) / len(counts)),
        took_s=took_s,
    )


async def _serve_all(
    trace: Sequence[Request], client: StoreClient, transfer: TransferEngine
) -> tuple[int, int]:
    """Returns tokens hit, and the messages that ``match`` took."""
    longest = max(len(request.hash_ids) for request in trace)
    source = transfer.allocate(longest * SPEC.page_nbytes)
    hit_tokens = num_messages = 0
    for request in trace:
        pages = list(identities_of(request))
        keys = [page.key for page in pages]
        before = client.counters().get("match_messages", 0)
        states = await client.match(keys, deadline_s=deadline_after(OP_S))
        num_messages += client.counters().get("match_messages", 0) - before
        num_hit = next((i for i, state in enumerate(states) if not state.present), len(states))
        hit_tokens += sum(page.num_tokens for page in pages[:num_hit])
        rest = pages[num_hit:]
        puts = [PutPage(page, i * SPEC.page_nbytes) for i, page in enumerate(rest)]
        result = await client.put(puts, source=source, deadline_s=deadline_after(OP_S))
        failed = PutOutcome.FAILED in result.outcomes
        assert not failed, "a put failed: the ratio would mean nothing"
    return hit_tokens, num_messages


def show(results: Sequence[Result]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| policy | nodes | pages a node | token hit ratio | match messages a request "
        "| fullest / mean | took |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.policy} | {r.num_nodes} | {r.pages_per_node} | {r.ratio:.2%} "
            f"| {r.messages_per_request:.2f} | {r.fullest_over_mean:.2f} | {r.took_s:.0f} s |"
        )
    return "\n".join(lines)


async def _replay_all(
    trace: Sequence[Request], policies: Sequence[str], capacities: Sequence[int], num_nodes: int
) -> list[Result]:
    distinct = len({number for request in trace for number in request.hash_ids})
    results = []
    for pages in capacities:
        for policy in policies:
            per_node = pages or distinct
            done = await replay(trace, policy=policy, num_nodes=num_nodes, pages_per_node=per_node)
            print(f"{policy}, {per_node} pages: {done.ratio:.2%}", file=sys.stderr, flush=True)
            results.append(done)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pages", type=int, action="append", help="a node; 0: room for all")
    parser.add_argument("--nodes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--policy", action="append", help="repeatable (default: lru, slru, heat)")
    parser.add_argument("--json", action="store_true", help="one object a replay")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    policies = args.policy or ["lru", "slru", "heat"]
    capacities = args.pages if args.pages is not None else [5000, 10000, 20000, 50000, 0]
    results = uvloop.run(_replay_all(trace, policies, capacities, args.nodes))
    if args.json:
        for result in results:
            print(msgspec.json.encode({**result._asdict(), "ratio": result.ratio}).decode())
    else:
        print(show(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
