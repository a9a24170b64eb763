"""The command line of DeepSpeed's launcher over hosts, and the environment that goes with it.

What it puts into a shell line or an option on the nodes is of plain characters only. pdsh is tested as a whole; of
slurm and openmpi the command lines that DeepSpeed makes of this.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.cluster.hosts import Hosts, hostfile_text, include_argument
from infra.cluster.remote import SSH_CONFIG, module_path
from infra.cluster.shipping import path_to, shipped_code
from infra.node_folder import code_folder
from t5train.atomic import write_text
from t5train.errors import SpecError
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
        folder = Path(__file__).parents[2] if code is None else code_folder(code)
        return [str(folder / f"{module.replace('.', '/')}.py"), *arguments]
    return ["--module", module, *arguments]


def _require_plain(words: Sequence[str]) -> None:
    for word in words:
        if not _PLAIN.fullmatch(word):
            raise SpecError(
                f"{word!r} would go through the shell of every host: it must be of letters, digits and _@+=:,./-; "
                "install the package, and Python, at such a path, without PYTHONPATH"
            )
