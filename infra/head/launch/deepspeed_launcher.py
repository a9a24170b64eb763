"""DeepSpeed's launcher on the head: its command line, its environment, and its process under a guard.

Words that are passed to a shell or as an option on the nodes may contain plain characters only. pdsh is tested end to
end; for slurm and openmpi, only the command lines that DeepSpeed generates are tested.
"""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.head.hosts.code_shipping import path_to, shipped_code
from infra.head.hosts.hostfile import Hosts, hostfile_text, include_argument
from infra.head.hosts.nodes import module_path
from infra.head.hosts.ssh import SSH_CONFIG
from infra.node import processes
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.process_guard import LAUNCHER_OPTION, MODULE
from infra.node.attempts.rank_environment import search_path
from infra.node.node_folders import code_folder, head_folder
from infra.node.processes import RUN_ID_VARIABLE, ProcessIdentity
from t5train.errors import SpecError
from t5train.files.atomic import write_text
from t5train.spec import ClusterSpec

HOSTFILE = "hostfile"
# Without "%", which pdsh expands to host names and numbers.
_PLAIN = re.compile("[A-Za-z0-9_@+=:,./-]+")


def write_hostfile(hosts: Hosts, folder: Path) -> None:
    """Write the hostfile that ``launch_command`` names."""
    write_text(folder / HOSTFILE, hostfile_text(hosts))


def launch_command(
    cluster: ClusterSpec, hosts: Hosts, folder: Path, *, master: tuple[str, int | str], program: Sequence[str]
) -> list[str]:
    """Return the command that starts ``program`` (a module's name and its arguments) for every rank.

    ``folder`` holds the hostfile and ssh's configuration; ``master`` is the address and port of the rendezvous. Raises
    SpecError as ``require_launchable`` does, and for words that a shell would change.
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
    """Variables for the launcher: pdsh uses our ssh configuration, and no .deepspeed_env file adds variables."""
    ssh = f"-F {folder / SSH_CONFIG} -a -x %h"
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS": ssh, "DS_ENV_FILE": os.devnull}


def require_launchable(cluster: ClusterSpec, hosts: Hosts) -> None:
    """Raise SpecError if a shell would change Python's path or PYTHONPATH, or the launcher cannot use these slots."""
    _require_plain((sys.executable, *filter(None, [module_path(shipped_code(cluster))])))
    if cluster.launcher == "pdsh":
        return
    counts = {len(host.slots) for host in hosts.all}
    for host in hosts.all:
        if host.slots != tuple(range(len(host.slots))):
            raise SpecError(
                f"cluster.launcher is {cluster.launcher!r}, which can use only the first slots of a host, but slots "
                f"{host.slots} of {host.name} are chosen. Set cluster.launcher to pdsh, or choose the first slots"
            )
    if cluster.launcher == "slurm" and len(counts) > 1:
        raise SpecError(
            f"cluster.launcher is 'slurm', but slurm starts the same number of ranks on every host, and the hosts have "
            f"different numbers of slots: {sorted(counts)}. Set cluster.launcher to pdsh, or use the same number of "
            "slots on each host"
        )


def _environment_arguments(cluster: ClusterSpec) -> list[str]:
    """Set the hosts' PYTHONPATH for DeepSpeed's launcher, which passes its own to all hosts, but not for its guard."""
    return [word for name, value in path_to(shipped_code(cluster)).items() for word in ("env", f"{name}={value}")]


def _choice(cluster: ClusterSpec, hosts: Hosts) -> list[str]:
    """DeepSpeed rejects --include for openmpi, which uses the whole hostfile. Without it, srun chooses the hosts."""
    return [] if cluster.launcher == "openmpi" else ["--include", include_argument(hosts)]


def _program(cluster: ClusterSpec, program: Sequence[str]) -> list[str]:
    """Under slurm, DeepSpeed can start a file only, not a module."""
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
                f"{word!r} is passed to a shell on every host, which may change it: only letters, digits and "
                "_@+=:,./- are allowed. Install Python and this package at a path without other characters, and unset "
                "PYTHONPATH"
            )


_END_SECONDS = 10.0
_RECORD_SECONDS = 5.0
_LOOK_SECONDS = 0.1
# Only what ssh needs, and srun within an allocation: DeepSpeed puts some variables into a shell line on every host.
_ALLOWED = re.compile("LANG|LD_LIBRARY_PATH|LC_.*|HOME|LOGNAME|PATH|SLURM_.*|SSH_AUTH_SOCK|TMPDIR|TZ|USER")
_log = logging.getLogger(__name__)


class ClusterLauncher:
    """The launcher of an attempt, started on this machine by this process or an earlier one.

    The only signal it is sent is SIGKILL. On other signals, DeepSpeed's launcher ends processes on every host by name.
    """

    def __init__(self, run_id: str) -> None:
        self.folder = head_folder(run_id)
        self._processes = processes.in_run(attempt.launcher_run_id(run_id))
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, this: Attempt, argv: Sequence[str], accelerator: str | None) -> None:
        """Start the launcher of ``this``, the attempt in the run's folder. Its own folder and the lease must exist."""
        replace(this, folder=self.folder).write()
        _log.info("attempt %s starts; its logs are collected in %s", this.folder.name, this.folder)
        with open(self.folder / f"{attempt.LAUNCHER}.log", "ab", buffering=0) as log:
            log.write(f"{shlex.join(argv)}\n".encode())
            self._guard = subprocess.Popen(
                [sys.executable, "-m", MODULE, LAUNCHER_OPTION, str(self.folder), *argv],
                cwd="/",  # DeepSpeed changes to this folder on hosts, too
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self.folder, this.run_id, accelerator),
            )

    @property
    def is_alive(self) -> bool:
        """Whether the launcher's guard is still running."""
        if self._guard is not None:
            return self._guard.poll() is None
        guard = self._recorded_guard
        return guard is not None and guard.is_alive()

    def await_end(self) -> None:
        """Give the launcher time to notice that its ranks have ended, so that its log ends cleanly."""
        deadline = time.monotonic() + _END_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Kill the launcher: the guarded process first, so that the guard can record how it ended."""
        deadline = time.monotonic() + _RECORD_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            processes.end(self._guarded(), grace_seconds=0)
            time.sleep(_LOOK_SECONDS)
        if left := processes.end(self._processes, grace_seconds=0):
            _log.error(
                "processes %s of %s survived SIGKILL, so a disk or driver may hang: restart this machine",
                sorted(left),
                self.folder,
            )
        elif self._guard is not None:
            self._guard.wait()

    def _guarded(self) -> processes.Belongs:
        """Select all processes but the guard. One that this process started may not have recorded itself yet."""
        guard = self._guard or self._recorded_guard
        return lambda pid: guard is not None and pid != guard.pid and self._processes(pid)

    @property
    def _recorded_guard(self) -> ProcessIdentity | None:
        recorded = self.folder / f"{attempt.LAUNCHER}.pid"
        return ProcessIdentity(**json.loads(recorded.read_text("utf-8"))["guard"]) if recorded.exists() else None


def _environment(folder: Path, run_id: str, accelerator: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if _ALLOWED.fullmatch(name)}
    environment["PATH"] = search_path(environment)
    # DeepSpeed passes these to every host through a shell. ``require_launchable`` rejects what a shell would change.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if path := module_path(None):
        environment["PYTHONPATH"] = path
    if accelerator is not None:
        environment["DS_ACCELERATOR"] = accelerator
    return environment | launcher_variables(folder) | {RUN_ID_VARIABLE: attempt.launcher_run_id(run_id)}
