"""The Prefect server of a team, for a service manager: protected like the one of ``up``, but without a worker.

Its home is a folder of its own, so that an embedded server of the same root replaces neither its key nor its database.
Unlike theirs, its key stays the same, because clients on other machines have it. The database is SQLite in the home, or
PostgreSQL if ``DATABASE_VARIABLE`` has its URL.
"""

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from flows.server import api_key, prefect_server
from flows.server.prefect_server import RunningServer
from t5train.errors import InputError, LaunchError
from t5train.progress import Progress

HOME = "server"
DATABASE_VARIABLE = prefect_server.DATABASE_VARIABLE

_CONNECT_SECONDS = 5.0
_DRIVER = "postgresql+asyncpg"
_LACKS_PERMISSIONS = """
SELECT current_schema() IS NULL OR NOT has_schema_privilege(current_schema(), 'CREATE')
    OR NOT (has_database_privilege(current_database(), 'CREATE')
            OR EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_trgm'))
"""
_REMEDIES = {
    "28P01": f"Check user and password in {DATABASE_VARIABLE}; special characters in them must be percent-encoded",
    "28000": f"Check the user in {DATABASE_VARIABLE} and PostgreSQL's pg_hba.conf",
    "3D000": "Create the database, as user postgres: createdb --owner USER DATABASE",
    "53300": "PostgreSQL has too many clients: raise its max_connections",
}


class Address(NamedTuple):
    """The address that a server listens on."""

    ip: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> "Address":
        """Resolve a host name or an address of this machine. Raises InputError if there is no such host."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise InputError(f"--host {host} is not an address of this machine: {error.strerror}") from error
        return cls(str(found[4][0]), port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def reachable_ip(self) -> str:
        """An address at which this machine reaches the server."""
        if not ipaddress.ip_address(self.ip).is_unspecified:
            return self.ip
        return "::1" if ":" in self.ip else prefect_server.HOST

    @property
    def url(self) -> str:
        """The server's URL on this machine."""
        host = f"[{self.reachable_ip}]" if ":" in self.ip else self.reachable_ip
        return f"http://{host}:{self.port}"


def serve(home: Path, address: Address, progress: Progress, announce: Callable[[], None]) -> NoReturn:
    """Run the server until it ends, which raises LaunchError, or until Ctrl-C. ``announce`` is called when it is up.

    Raises InputError or LaunchError if the database cannot be used, RunLocked if another server uses ``home``, and
    LaunchError with the end of the log if the server does not start.
    """
    if url := os.environ.get(DATABASE_VARIABLE):
        require_database(url)
    os.environ.update(prefect_server.without_proxy(address.reachable_ip))
    api_url = f"{address.url}/api"
    with (
        prefect_server.held(home, RunningServer(api_url, lasting=True)),
        prefect_server.listening(address.port, address.ip) as bound,
        prefect_server.serving(home, api_url, bound, _environment(home, address), progress) as server,
    ):
        announce()
        raise LaunchError(
            f"the server ended with exit code {server.wait()}; {home / prefect_server.LOG} shows why. Start it again: "
            "nothing is lost"
        )


def _environment(home: Path, address: Address) -> dict[str, str]:
    """Return the settings of the server.

    Its pages find the API by a relative URL, so they work through tunnels and proxies, under any name.
    """
    return prefect_server.server_environment(home, address.port, api_key.keep(home)) | {
        "PREFECT_API_URL": f"{address.url}/api",
        "PREFECT_SERVER_API_HOST": address.ip,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": address.url,
        "PREFECT_SERVER_UI_API_URL": "/api",
    }


def require_database(url: str) -> None:
    """Raise InputError or LaunchError unless a PostgreSQL database can be used. Messages never have the password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(
            f"{DATABASE_VARIABLE} is not a URL: write {_DRIVER}://USER:PASSWORD@HOST:5432/DATABASE"
        ) from None
    if parsed.drivername != _DRIVER:
        raise InputError(
            f"{DATABASE_VARIABLE} begins with {parsed.drivername}://: write {_DRIVER}://USER:PASSWORD@HOST:5432/DATABASE"
        )
    host = parsed.host or parsed.query.get("host") or "the default host"
    where = f"PostgreSQL at {host}, port {parsed.port or 5432}, database {parsed.database}, user {parsed.username}"
    try:
        lacks_permissions = asyncio.run(_lacks_permissions(url))
    except Exception as error:  # drivers raise errors of many kinds; each of them means that it cannot be used
        raise LaunchError(f"{where}, cannot be used: {_reason(error, parsed.password)}. {_remedy(error)}") from None
    if lacks_permissions:
        raise LaunchError(
            f"{where}: this user cannot create tables or the extension pg_trgm there. Make the user the owner of the "
            f"database, as user postgres: psql -c 'ALTER DATABASE {parsed.database} OWNER TO {parsed.username}'"
        )


async def _lacks_permissions(url: str) -> bool:
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    limits = {"timeout": _CONNECT_SECONDS, "command_timeout": _CONNECT_SECONDS}
    engine = create_async_engine(url, connect_args=limits)
    try:
        async with engine.connect() as connection:
            return bool(await connection.scalar(text(_LACKS_PERMISSIONS)))
    finally:
        await engine.dispose()


def _reason(error: Exception, password: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_CONNECT_SECONDS:.0f} s"
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].replace(str(password), "[secret]") if password else lines[0]


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"Start PostgreSQL there, or correct {DATABASE_VARIABLE}"
    return _REMEDIES.get(getattr(error, "sqlstate", ""), f"Check {DATABASE_VARIABLE}, and PostgreSQL's log")
