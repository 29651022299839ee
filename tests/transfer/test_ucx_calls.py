"""What UCX itself says of a message that did not move is heard: no fake in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from tests.transfer.bulk_harness import checked_engines
from tests.transfer.ucx_support import NEEDS_UCX
from transfer import ucx_calls
from transfer.errors import PeerLost
from transfer.ucx_binding import Message, UcxUnavailable, open_context
from transfer.ucx_calls import IN_PROGRESS, NO_RESOURCE, STATUS, TRUNCATED, Place, Refused

pytest.importorskip("ucxx")
from transfer.ucx_ucxx import UcxxWorker

pytestmark = NEEDS_UCX
LONG_NBYTES = 16 << 20  # under way for many rounds of progress
MAX_ROUNDS = 1_000_000
Pair = tuple[UcxxWorker, UcxxWorker]


@pytest.fixture(params=["tcp", "posix,self"])
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", request.param)


@pytest.fixture
def pair(tls: None) -> Iterator[Pair]:
    """Two workers of this process, connected."""
    context = open_context(only_this_host=True)
    one, other = context.open_worker(), context.open_worker()
    assert isinstance(one, UcxxWorker)
    assert isinstance(other, UcxxWorker)
    one.connect(other.address)
    other.connect(one.address)
    yield one, other
    for worker in (one, other):
        assert worker.break_off()
        worker.close()
    context.close()


def progress(pair: Pair, until: Callable[[], object]) -> None:
    for _ in range(MAX_ROUNDS):
        if until():
            return
        for worker in pair:
            worker.progress()
    raise AssertionError("UCX does not get there")


def arrived(pair: Pair, nbytes: int) -> Message:
    """Send a message from the first to the second, and return it as that finds it."""
    found: list[Message] = []
    pair[0].send(bytearray(nbytes), 5)

    def find() -> bool:
        found.extend(message for message in [pair[1].probe()] if message is not None)
        return bool(found)

    progress(pair, find)
    return found[0]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (IN_PROGRESS, "Operation in progress"),
        (NO_RESOURCE, "No resources are available to initiate the operation"),
        (TRUNCATED, "Message truncated"),
    ],
)
def test_a_status_is_called_what_ucx_calls_it(status: int, text: str) -> None:
    name = ctypes.CDLL(ucx_calls.LIBRARY).ucs_status_string
    name.argtypes, name.restype = [STATUS], ctypes.c_char_p
    assert name(status).decode() == text


def test_a_receive_that_is_cut_off_has_failed(pair: Pair) -> None:
    message = arrived(pair, LONG_NBYTES)
    flight = pair[1].receive(message, bytearray(LONG_NBYTES))
    assert not flight.completed
    assert pair[1].break_off()
    assert flight.completed
    assert isinstance(flight.error(), PeerLost)


def test_a_message_that_is_longer_than_its_buffer_has_failed(
    tls: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
    pair: Pair = request.getfixturevalue("pair")
    message = arrived(pair, LONG_NBYTES)
    flight = pair[1].receive(message, bytearray(LONG_NBYTES - 1))
    progress(pair, lambda: flight.completed)
    assert isinstance(flight.error(), PeerLost)


@pytest.mark.parametrize("threshold", ["inf", "0"])
@pytest.mark.parametrize("nbytes", [1, 9000, LONG_NBYTES])
def test_a_message_is_dropped_however_ucx_sends_it(
    threshold: str,
    nbytes: int,
    tls: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", threshold)
    pair: Pair = request.getfixturevalue("pair")
    dropped = pair[1].drop(arrived(pair, nbytes))
    progress(pair, lambda: dropped.completed)
    assert dropped.error() is None


def refuse_to_receive(worker: UcxxWorker, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(_worker: int, _place: Place, _message: int) -> int | None:
        raise Refused(status)

    monkeypatch.setattr(worker._calls, "receive", receive)


def test_a_drop_that_ucx_refuses_is_no_drop_unless_it_was_short(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = arrived(pair, 1)
    refuse_to_receive(pair[1], NO_RESOURCE, monkeypatch)
    with pytest.raises(BlockingIOError):
        pair[1].drop(message)
    refuse_to_receive(pair[1], -25, monkeypatch)
    with pytest.raises(PeerLost):
        pair[1].drop(message)
    refuse_to_receive(pair[1], TRUNCATED, monkeypatch)
    assert pair[1].drop(message).completed


@pytest.mark.parametrize("status", [NO_RESOURCE, -25])
def test_a_connection_is_cut_off_also_if_ucx_drops_nothing(
    pair: Pair, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair[0].send(b"x", 5)
    probe, found = pair[1].probe, list[Message]()
    progress(pair, lambda: found.extend(filter(None, [probe()])) or found)
    monkeypatch.setattr(pair[1], "probe", lambda: found.pop() if found else None)
    refuse_to_receive(pair[1], status, monkeypatch)
    assert pair[1].break_off()
    assert not found


@pytest.mark.parametrize("library", ["libucp-of-nobody.so.0", "libc.so.6"])
async def test_without_the_functions_of_ucx_the_error_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checked_engines("ucx") as engines:
        monkeypatch.setattr(ucx_calls, "LIBRARY", library)
        with pytest.raises(UcxUnavailable, match=r"pip install 'ucxx"):
            await engines.unstarted().start()
