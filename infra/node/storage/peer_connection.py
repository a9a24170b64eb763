"""Connections between nodes, over which a node fetches files that the other node may still be receiving itself.

Each side proves that it knows the token of the chain, with an HMAC over a random number from the other side. The token
itself is sent over ssh. The files are not encrypted; they are verified with digests that are also sent over ssh.
"""

import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from infra.node.channel import BrokenOff, Channel
from infra.node.ports import Endpoint
from infra.node.storage.file_channel import FileRange, Source, answer

_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 32
_LOOK_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
"""The longest wait for the next bytes, much longer than a sender is ever silent."""
_NONCE_BYTES = 32
_MOST_MESSAGE_BYTES = 8 * _NONCE_BYTES
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Greeting:
    """The server's random number."""

    nonce: str


@dataclass(frozen=True)
class Introduction:
    """The client's random number, and its proof that it knows the token."""

    nonce: str
    proof: str


@dataclass(frozen=True)
class Welcome:
    """The server's proof that it knows the token."""

    proof: str


def serve(source: Source, token: str) -> Endpoint:
    """Serve a source to peers that know the token, until this process ends, and return the address and port."""
    address = _own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    threading.Thread(target=_accept, args=(listener, source, token), name="relay", daemon=True).start()
    return Endpoint(address, int(listener.getsockname()[1]))


def connect(server: Endpoint, token: str) -> Channel:
    """Connect to another node's server. Raises OSError if that fails: BrokenOff if it does not know the token."""
    with socket.create_connection((server.address, server.port), timeout=_HANDSHAKE_SECONDS) as connection:
        channel = _channel(connection)  # the channel keeps it open
        try:
            _introduce(channel, token)
            connection.settimeout(_SILENCE_SECONDS)
        except OSError:
            channel.close()
            raise
    return channel


def _introduce(channel: Channel, token: str) -> None:
    theirs, own = _received(channel, Greeting).nonce, secrets.token_hex(_NONCE_BYTES)
    channel.send(Introduction(own, _proof(token, "client", theirs, own)))
    if not _is_same(_received(channel, Welcome).proof, _proof(token, "server", theirs, own)):
        raise BrokenOff("the other node does not know the token of this run")


def _own_address() -> str:
    """The address at which the head reached this machine by ssh. Nodes that cannot reach it fetch from the head."""
    connection = os.environ.get("SSH_CONNECTION", "").split()  # set by sshd: client, its port, server, its port
    return connection[2] if len(connection) == 4 else "127.0.0.1"


class _Handshakes:
    """Connections whose peer has not yet proved that it knows the token. Their number is limited; each has a thread.

    Beyond the limit, the oldest one is closed. Otherwise, peers that connect and send nothing could keep all others
    out. A peer that knows the token needs only milliseconds for its proof.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_at: dict[socket.socket, float] = {}  # the oldest first
        self._free = threading.BoundedSemaphore(_MOST_HANDSHAKES)

    def begin(self, connection: socket.socket) -> None:
        """Add a connection, closing the oldest one if there are too many."""
        if not self._free.acquire(blocking=False):
            self._hang_up(most=1)
            self._free.acquire()
        with self._lock:
            self._began_at[connection] = time.monotonic()

    def end(self, connection: socket.socket) -> None:
        """Stop tracking a connection, because its peer has proved that it knows the token, or because it was closed."""
        with self._lock:
            self._began_at.pop(connection, None)
        self._free.release()

    def hang_up_late(self) -> None:
        """Close connections whose handshake takes too long in total, however often they send something."""
        self._hang_up(most=_MOST_HANDSHAKES, began_before=time.monotonic() - _HANDSHAKE_SECONDS)

    def _hang_up(self, most: int, began_before: float = float("inf")) -> None:
        """Shut connections down; their threads close them when they read the end."""
        with self._lock:
            late = [one for one, began_at in self._began_at.items() if began_at < began_before]
            for connection in late[:most]:
                del self._began_at[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, source: Source, token: str) -> None:
    handshakes = _Handshakes()
    listener.settimeout(_LOOK_SECONDS)
    while True:
        handshakes.hang_up_late()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError as error:  # no descriptors left for now
            _log.warning("a connection from another node cannot be accepted: %s", error)
            time.sleep(_LOOK_SECONDS)
            continue
        handshakes.begin(connection)
        arguments = (connection, handshakes, source, token)
        threading.Thread(target=_attend, args=arguments, name="relay", daemon=True).start()


def _attend(connection: socket.socket, handshakes: _Handshakes, source: Source, token: str) -> None:
    """Serve a peer that knows the token until it disconnects. Errors are ignored here; the peer reports them."""
    with connection, suppress(OSError, ValueError):
        try:
            channel, welcome = _authenticated(connection, token)
        finally:
            handshakes.end(connection)
        channel.send(welcome)  # after that: a peer that is welcome must not be hung up on when others connect
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while (request := channel.receive(FileRange)) is not None:
            answer(channel, request, source)


def _authenticated(connection: socket.socket, token: str) -> tuple[Channel, Welcome]:
    """Return a channel, and the reply to the peer's proof that it knows the token. Raises BrokenOff if it does not."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    channel = _channel(connection)
    own = secrets.token_hex(_NONCE_BYTES)
    channel.send(Greeting(own))
    theirs = _received(channel, Introduction)
    if not _is_same(theirs.proof, _proof(token, "client", own, theirs.nonce)):
        raise BrokenOff("the peer does not know the token of this run")
    return channel, Welcome(_proof(token, "server", own, theirs.nonce))


def _channel(connection: socket.socket) -> Channel:
    return Channel(connection.makefile("rb"), connection.makefile("wb"))


def _received(channel: Channel, kind: type[T]) -> T:
    message = channel.receive(kind, most_bytes=_MOST_MESSAGE_BYTES)
    if message is None:
        raise BrokenOff("the other node does not know the token of this run")
    return message


def _is_same(proof: str, expected: str) -> bool:
    return hmac.compare_digest(proof.encode("utf-8", "surrogatepass"), expected.encode())


def _proof(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    said = f"{role} {server_nonce} {client_nonce}".encode()
    return hmac.new(bytes.fromhex(token), said, hashlib.sha256).hexdigest()
