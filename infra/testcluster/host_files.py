"""What a host finds on its disk: ssh keys and settings, and the files of the machine that it may read.

Every host has its host key, the head a key that opens all, and host keys are checked strictly.
"""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from infra.node.operator_folder import VARIABLE, operator_folder
from infra.testcluster import network
from infra.testcluster.host_init import Mount

SERVER = "/usr/sbin/sshd"
NODE_FOLDER = "/run/testcluster"
"""Where a host finds what is below its ``etc``."""
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
    """Make a new key pair, in place of one that is there."""
    for old in (path, path.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.parent.name, "-f", path], check=True)


def write_server(etc: Path, user_key: Path) -> None:
    """What a host's sshd reads; a host key that it has stays."""
    (etc / "sshd_config").write_text(_CONFIG, "utf-8")
    (etc / "authorized_keys").write_bytes(user_key.with_suffix(".pub").read_bytes())
    # An account that is locked, as root's is on a laptop, would not be let in without PAM.
    (etc / "shadow").touch(0o600)
    (etc / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n", "utf-8")
    if not (etc / "host_key").exists():
        make_key(etc / "host_key")


def write_client(disk: Path, user_key: Path) -> None:
    """Root's .ssh on the disk of the head."""
    folder = disk / "root" / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "id_ed25519"
    key.touch(0o600)
    key.write_bytes(user_key.read_bytes())
    (folder / "config").write_text("Host *\n    StrictHostKeyChecking yes\n", "utf-8")


def write_known_hosts(disk: Path, keys: dict[str, Path]) -> None:
    """Tell the head, whose disk it is, the host keys of all."""
    lines = []
    for host, key in keys.items():
        kind, text = key.with_suffix(".pub").read_text("utf-8").split()[:2]
        lines.append(f"{host},{network.address(host)} {kind} {text}\n")
    (disk / "root" / ".ssh" / "known_hosts").write_text("".join(lines), "utf-8")


HOME = "/root"
"""Of the user that a host has."""
HOSTFILE = f"{HOME}/hosts"
"""On the head: all nodes, with a slot each."""
ROOT = f"{HOME}/t5"
"""On the head, of runs whose hosts share nothing."""
_MODES = {"/tmp": 0o1777, "/var/tmp": 0o1777, HOME: 0o700, "/home": 0o755, "/run": 0o755}  # noqa: S108 - the host's own
"""Folders of a host's own, besides /dev/shm."""
_FILES = {
    "hosts": "/etc/hosts",
    "hostname": "/etc/hostname",
    "machine-id": "/etc/machine-id",
    "boot_id": "/proc/sys/kernel/random/boot_id",
    "shadow": "/etc/shadow",
}
"""Files below a host's ``etc``, and where the host has them."""
OPERATORS = f"{HOME}/.cache/torch_extensions"
"""Where a host looks for compiled operators."""
_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH")


def environment() -> dict[str, str]:
    """Of commands on a host: this Python first on PATH, and the code and operators that this process uses."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    kept = {name: os.environ[name] for name in _KEPT if os.environ.get(name)}
    return {"PATH": path, "HOME": HOME, "USER": "root", "LANG": "C.UTF-8", VARIABLE: OPERATORS, **kept}


def make_disk(disk: Path) -> None:
    """An empty disk, but for a copy of DeepSpeed's compiled operators, so that no host compiles them."""
    for folder, mode in _MODES.items():
        (disk / folder[1:]).mkdir(parents=True, exist_ok=True)
        (disk / folder[1:]).chmod(mode)
    compiled = operator_folder()
    if compiled.is_dir():  # a lock would be one that nobody holds; files' times tell ninja that they are new
        shutil.copytree(compiled, disk / OPERATORS[1:], ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)


def write_etc(etc: Path, host: str, hosts: list[str]) -> None:
    """The host's name, those of others, and ids: the machine's stays, the boot's is another each time."""
    lines = ["127.0.0.1 localhost\n", *(f"{network.address(name)} {name}\n" for name in hosts)]
    (etc / "hosts").write_text("".join(lines), "utf-8")
    (etc / "hostname").write_text(f"{host}\n", "utf-8")
    (etc / "boot_id").write_text(f"{uuid.uuid4()}\n", "utf-8")
    if not (etc / "machine-id").exists():
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n", "utf-8")


def prepare(disk: Path, etc: Path, share: str | None) -> list[Mount]:
    """What is to be mounted in a host; makes the places that lie on its disk. /run is new at every boot."""
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
    """Folders with Python, its packages and this project that a host's own hide, none of them below another.

    All else is there already, with whatever is mounted below it.
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
