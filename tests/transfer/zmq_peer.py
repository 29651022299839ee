"""A server process for tests: prints its address, answers and hangs until it is killed.

python -m tests.transfer.zmq_peer [BIND]
"""

from __future__ import annotations

import asyncio
import sys

from tests.transfer.channel_contract import ANY, TestService, hello
from transfer.identity import Role
from transfer.zmq_network import ZmqNetwork


async def main(bind: str) -> None:
    network = ZmqNetwork()
    listener = await network.listen(TestService(), hello(Role.STORE), bind)
    print(listener.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ANY))
