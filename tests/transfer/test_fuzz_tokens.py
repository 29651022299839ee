"""Tokens that somebody has tampered with, used on a whole engine over every path.

The codec alone is in ``test_fuzz_codecs.py``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from msgspec.structs import replace

from tests.transfer.bulk_harness import MIB, checked_engines, pattern, soon, whole
from tests.transfer.fuzzing import (
    EXAMPLE_LIMIT_S,
    allocates_at_most,
    descriptors_return_to,
    examples,
    mutated,
    no_alarm,
    num_descriptors,
)
from transfer.errors import TransferError
from transfer.interface import deadline_after
from transfer.token import Token, decode_token, encode_token

TRANSPORTS = ["loopback", "shm", "tcp"]
ADDRESSES = [
    "\0:80",
    "a\0b:80",
    "127.0.0.1:0",
    "127.0.0.1:65535",
    "127.0.0.1:99999",
    "127.0.0.1:1\n",
    "127.0.0.1",
    "[::1:80",
    ":::",
    "x" * 300 + ":1",
    "a..b:1",
    "\u2603:1",
    "%:1",
    "127.0.0.1:" + "9" * 400,
    "127.0.0.1:\u0661",
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_tampered_token_reads_and_writes_nothing_else(transport: str) -> None:
    async with checked_engines(transport) as engines:
        owner, user = await engines.make(), await engines.make()
        region, guarded = owner.allocate(256), owner.allocate(256)
        region.view[:] = pattern(256).data
        guarded.export("rw")
        valid = region.export("r")
        known, local = decode_token(valid), user.allocate(256)
        await user.read(valid, whole(256), into=local, deadline_s=soon())
        before = num_descriptors()
        with no_alarm(), allocates_at_most(8 * MIB):
            for example in examples(150):
                with example as rng:
                    data = mutated(rng, valid)
                    with suppress(TransferError):  # keep the address: strangers' are tried below
                        data = encode_token(replace(decode_token(data), endpoint=known.endpoint))
                    local.view[:] = bytes(256)
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        with suppress(TransferError):
                            await user.read(data, whole(256), into=local, deadline_s=soon())
                            opened: Token = decode_token(data)
                            assert opened.capability == known.capability
                            assert local.view == region.view
                        with suppress(TransferError):
                            await user.write(data, whole(256), source=local, deadline_s=soon())
                            raise AssertionError("wrote by a token that only reads")
                    assert region.view == pattern(256).data
                    assert guarded.view == bytes(256)
        await descriptors_return_to(before)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_whatever_address_a_token_names_the_error_is_one_of_the_tree(transport: str) -> None:
    async with checked_engines(transport) as engines:
        owner, user = await engines.make(), await engines.make()
        region, local = owner.allocate(64), user.allocate(64)
        known = decode_token(region.export("r"))
        await user.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        before = num_descriptors()
        with no_alarm():
            for address in ADDRESSES:
                names = dict.fromkeys(("tcp", "shm", "loopback", "ucx"), address)
                for endpoint in (
                    replace(known.endpoint, **names),
                    replace(known.endpoint, **names, host="elsewhere", process="elsewhere"),
                    replace(known.endpoint, incarnation=address),
                ):
                    token = encode_token(replace(known, endpoint=endpoint))
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        with pytest.raises(TransferError):
                            await user.read(
                                token, whole(64), into=local, deadline_s=deadline_after(0.5)
                            )
            await user.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        await descriptors_return_to(before)
