"""Peers that do not know the token cost a server few resources, and do not keep other peers out."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.node.channel import BrokenOff
from infra.node.ports import Endpoint
from infra.node.storage import peer_connection
from infra.node.storage.file_channel import fetch_over, files_in
from infra.node.storage.peer_connection import connect, serve
from tests.infra.conftest import Until

TOKEN = "ab" * 32


@pytest.fixture
def threads_before() -> int:
    """The number of relay threads that servers of other tests have left."""
    return relay_threads()


@pytest.fixture
def server(tmp_path: Path) -> Endpoint:
    (tmp_path / "file").write_bytes(b"content")
    return serve(files_in(tmp_path), TOKEN)


@pytest.fixture
def strangers(server: Endpoint) -> Iterator[list[socket.socket]]:
    """200 connections that send nothing."""
    with ExitStack() as open_until_the_end:
        yield [
            open_until_the_end.enter_context(socket.create_connection((server.address, server.port), timeout=10))
            for _ in range(200)
        ]


def relay_threads() -> int:
    return sum(thread.name == "relay" for thread in threading.enumerate())


def test_200_silent_connections_use_few_threads_and_do_not_delay_a_peer(
    threads_before: int, server: Endpoint, strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connection, "_HANDSHAKE_SECONDS", 100.0)
    started = time.monotonic()
    channel = connect(server, TOKEN)
    assert b"".join(fetch_over(channel)("file", 0, 7)) == b"content"
    assert time.monotonic() - started < 90
    assert relay_threads() - threads_before <= 40
    channel.close()
    assert len(strangers) == 200


def test_a_wrong_token_is_reported_and_new_connections_do_not_disconnect_a_peer(server: Endpoint) -> None:
    with pytest.raises(BrokenOff, match="token"):
        connect(server, "cd" * 32)
    channel = connect(server, TOKEN)
    with ExitStack() as strangers:
        for _ in range(3 * peer_connection._MOST_HANDSHAKES):
            strangers.enter_context(socket.create_connection((server.address, server.port), timeout=10))
        assert b"".join(fetch_over(channel)("file", 0, 7)) == b"content"
        assert b"".join(fetch_over(channel)("file", 3, 7)) == b"tent"
    channel.close()


def test_a_slow_handshake_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    monkeypatch.setattr(peer_connection, "_HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(peer_connection, "_LOOK_SECONDS", 0.1)
    server = serve(files_in(tmp_path), TOKEN)
    with socket.create_connection((server.address, server.port), timeout=10) as slow:

        def is_refused() -> bool:
            try:
                slow.sendall(b"x")  # each byte comes within the time limit of a single read
            except OSError:
                return True
            return False

        until(is_refused)
