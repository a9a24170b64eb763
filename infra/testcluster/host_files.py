"""The files of a host: ssh keys and settings, its disk, and the files of the machine that it can read.

Every host has its own host key. The head has a key that every host accepts, and checks host keys strictly.
"""

import os
import pwd
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from infra.node.operator_folder import VARIABLE, operator_folder
from infra.testcluster import namespaces
from infra.testcluster.host_init import Mount

SERVER = "/usr/sbin/sshd"
NODE_FOLDER = "/run/testcluster"
"""The path on a host of its ``etc`` folder."""
HOME = pwd.getpwuid(0).pw_dir
"""The home folder of root, who is the user of every host."""
START = [SERVER, "-f", f"{NODE_FOLDER}/sshd_config", "-E", "/var/tmp/sshd.log"]  # noqa: S108 - the host's own
_CONFIG = f"""\
HostKey {NODE_FOLDER}/host_key
AuthorizedKeysFile {NODE_FOLDER}/authorized_keys
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
"""


def make_key(path: Path) -> None:
    """Create a new key pair, replacing an existing one."""
    for old in (path, path.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.parent.name, "-f", path], check=True)


def write_server(etc: Path, user_key: Path) -> None:
    """Write the files of a host's sshd to ``etc``.

    They are its configuration, ``user_key`` as the only authorized key, and a host key if there is none yet.
    """
    (etc / "sshd_config").write_text(_CONFIG, "utf-8")
    (etc / "authorized_keys").write_bytes(user_key.with_suffix(".pub").read_bytes())
    # Without PAM, sshd would reject a locked account, such as root's on a laptop.
    (etc / "shadow").touch(0o600)
    (etc / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n", "utf-8")
    if not (etc / "host_key").exists():
        make_key(etc / "host_key")


def write_client(disk: Path, user_key: Path) -> None:
    """Write root's .ssh folder to the disk of the head."""
    folder = disk / HOME[1:] / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "id_ed25519"
    key.touch(0o600)
    key.write_bytes(user_key.read_bytes())
    (folder / "config").write_text("Host *\n    StrictHostKeyChecking yes\n", "utf-8")


def write_known_hosts(disk: Path, keys: dict[str, Path]) -> None:
    """Write the host keys of all hosts to the disk of the head."""
    lines = []
    for host, key in keys.items():
        kind, text = key.with_suffix(".pub").read_text("utf-8").split()[:2]
        lines.append(f"{host},{namespaces.address(host)} {kind} {text}\n")
    (disk / HOME[1:] / ".ssh" / "known_hosts").write_text("".join(lines), "utf-8")


HOSTFILE = f"{HOME}/hosts"
"""On the head: a hostfile of all nodes, with one slot each."""
ROOT = f"{HOME}/t5"
"""On the head: the root of runs whose hosts share nothing."""
_MODES = {"/tmp": 0o1777, "/var/tmp": 0o1777, HOME: 0o700, "/home": 0o755, "/run": 0o755}  # noqa: S108 - the host's own
"""The folders that each host has on its own disk, and their modes."""
_FILES = {
    "hosts": "/etc/hosts",
    "hostname": "/etc/hostname",
    "machine-id": "/etc/machine-id",
    "boot_id": "/proc/sys/kernel/random/boot_id",
    "shadow": "/etc/shadow",
}
"""Files in a host's ``etc`` folder that replace files of the machine, and the paths of these."""
OPERATORS = f"{HOME}/.cache/torch_extensions"
"""Where a host looks for compiled operators."""
_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH")


def environment() -> dict[str, str]:
    """The environment of commands on a host: this Python first on PATH, and this process's code and operators."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    kept = {name: os.environ[name] for name in _KEPT if os.environ.get(name)}
    return {"PATH": path, "HOME": HOME, "USER": "root", "LANG": "C.UTF-8", VARIABLE: OPERATORS, **kept}


def make_disk(disk: Path) -> None:
    """Create a disk that is empty except for DeepSpeed's compiled operators, so that no host compiles them."""
    for folder, mode in _MODES.items():
        (disk / folder[1:]).mkdir(parents=True, exist_ok=True)
        (disk / folder[1:]).chmod(mode)
    compiled = operator_folder()
    if compiled.is_dir():  # without locks, which no process would hold; with file times, by which ninja sees no change
        shutil.copytree(compiled, disk / OPERATORS[1:], ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)


def write_etc(etc: Path, host: str, hosts: list[str]) -> None:
    """Write the names and addresses of all hosts, the host's name, a machine id (if none exists) and a new boot id."""
    lines = ["127.0.0.1 localhost\n", *(f"{namespaces.address(name)} {name}\n" for name in hosts)]
    (etc / "hosts").write_text("".join(lines), "utf-8")
    (etc / "hostname").write_text(f"{host}\n", "utf-8")
    (etc / "boot_id").write_text(f"{uuid.uuid4()}\n", "utf-8")
    if not (etc / "machine-id").exists():
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n", "utf-8")


def prepare(disk: Path, etc: Path, share: str | None) -> list[Mount]:
    """Return the mounts of a host; empties its /run, and creates the mount points that are on its disk."""
    shutil.rmtree(disk / "run")
    (disk / "run" / "sshd").mkdir(parents=True)
    wanted = list(_mounts(disk, etc, share))
    for mount in wanted:
        if _is_own(mount.target):
            _make_place(disk / mount.target[1:], Path(mount.source).is_dir())
    return wanted


def _mounts(disk: Path, etc: Path, share: str | None) -> Iterator[Mount]:
    for folder in _MODES:
        if Path(folder).is_dir():
            yield Mount(str(disk / folder[1:]), folder, writable=True)
    yield Mount(str(etc), NODE_FOLDER, writable=False)
    for name, target in _FILES.items():
        if Path(target).exists():
            yield Mount(str(etc / name), target, writable=False)
    for source in _code():
        yield Mount(source, source, writable=False)
    if share:
        yield Mount(share, share, writable=True)


def _is_own(path: str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in _MODES)


def _code() -> list[str]:
    """Folders with Python, its packages or this project that a host's own folders would hide; none is below another.

    Everything else of the machine is visible on the host anyway, with whatever is mounted below it.
    """
    paths = [sys.base_prefix, sys.prefix, str(Path(__file__).parents[2])]
    paths += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    resolved = {Path(path).resolve() for path in paths if Path(path).is_dir()}
    found = sorted(path for path in resolved if _is_own(str(path)))
    return [str(path) for path in found if not any(path.is_relative_to(other) for other in found if other != path)]


def _make_place(place: Path, is_folder: bool) -> None:
    if is_folder:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
