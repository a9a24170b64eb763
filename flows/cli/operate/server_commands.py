"""``up`` and ``deploy``: run Prefect's server and a worker, and create the pool and the deployments.

``server`` and ``notifications``: what a team runs once, on the machine of its Prefect server.
"""

import asyncio
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.interruption import interrupt_on_stop
from flows.cli.operate.worker_command import run_worker
from flows.cli.options import RootOption, root_of, settings, with_options
from flows.cli.terminal import complain, progress_display, say
from flows.run_parameters import LOCATIONS, PATHS
from flows.server import api_key, prefect_profile, prefect_server, team_server
from flows.server.team_server import Address
from t5train.errors import InputError, SpecError, StorageError
from t5train.records.locations import local_folder
from t5train.spec import RunSpec
from t5train.spec.known_texts import is_named_text
from t5train.spec.settings import parsed

if TYPE_CHECKING:
    from flows.deployment.deploy import Deployed  # imports Prefect, which reads its settings when it is imported


_DEPLOYED = "Deployments"
"""Heading in the help of the options that configure deployments."""


@dataclass(frozen=True)
class DeployedOptions:
    """The options that configure all deployments. None: the option is not given, and the earlier value is kept."""

    root: RootOption = None
    corpus: Annotated[
        str | None,
        typer.Option("--corpus", metavar="SOURCE", help="Text that deployments train on", rich_help_panel=_DEPLOYED),
    ] = None
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", metavar="FILE", help="Hosts that deployments train on", rich_help_panel=_DEPLOYED),
    ] = None
    scratch: Annotated[
        str | None,
        typer.Option("--scratch", metavar="DIR", help="Folder on each host's own disk", rich_help_panel=_DEPLOYED),
    ] = None
    publish_to: Annotated[
        str | None,
        typer.Option(
            "--publish-to",
            metavar="URL",
            help="Folder or fsspec URL in which each run publishes a folder of its name",
            rich_help_panel=_DEPLOYED,
        ),
    ] = None
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PART.KEY=VALUE",
            help="Setting of all deployments; can be repeated",
            rich_help_panel=_DEPLOYED,
        ),
    ] = None

    def parameters(self) -> dict[str, object]:
        """Return the parameters of deployments that the options stand for."""
        given = [each for each in self.changes or [] if each]
        is_path = self.corpus is None or not is_named_text(self.corpus)
        return {
            "root": self.root and str(self.root.absolute()),
            "corpus": _absolute(self.corpus) if is_path else self.corpus,
            "hostfile": _absolute(self.hostfile),
            "scratch": self.scratch,
            "publish_under": _absolute(self.publish_to),
            "deployed_settings": None if self.changes is None else _absolute_paths(parsed(RunSpec, settings(given))),
        }


@with_options
def deploy(options: DeployedOptions) -> None:
    """Create or update queues, deployments and schedules on the configured Prefect server.

    Safe to repeat. Values are kept for the next call; an empty one, such as --hostfile "", removes the earlier one, and
    --set replaces all earlier settings.

    $ t5-pretrain deploy --root /data/t5 --corpus '/data/*.txt'
    """
    prefect_server.join_configured(root_of(options.root))
    _deploy(options.parameters())


def _absolute_paths(changed: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which local paths are absolute, as that of --corpus: a worker has another current folder."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(each) for each in value]
        return value if not isinstance(value, str) or is_named_text(value) else _absolute(value)

    return changed | {name: absolute(changed[name]) for name in (*LOCATIONS, *PATHS) if name in changed}


def _absolute(location: str | None) -> str | None:
    """Return a local path as an absolute one, and anything else unchanged."""
    folder = local_folder(location) if location else None
    return location if folder is None else str(folder)


@with_options
def up(
    options: DeployedOptions,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server, on this machine only")] = (
        prefect_server.DEFAULT_PORT
    ),
) -> None:
    """Run a Prefect server with the pool, the deployments and a worker on this machine, until Ctrl-C.

    $ t5-pretrain up
    $ t5-pretrain up --root /data/t5 --corpus '/data/*.txt'
    """
    prefect_server.require_free_port(port)
    interrupt_on_stop()
    root = root_of(options.root)
    home = root / prefect_server.HOME
    profiles = prefect_profile.UserProfiles.find()
    with (
        progress_display() as progress,
        prefect_server.own_server(home, port, progress, lasting=True) as api_url,
    ):
        deployed = _deploy(options.parameters() | {"root": str(root)})
        startable = [each for each in deployed.names if each not in deployed.refused]
        example = (startable or deployed.names)[0]
        with _releasing_profile(profiles, api_url, home):
            run_worker(home / "worker.log", lambda: _explain(profiles, home, api_url, example))


@contextmanager
def _releasing_profile(profiles: prefect_profile.UserProfiles, api_url: str, home: Path) -> Iterator[None]:
    """After the block, activate the profile from before it if the active one leads to this server, which ends."""
    key = api_key.read(home)
    try:
        yield
    finally:
        try:
            if profiles.release(api_url, key, prefect_server.answers):
                complain(f"the Prefect profile {prefect_profile.NAME} no longer leads to this server, which ends")
        except (InputError, StorageError) as error:
            complain(f"the Prefect profile {prefect_profile.NAME} may still be active: {error}")


def _explain(profiles: prefect_profile.UserProfiles, home: Path, api_url: str, example: str) -> None:
    commands = "".join(f"\n    {line}" for line in _how_to_run(profiles, home, api_url, example))
    say(f"Prefect is at {api_url.removesuffix('/api')}; Ctrl-C stops it with all its runs. Its UI asks for a key:")
    say(f"    cat {shlex.quote(str(api_key.path_of(home)))}")
    say(f"To start a run, type{commands}")


def _how_to_run(profiles: prefect_profile.UserProfiles, home: Path, api_url: str, example: str) -> Iterator[str]:
    """Yield commands that start a run in another shell with the same environment."""
    run = f"{_prefect()} deployment run {example}"
    try:
        is_in_use = profiles.write(api_url, api_key.read(home))
    except (InputError, StorageError) as error:
        complain(f"the Prefect profile {prefect_profile.NAME} was not written: {error}")
        key = f'"$(cat {shlex.quote(str(api_key.path_of(home)))})"'
        yield f"PREFECT_API_URL={api_url} PREFECT_API_AUTH_STRING={key} {run}"
        return
    if profiles.overrides:
        yield f"unset {' '.join(profiles.overrides)}"
    if not is_in_use:
        yield f"{_prefect()} profile use {prefect_profile.NAME}"
    yield run


def _deploy(given: Mapping[str, object]) -> "Deployed":
    from flows.deployment.deploy import deploy as apply  # imports Prefect, which reads its settings when it is imported

    deployed = apply(given, root_of(None))
    defaults = deployed.defaults.parameters()
    say(f"deployed: {', '.join(deployed.names)}")
    say(f"their defaults: {', '.join(f'{name} {value}' for name, value in defaults.items())}")
    if "corpus" not in defaults:
        complain("of the deployments that train on text, only smoke has one: configure it for the others with --corpus")
    for name, text in deployed.other_texts.items():
        complain(f"{name} does not train on {defaults['corpus']}: it uses {text or 'data of its own'}")
    for name, why in deployed.refused.items():
        complain(f"runs of {name} would be refused: {why}")
    return deployed


def _prefect() -> str:
    """Return Prefect's command: in the same folder as the Python interpreter, or its module (`pip install --user`)."""
    beside = Path(sys.executable).with_name("prefect")
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m prefect"


def server(
    root: RootOption = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all of this machine")
    ] = prefect_server.HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")] = prefect_server.DEFAULT_PORT,
) -> None:
    """Run a team's Prefect server, without a worker, until Ctrl-C.

    Its database is SQLite under the root, or the PostgreSQL database in PREFECT_SERVER_DATABASE_CONNECTION_URL.

    $ t5-pretrain server --root /data/t5
    """
    interrupt_on_stop()
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
    """Make the configured Prefect server post failed, crashed, lost and late runs to the URL in T5_PRETRAIN_WEBHOOK.

    $ T5_PRETRAIN_WEBHOOK=https://example.org/hook t5-pretrain notifications
    """
    prefect_server.join_configured(root_of(root))
    # This imports Prefect, which reads its settings then.
    from flows.deployment.notifications import WEBHOOK_VARIABLE, notify, webhook_url

    url = None if off else webhook_url()
    if url is None and not off:
        raise SpecError(f"{WEBHOOK_VARIABLE} is not set: set it to the URL to post to, or add --off to stop notifying")
    asyncio.run(notify(url))
    say("failed, crashed, lost and late runs are posted to the webhook" if url else "nothing is posted any more")
