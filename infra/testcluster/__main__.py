"""The test cluster from a terminal; docs/test-cluster.md shows it in use."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.testcluster import registry
from infra.testcluster.cluster import Cluster
from infra.testcluster.demo import run_demo
from t5train.errors import T5TrainError

app = typer.Typer(
    name="python -m infra.testcluster",
    help="Several hosts on one machine, to try training on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Name = Annotated[str, typer.Option("--name", help="Which cluster; there may be several.", envvar="T5_TEST_CLUSTER")]
Node = Annotated[str, typer.Argument(metavar="HOST", help="head, node0, node1 ...")]
DEFAULT = "t5"


@app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes, besides the head.")] = 2,
    share: Annotated[Path | None, typer.Option(help="A folder that all hosts have, to read and write.")] = None,
    name: Name = DEFAULT,
) -> None:
    """Start a head and nodes; /root/hosts on the head is a hostfile of all nodes."""
    cluster = Cluster.up(name, nodes, share)
    typer.echo(f"up: {' '.join(cluster.hosts)}")


@app.command()
def down(name: Name = DEFAULT) -> None:
    """End every host, and remove all disks."""
    registry.end(name)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context, root: Annotated[Path, typer.Option(help="Gets what is published.")]) -> None:
    """Train, certify and publish on two hosts with nothing shared, and remove them; more arguments go to `run`."""
    run_demo(root, context.args)


@app.command("exec", context_settings={"allow_interspersed_args": False})
def run(host: Node, command: Annotated[list[str], typer.Argument(metavar="COMMAND...")], name: Name = DEFAULT) -> None:
    """Run a command on a host, as from its console."""
    process = Cluster(name).start(host, command)
    sys.exit(process.wait())


@app.command()
def ps(host: Annotated[str | None, typer.Argument()] = None, name: Name = DEFAULT) -> None:
    """Show the processes of one host or of all, with the pids that they have on the machine."""
    cluster = Cluster(name)
    for shown in [host] if host else cluster.hosts:
        for process in cluster.processes(shown):
            typer.echo(f"{shown}\t{process.pid}\t{' '.join(process.argv)}")


@app.command()
def sshd(host: Node, action: Literal["stop", "start"], name: Name = DEFAULT) -> None:
    """Let a host take no new connections, or take them again."""
    cluster = Cluster(name)
    (cluster.stop_sshd if action == "stop" else cluster.start_sshd)(host)


@app.command()
def link(host: Node, state: Literal["down", "up"], name: Name = DEFAULT) -> None:
    """Pull a host's cable, or put it back."""
    Cluster(name).set_link(host, state)


@app.command()
def rate(host: Node, limit: Annotated[str, typer.Argument(help="As 200mbit, or off.")], name: Name = DEFAULT) -> None:
    """Limit a host's cable in both directions."""
    Cluster(name).set_rate(host, None if limit == "off" else limit)


@app.command("power-cut")
def power_cut(host: Node, name: Name = DEFAULT) -> None:
    """End a host at once, its cable first: nobody is told."""
    Cluster(name).power_cut(host)


@app.command()
def boot(
    host: Node,
    new_disk: Annotated[bool, typer.Option("--new-disk", help="With an empty disk, as after a replacement.")] = False,
    name: Name = DEFAULT,
) -> None:
    """Switch a host on again."""
    Cluster(name).boot(host, new_disk)


@app.command()
def rekey(
    host: Node,
    trusted: Annotated[bool, typer.Option("--trusted", help="The head is told of it.")] = False,
    name: Name = DEFAULT,
) -> None:
    """Give a host another host key, so that ssh refuses it."""
    Cluster(name).rekey(host, trusted)


def main() -> None:
    """Run a command; errors are one line and exit code 1."""
    try:
        app()
    except T5TrainError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
