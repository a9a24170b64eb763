"""The port of a server: nobody else can answer in its place while its owner lives."""

import socket
import subprocess
import sys

import pytest

from flows.prefect_server import HOST, _listening, _refuse_after
from infra.ports import free_port


def test_the_port_of_a_server_that_died_refuses_clients_and_cannot_be_taken() -> None:
    port = free_port()
    with _listening(port) as listening:
        socket.create_connection((HOST, port), 5).close()
        with subprocess.Popen([sys.executable, "-c", ""]) as server:
            _refuse_after(server, listening)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), 5)
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server((HOST, port))
    socket.create_server((HOST, port)).close()
