"""A Slurm of one machine and one node: munged, slurmctld and slurmd with their files in one folder."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infra.node.ports import free_port
from tests.support.waiting import await_that

DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
# A job that is queued again waits until its credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=2
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Talks to a Slurm with its own commands."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def do(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm. Returns its output; raises CalledProcessError."""
        environment = os.environ | self.environment
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says."""
        shown = self.do("scontrol", "--oneliner", "show", "job", number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)


def what_is_missing() -> str | None:
    """Return what is missing for a Slurm on this machine, or None."""
    if os.geteuid():
        return "Slurm's daemons need root"
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    return f"{', '.join(missing)} not found: make test-slurm installs them" if missing else None


@contextmanager
def one_machine_slurm(folder: Path, cores: int) -> Iterator[Slurm]:
    """Run Slurm's daemons, and wait until the node is idle. Their output is in ``folder``."""
    for name in ("state", "spool"):
        (folder / name).mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, ports = socket.gethostname().partition(".")[0], (free_port(), free_port())
    configuration = _CONFIGURATION.format(
        host=host, controller_port=ports[0], node_port=ports[1], folder=folder, cores=cores
    )
    (folder / "slurm.conf").write_text(configuration)
    slurm = Slurm(folder)
    files = [f"--{kind}-file={folder / 'munged'}.{kind}" for kind in ("pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}", *files]
    with ExitStack() as daemons:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            daemons.enter_context(_daemon(command, folder, slurm.environment))
        await_that(lambda: _is_idle(slurm), 60)
        yield slurm


@contextmanager
def _daemon(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with open(folder / f"{command[0]}.out", "wb") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
    try:
        if command[0] == "munged":
            await_that((folder / "munge.socket").exists, 20)
        yield
    finally:
        process.terminate()
        process.wait(30)


def _is_idle(slurm: Slurm) -> bool:
    try:
        return "idle" in slurm.do("sinfo", "--noheader", "--format=%T")
    except subprocess.CalledProcessError:  # the controller does not answer yet
        return False
