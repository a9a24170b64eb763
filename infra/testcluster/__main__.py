"""The test cluster on the command line; docs/tutorials/test-cluster.md shows how to use it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.testcluster import registry
from infra.testcluster.cluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.errors import T5TrainError, TestClusterError

_RUN = "demo-cluster"


def run_demo(root: Path, arguments: Sequence[str] = ()) -> None:
    """Train and publish on a temporary cluster; the published folder is copied to ``root``.

    ``arguments`` are additional arguments of ``t5-pretrain run smoke``. Raises TestClusterError if that fails, or if a
    host is left with a process of the run.
    """
    with Cluster.temporary(f"{_RUN}-{os.getpid()}") as cluster:
        where = ["--root", ROOT, "--name", _RUN, "--hostfile", HOSTFILE]
        # What the run publishes on the head's disk is removed with the head, so the export is published again below.
        chain = cluster.start("head", ["t5-pretrain", "run", "smoke", *where, *arguments])
        _require(chain.wait() == 0, "t5-pretrain run failed: see its output above")
        _require(not cluster.disk("node0", ROOT).exists(), f"node0 has {ROOT}: the hosts share it, but should not")
        _require_no_processes(cluster)
        export = cluster.disk("head", f"{ROOT}/runs/{_RUN}/export")
        command = Path(sys.executable).with_name("t5-pretrain")
        place = root.absolute() / "published" / _RUN
        published = subprocess.run([command, "publish", export, place], check=False)
        _require(published.returncode == 0, f"publishing to {place} failed: see the output above")


def _require_no_processes(cluster: Cluster) -> None:
    for host in cluster.hosts:
        left = [process for process in cluster.processes(host) if "[listener]" not in " ".join(process.argv)]
        _require(not left, f"{host} is still running {left}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TestClusterError(otherwise)


app = typer.Typer(
    name="python -m infra.testcluster",
    help="Run several hosts on one machine, to try out training on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Name = Annotated[
    str, typer.Option("--name", help="Name of the cluster; there may be several.", envvar="T5_TEST_CLUSTER")
]
Node = Annotated[str, typer.Argument(metavar="HOST", help="head, node0, node1 ...")]
DEFAULT = "t5"


@app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes, besides the head.")] = 2,
    share: Annotated[Path | None, typer.Option(help="A folder that all hosts can read and write.")] = None,
    name: Name = DEFAULT,
) -> None:
    """Start a head and nodes; `hosts` in the head's home folder is a hostfile of all nodes."""
    cluster = Cluster.up(name, nodes, share)
    typer.echo(f"up: {' '.join(cluster.hosts)}")


@app.command()
def down(name: Name = DEFAULT) -> None:
    """Stop every host, and remove all disks."""
    registry.end(name)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context, root: Annotated[Path, typer.Option(help="Folder for the published model.")]) -> None:
    """Train, certify and publish on two temporary hosts that share nothing; additional arguments go to `run`."""
    run_demo(root, context.args)


@app.command("exec", context_settings={"allow_interspersed_args": False})
def run(host: Node, command: Annotated[list[str], typer.Argument(metavar="COMMAND...")], name: Name = DEFAULT) -> None:
    """Run a command on a host, as from its console."""
    process = Cluster(name).start(host, command)
    sys.exit(process.wait())


@app.command()
def ps(host: Annotated[str | None, typer.Argument()] = None, name: Name = DEFAULT) -> None:
    """Show the processes of one host or of all hosts, with their pids on the machine."""
    cluster = Cluster(name)
    for shown in [host] if host else cluster.hosts:
        for process in cluster.processes(shown):
            typer.echo(f"{shown}\t{process.pid}\t{' '.join(process.argv)}")


@app.command()
def sshd(host: Node, action: Literal["stop", "start"], name: Name = DEFAULT) -> None:
    """Make a host refuse new ssh connections, or accept them again."""
    cluster = Cluster(name)
    (cluster.stop_sshd if action == "stop" else cluster.start_sshd)(host)


@app.command()
def link(host: Node, state: Literal["down", "up"], name: Name = DEFAULT) -> None:
    """Unplug a host's network cable, or plug it back in."""
    Cluster(name).set_link(host, state)


@app.command()
def rate(
    host: Node, limit: Annotated[str, typer.Argument(help="Such as 200mbit, or off.")], name: Name = DEFAULT
) -> None:
    """Limit the bandwidth of a host's cable in both directions."""
    Cluster(name).set_rate(host, None if limit == "off" else limit)


@app.command("power-cut")
def power_cut(host: Node, name: Name = DEFAULT) -> None:
    """End a host at once, its cable first, so that other hosts get no notice."""
    Cluster(name).power_cut(host)


@app.command()
def boot(
    host: Node,
    new_disk: Annotated[bool, typer.Option("--new-disk", help="With an empty disk, as after a replacement.")] = False,
    name: Name = DEFAULT,
) -> None:
    """Boot a host again."""
    Cluster(name).boot(host, new_disk)


@app.command()
def rekey(
    host: Node,
    trusted: Annotated[bool, typer.Option("--trusted", help="Make the new key known to the head.")] = False,
    name: Name = DEFAULT,
) -> None:
    """Give a host a new host key, so that ssh refuses to connect to it."""
    Cluster(name).rekey(host, trusted)


def main() -> None:
    """Run a command; an error is printed as one line, and its kind gives the exit code (``t5train.errors``)."""
    try:
        app()
    except T5TrainError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
