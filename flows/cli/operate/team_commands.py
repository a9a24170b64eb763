"""``server`` and ``notifications``: what a team runs once, on the machine of its Prefect server."""

import asyncio
import shlex
import signal
from typing import Annotated

import typer

from flows.cli.options import RootOption, root_of
from flows.cli.terminal import complain, progress_display, say
from flows.server import api_key, prefect_server, team_server
from flows.server.team_server import Address
from t5train.errors import SpecError


def server(
    root: RootOption = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all of this machine")
    ] = prefect_server.HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")] = prefect_server.DEFAULT_PORT,
) -> None:
    """Run a team's Prefect server, without a worker, until Ctrl-C.

    Its database is SQLite under the root, or the PostgreSQL database in PREFECT_SERVER_DATABASE_CONNECTION_URL.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's SIGTERM acts like Ctrl-C
    address, home = Address.of(host, port), root_of(root) / team_server.HOME
    if not address.is_loopback:
        complain(
            f"warning: {address.ip} is not a loopback address, and the API key passes the network unencrypted: let the "
            "server listen on 127.0.0.1, behind a reverse proxy with TLS or ssh tunnels (docs/how-to/team-server.md)"
        )

    def announce() -> None:
        key_file = shlex.quote(str(api_key.path_of(home)))
        say(f"Prefect is at {address.url}. Clients and its UI need the key: cat {key_file}")

    with progress_display() as progress:
        team_server.serve(home, address, progress, announce)


def notifications(
    root: RootOption = None,
    off: Annotated[bool, typer.Option("--off", help="Stop notifying, and remove the URL from the server")] = False,
) -> None:
    """Make the configured Prefect server post failed, crashed, lost and late runs to the URL in T5_PRETRAIN_WEBHOOK."""
    api_url = prefect_server.configured_api_url()
    if api_url is None:
        raise SpecError("no Prefect server is configured: set PREFECT_API_URL and PREFECT_API_AUTH_STRING")
    prefect_server.join(root_of(root), api_url)
    from flows.deployment.notifications import (  # imports Prefect, which reads its settings then
        WEBHOOK_VARIABLE,
        webhook_url,
    )

    url = None if off else webhook_url()
    if url is None and not off:
        raise SpecError(f"{WEBHOOK_VARIABLE} is not set: set it to the URL to post to, or add --off to stop notifying")
    asyncio.run(_apply(url))
    say("failed, crashed, lost and late runs are posted to the webhook" if url else "nothing is posted any more")


async def _apply(url: str | None) -> None:
    from prefect.client.orchestration import get_client

    from flows.deployment.notifications import apply

    async with get_client() as client:
        await apply(client, url)
