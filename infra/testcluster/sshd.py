"""Keys and settings of ssh: every host has its host key, the head a key that opens all, and the checks are strict."""

import subprocess
from pathlib import Path

from infra.testcluster import network

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
