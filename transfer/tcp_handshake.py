"""Who is at the other end of a tcp connection, and do they hold the secret. Sans-I/O.

Owns both sides of the hello. With a cluster secret each side proves it by an HMAC over both
nonces and its own role, so that a proof can neither be replayed nor reflected. Without one, the
key is empty and the proof says only that the other side has none either.

::

    client: start ──HELLO──▶ waiting ──(HELLO: version, incarnation, proof)──PROOF──▶ proven
            proven ──(READY)──▶ ready
    server: start ──(HELLO)──HELLO──▶ challenged ──(PROOF)──READY──▶ ready
              └──── anything else ────────┴──▶ refused, for good: one guess for each connection
"""

from __future__ import annotations

import hashlib
import hmac

from transfer.error_codes import error_of
from transfer.errors import FrameInvalid, HelloRefused, Stale, Unauthorized
from transfer.tcp_codec import (
    TCP_PROTOCOL_VERSION,
    Header,
    HelloBody,
    Op,
    ProofBody,
    control_frame,
    decode_body,
)

NONCE_NBYTES = 16
MAX_INCARNATION_NCHARS = 256


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    message = b"kvferry/bulk/1/" + role + client_nonce + server_nonce
    return hmac.digest(secret, message, hashlib.sha256)


def _check_hello(hello: HelloBody, own_incarnation: str) -> None:
    if len(hello.incarnation) > MAX_INCARNATION_NCHARS or not hello.incarnation.isprintable():
        raise FrameInvalid("hello with an incarnation that is none")  # it would go into logs
    if hello.protocol != TCP_PROTOCOL_VERSION:
        raise HelloRefused(
            f"bulk protocol versions differ: this side ({own_incarnation}) speaks "
            f"{TCP_PROTOCOL_VERSION}, the peer ({hello.incarnation}) speaks {hello.protocol}"
        )
    if len(hello.nonce) != NONCE_NBYTES:
        raise FrameInvalid("hello with a nonce of the wrong length")


class ClientHandshake:
    """The connecting side. ``nonce`` is 16 fresh random bytes."""

    def __init__(self, secret: bytes, incarnation: str, expected: str, nonce: bytes) -> None:
        self._secret = secret
        self._incarnation = incarnation
        self._expected = expected
        self._nonce = nonce
        self._proven = False
        self.ready = False

    def first(self) -> bytes:
        hello = HelloBody(TCP_PROTOCOL_VERSION, self._incarnation, self._nonce, self._expected)
        return control_frame(Op.HELLO, body=hello)

    def receive(self, header: Header, body: bytes) -> bytes:
        """Return the frame to send in answer; empty when there is none.

        Raises:
            TransferError: the peer is not the one that was named, or does not fit.
        """
        if header.op is Op.DONE:
            raise error_of(header.status, body) or FrameInvalid("DONE before READY")
        if header.op is Op.HELLO and not self._proven:
            return self._on_hello(decode_body(body, HelloBody))
        if header.op is Op.READY and self._proven:
            self.ready = True
            return b""
        raise FrameInvalid(f"{header.op.name} out of order in the hello")

    def _on_hello(self, hello: HelloBody) -> bytes:
        _check_hello(hello, self._incarnation)
        if hello.incarnation != self._expected:
            raise Stale(
                f"the address answers as incarnation {hello.incarnation}, the token names "
                f"{self._expected}: the peer restarted"
            )
        wanted = _proof(self._secret, b"server", self._nonce, hello.nonce)
        if not hmac.compare_digest(wanted, hello.proof):
            raise Unauthorized("the peer does not hold the same cluster secret")
        self._proven = True
        own = _proof(self._secret, b"client", self._nonce, hello.nonce)
        return control_frame(Op.PROOF, body=ProofBody(own))


class ServerHandshake:
    """The accepting side. ``nonce`` is 16 fresh random bytes."""

    def __init__(self, secret: bytes, incarnation: str, nonce: bytes) -> None:
        self._secret = secret
        self._incarnation = incarnation
        self._nonce = nonce
        self._client_nonce: bytes | None = None
        self.ready = False
        self.refused = False

    def receive(self, header: Header, body: bytes) -> bytes:
        """Return the frame to send in answer. Not to be called again once ``refused``.

        Raises:
            TransferError: to be reported to the peer as DONE, then close.
        """
        assert not self.refused, "a refused connection has no second try"
        self.refused = True
        answer = self._answer(header, body)
        self.refused = False
        return answer

    def _answer(self, header: Header, body: bytes) -> bytes:
        if header.op is Op.HELLO and self._client_nonce is None:
            hello = decode_body(body, HelloBody)
            _check_hello(hello, self._incarnation)
            self._client_nonce = hello.nonce
            proof = _proof(self._secret, b"server", hello.nonce, self._nonce)
            answer = HelloBody(TCP_PROTOCOL_VERSION, self._incarnation, self._nonce, "", proof)
            return control_frame(Op.HELLO, body=answer)
        if header.op is Op.PROOF and self._client_nonce is not None:
            wanted = _proof(self._secret, b"client", self._client_nonce, self._nonce)
            if not hmac.compare_digest(wanted, decode_body(body, ProofBody).proof):
                raise Unauthorized("the connecting side does not hold the cluster secret")
            self.ready = True
            return control_frame(Op.READY)
        raise FrameInvalid(f"{header.op.name} out of order in the hello")
