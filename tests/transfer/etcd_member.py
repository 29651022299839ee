"""A process with a seat in etcd and a listener, for tests that stop it: prints what it becomes.

``python -m tests.transfer.etcd_member URL NODE_ID LEASE_S``: one line of JSON when it has joined,
and one whenever it has another incarnation.
"""

from __future__ import annotations

import asyncio
import json
import sys

from transfer.channel import Hello, Service
from transfer.etcd import EtcdMembership, parse_address, seat
from transfer.identity import Identity, Role, new_identity
from transfer.membership import NodeInfo, NodeStatus
from transfer.zmq_network import ZmqNetwork


def say(**facts: str) -> None:
    print(json.dumps(facts), flush=True)


async def main(url: str, node_id: str, lease_s: str) -> None:
    seat.LEASE_TTL_S = int(lease_s)
    network, identity = ZmqNetwork(), new_identity(Role.STORE, node_id)

    def renewed(renewed: Identity) -> None:
        network.renew(renewed)
        say(event="renewed", incarnation=renewed.incarnation)

    membership = EtcdMembership(parse_address(url), identity, renewed=renewed)
    listener = await network.listen(Service(), Hello(identity=identity), "tcp://127.0.0.1:0")
    await membership.join(NodeInfo(identity=identity, address=listener.address), NodeStatus)
    say(event="joined", incarnation=identity.incarnation)
    while not membership.superseded:  # noqa: ASYNC110 - a property has no event
        await asyncio.sleep(0.05)
    say(event="superseded", incarnation=membership.identity.incarnation)
    await membership.leave()
    await network.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
