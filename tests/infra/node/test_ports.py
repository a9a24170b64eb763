import socket

import pytest

from infra.node import ports
from t5train.errors import SpecError


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - both are what other programs do
def test_a_port_in_use_is_refused_with_its_number(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SpecError, match=f"cluster.master_port is {port}, .*Choose another"):
            ports.require_free(port)
    ports.require_free(port)


def test_a_port_whose_last_connection_has_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # the server's side closes first and stays in TIME_WAIT
    ports.require_free(port)
