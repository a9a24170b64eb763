"""DeepSpeed's launcher on the head: its command line, its environment and its process, under a guard.

What goes into a shell line or an option on the nodes is of plain characters only. pdsh is tested as a whole; for slurm
and openmpi, the command lines that DeepSpeed makes of this.
"""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.head.hosts.code_shipping import module_path, path_to, shipped_code
from infra.head.hosts.hostfile import Hosts, hostfile_text, include_argument
from infra.head.hosts.ssh import SSH_CONFIG
from infra.node import processes
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.rank_environment import search_path
from infra.node.node_folders import code_folder, head_folder
from infra.node.processes import RUN_ID_VARIABLE, ProcessIdentity
from t5train.errors import SpecError
from t5train.files.atomic import write_text
from t5train.spec import ClusterSpec

HOSTFILE = "hostfile"
# Not "%", of which pdsh makes host names and numbers.
_PLAIN = re.compile("[A-Za-z0-9_@+=:,./-]+")


def write_hostfile(hosts: Hosts, folder: Path) -> None:
    """Write the hosts into the file that ``launch_command`` names."""
    write_text(folder / HOSTFILE, hostfile_text(hosts))


def launch_command(
    cluster: ClusterSpec, hosts: Hosts, folder: Path, *, master: tuple[str, int | str], program: Sequence[str]
) -> list[str]:
    """What starts ``program`` (a module's name and its arguments) as every rank.

    ``folder`` holds the hostfile and ssh's configuration; ``master`` is the address and port at which ranks meet.
    Raises SpecError for hosts that the launcher cannot start, and for what a shell would not leave as it is.
    """
    require_launchable(cluster, hosts)
    _require_plain((str(folder), str(master[0]), *program))
    return [
        *_environment_arguments(cluster),
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", str(folder / HOSTFILE), *_choice(cluster, hosts)),
        *("--launcher", cluster.launcher, "--force_multi", "--no_ssh_check"),
        *("--master_addr", master[0], "--master_port", str(master[1])),
        *("--no_local_rank", *_program(cluster, program)),
    ]


def launcher_variables(folder: Path) -> dict[str, str]:
    """Variables that the launcher needs: pdsh takes our configuration for ssh, and no file adds to ranks' variables."""
    ssh = f"-F {folder / SSH_CONFIG} -a -x %h"
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS": ssh, "DS_ENV_FILE": os.devnull}


def require_launchable(cluster: ClusterSpec, hosts: Hosts) -> None:
    """SpecError for a Python that a shell would not find, and for slots that slurm and openmpi cannot be told of."""
    _require_plain((sys.executable, *filter(None, [module_path(shipped_code(cluster))])))
    if cluster.launcher == "pdsh":
        return
    counts = {len(host.slots) for host in hosts.all}
    for host in hosts.all:
        if host.slots != tuple(range(len(host.slots))):
            raise SpecError(
                f"cluster.launcher is {cluster.launcher!r}, which cannot choose slots {host.slots} of {host.name}: use "
                "pdsh, or the first slots of each host"
            )
    if cluster.launcher == "slurm" and len(counts) > 1:
        raise SpecError(
            f"cluster.launcher is 'slurm', which starts equally many ranks on every host, and the hosts have "
            f"{sorted(counts)} slots: use pdsh, or as many slots of each"
        )


def _environment_arguments(cluster: ClusterSpec) -> list[str]:
    """DeepSpeed's launcher gives all hosts its own PYTHONPATH, but the guard around it is not to have theirs."""
    return [word for name, value in path_to(shipped_code(cluster)).items() for word in ("env", f"{name}={value}")]


def _choice(cluster: ClusterSpec, hosts: Hosts) -> list[str]:
    """DeepSpeed refuses a choice for openmpi, whose hostfile says it all, and lets srun choose hosts without one."""
    return [] if cluster.launcher == "openmpi" else ["--include", include_argument(hosts)]


def _program(cluster: ClusterSpec, program: Sequence[str]) -> list[str]:
    """DeepSpeed does not know modules under slurm, only files."""
    module, *arguments = program
    if cluster.launcher == "slurm":
        code = shipped_code(cluster)
        folder = Path(__file__).parents[3] if code is None else code_folder(code)
        return [str(folder / f"{module.replace('.', '/')}.py"), *arguments]
    return ["--module", module, *arguments]


def _require_plain(words: Sequence[str]) -> None:
    for word in words:
        if not _PLAIN.fullmatch(word):
            raise SpecError(
                f"{word!r} would go through the shell of every host: it must be of letters, digits and _@+=:,./-; "
                "install the package, and Python, at such a path, without PYTHONPATH"
            )


_END_SECONDS = 10.0
_RECORD_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# What ssh, and srun within an allocation, need. What DeepSpeed would put into a shell line of every host is not here.
_ALLOWED = re.compile("LANG|LD_LIBRARY_PATH|LC_.*|HOME|LOGNAME|PATH|SLURM_.*|SSH_AUTH_SOCK|TMPDIR|TZ|USER")
_log = logging.getLogger(__name__)


class ClusterLauncher:
    """The launcher of an attempt, which this process or one before it started on this machine.

    It is never sent another signal than SIGKILL: on any other it would end processes of every host by their name.
    """

    def __init__(self, run_id: str) -> None:
        self.folder = head_folder(run_id)
        self._processes = processes.in_run(attempt.launcher_run_id(run_id))
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, this: Attempt, argv: Sequence[str], accelerator: str | None) -> None:
        """Start it; ``this`` is the attempt as the run's folder has it. The folder and the lease must be there."""
        replace(this, folder=self.folder).write()
        _log.info("attempt %s: %s", this.folder.name, " ".join(argv))
        with open(self.folder / f"{attempt.LAUNCHER}.log", "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "infra.node.attempts.process_guard", "--launcher", str(self.folder), *argv],
                cwd="/",  # the folder in which hosts start, too
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self.folder, this.run_id, accelerator),
            )

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, that is its guard."""
        if self._guard is not None:
            return self._guard.poll() is None
        guard = self._guard_identity
        return guard is not None and guard.is_alive()

    def await_end(self) -> None:
        """Let it notice by itself that its ranks have ended, so that its log ends in peace."""
        deadline = time.monotonic() + _END_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Leave nothing of it on this machine: what it guards first, so that the guard writes down how that ended."""
        guard = self._guard_identity
        processes.end(lambda pid: self._processes(pid) and guard is not None and pid != guard.pid, grace_seconds=0)
        deadline = time.monotonic() + _RECORD_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if left := processes.end(self._processes, grace_seconds=0):
            _log.error("processes %s of %s do not end, not even by SIGKILL", sorted(left), self.folder)
        elif self._guard is not None:
            self._guard.wait()

    @property
    def _guard_identity(self) -> ProcessIdentity | None:
        recorded = self.folder / f"{attempt.LAUNCHER}.pid"
        return ProcessIdentity(**json.loads(recorded.read_text("utf-8"))["guard"]) if recorded.exists() else None


def _environment(folder: Path, run_id: str, accelerator: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if _ALLOWED.fullmatch(name)}
    environment["PATH"] = search_path(environment)
    # These go to every host, by a shell (infra.head.launch.deepspeed_launcher refuses what that would change).
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if path := module_path(None):
        environment["PYTHONPATH"] = path
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    return environment | launcher_variables(folder) | {RUN_ID_VARIABLE: attempt.launcher_run_id(run_id)}
