"""The team server's address and database are checked before it starts; no error shows the database's password."""

from ipaddress import IPv4Address

import pytest

from flows.server.team_server import DATABASE_VARIABLE, Address, require_database
from infra.node.ports import free_port
from t5train.errors import InputError, LaunchError

HIDDEN = "s3cret-of-the-database"


@pytest.mark.parametrize(
    ("host", "is_loopback", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:4200"),
        ("::1", True, "http://[::1]:4200"),
        (str(IPv4Address(0)), False, "http://127.0.0.1:4200"),
        ("::", False, "http://[::1]:4200"),
        ("192.0.2.7", False, "http://192.0.2.7:4200"),
    ],
)
def test_an_address_is_known_to_be_loopback_or_not(host: str, is_loopback: bool, url: str) -> None:
    address = Address.of(host, 4200)
    assert (address.is_loopback, address.url) == (is_loopback, url)


def test_a_name_that_is_no_host_is_refused() -> None:
    with pytest.raises(InputError, match=r"--host nowhere\.invalid"):
        Address.of("nowhere.invalid", 4200)


def test_a_database_server_that_does_not_answer_is_named_without_the_password() -> None:
    port = free_port()
    with pytest.raises(LaunchError) as refused:
        require_database(f"postgresql+asyncpg://t5:{HIDDEN}@127.0.0.1:{port}/prefect")
    message = str(refused.value)
    for fact in ("127.0.0.1", str(port), "database prefect", "user t5", "Start PostgreSQL", DATABASE_VARIABLE):
        assert fact in message
    assert HIDDEN not in message


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://t5:{HIDDEN}@db/prefect",
        f"sqlite+aiosqlite:///{HIDDEN}",
        f"t5:{HIDDEN}@db/prefect",
        f"postgresql+asyncpg://t5:{HIDDEN}@db:port/prefect",
    ],
)
def test_another_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InputError, match=r"write postgresql\+asyncpg://USER:PASSWORD@HOST") as refused:
        require_database(url)
    assert HIDDEN not in str(refused.value)
