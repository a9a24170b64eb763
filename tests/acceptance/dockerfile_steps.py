"""Execute the steps of the Dockerfile in a chroot, and train in it as its user: Docker is not needed, but root is.

::

    unshare --mount python -m tests.acceptance.dockerfile_steps --into DIR [--bind FOLDER_OR_FILE] ...

DIR becomes the image's file system; debootstrap makes Debian in it if it is empty. Mounts go with the namespace.
Variables PIP_* are passed on to the steps; --bind shows a file or folder of this machine at the same path, for instance
one that pip is configured with. The steps use the network of this machine.

Then, as the image's user: the image's entry point trains `smoke` to a published model; a second run gets the stop
signal while it trains, and must end with a checkpoint; sshd starts with the configuration of the Kubernetes example.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.support.waiting import await_that

CHECKOUT = Path(__file__).parents[2]
DOCKERFILE = CHECKOUT / "deployments" / "docker" / "Dockerfile"
SEVERAL_HOSTS = CHECKOUT / "deployments" / "kubernetes" / "several-hosts.yaml"
SHORT = ["--set=optimizer.num_steps=30", "--set=optimizer.warmup_steps=10", "--set=storage.validate_sequences=32"]
LONG = ["--name=stopped", "--set=optimizer.num_steps=4000", "--set=storage.checkpoint_every_steps=4000"]


class Image(NamedTuple):
    """What a container of the image starts with."""

    root: Path
    environment: dict[str, str]
    user: str
    folder: str
    entrypoint: list[str]
    stop_signal: str


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile that has no continued lines and no heredocs."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def build(root: Path) -> Image:
    """Execute the steps one after the other in ``root``."""
    image = Image(root, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "root", "/", [], "SIGTERM")
    for name, rest in instructions(DOCKERFILE.read_text()):
        started = time.monotonic()
        image = _step(image, name, rest)
        print(f"{time.monotonic() - started:6.1f} s  {name} {rest[:100]}", flush=True)
    return image


def _step(image: Image, name: str, rest: str) -> Image:
    match name:
        case "FROM":
            _require(rest == "debian:bookworm-slim", f"FROM {rest}: only Debian bookworm can be made here")
        case "RUN":
            subprocess.run(command(image, ["sh", "-c", rest]), check=True)
        case "COPY":
            _require(rest == ". .", f"COPY {rest}: only `COPY . .` is understood")
            _copy(image.root / image.folder.lstrip("/"))
        case "ENV":
            key, _, value = rest.partition("=")
            return image._replace(environment=image.environment | {key: value})
        case "WORKDIR":
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return image._replace(folder=rest)
        case "USER":
            return image._replace(user=rest)
        case "STOPSIGNAL":
            return image._replace(stop_signal=rest)
        case "ENTRYPOINT":
            return image._replace(entrypoint=[str(word) for word in yaml.safe_load(rest)])
        case _:
            raise SystemExit(f"{name}: an instruction that this program does not know")
    return image


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(otherwise)


def _copy(target: Path) -> None:
    """Copy the tracked files: what .dockerignore names is never among them."""
    listed = subprocess.run(["git", "-C", str(CHECKOUT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target / name)


def command(image: Image, argv: list[str]) -> list[str]:
    """Return the command line that runs ``argv`` in the image, as its user and with its environment only."""
    from_here = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    home = {"HOME": "/root" if image.user == "root" else f"/home/{image.user}"}
    variables = [f"{key}={value}" for key, value in (from_here | home | image.environment).items()]
    entered = f"cd {shlex.quote(image.folder)} && exec {shlex.join(argv)}"
    return ["chroot", f"--userspec={image.user}", str(image.root), "env", "-i", *variables, "sh", "-c", entered]


def mount(root: Path, bound: list[Path]) -> None:
    """Mount what a container has, and what is bound, in this process's mount namespace."""
    _run("mount", "--make-rprivate", "/")
    _run("mount", "--bind", str(root), str(root))
    for kind, folder in (("proc", "proc"), ("tmpfs", "dev/shm")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        if folder == "dev/shm":
            _run("mount", "--rbind", "/dev", str(root / "dev"))
        _run("mount", "-t", kind, kind, str(root / folder))
    for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"), *bound):
        target = root / str(path).lstrip("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _run("mount", "--bind", "-o", "ro", str(path), str(target))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def train_to_publication(image: Image) -> None:
    """Run the entry point to a published model."""
    argv = command(image, [*image.entrypoint, "run", "smoke", *SHORT])
    said = subprocess.run(argv, text=True, check=True, stdout=subprocess.PIPE).stdout
    _require("published" in said.splitlines()[-1], f"the run did not end with a published model: {said[-500:]}")


def stop_while_training(image: Image) -> None:
    """Send the stop signal to a run as Docker does: to the first process only."""
    process = subprocess.Popen(command(image, [*image.entrypoint, "run", "smoke", *LONG]))
    folder = image.root / image.folder.lstrip("/") / "work/runs/stopped"
    await_that((folder / "metrics.jsonl").exists, 180)
    process.send_signal(getattr(signal, image.stop_signal))  # chroot, env and sh have become tini by now
    code = process.wait(120)
    saved = [path.name for path in (folder / "checkpoints").glob("step-*")]
    _require(code == 130 and len(saved) == 1, f"the run ended with {code}, and has the checkpoints {saved}")


def start_sshd(image: Image) -> None:
    """Start sshd with the Kubernetes example's configuration, and log in with the keys that its comment makes."""
    documents = yaml.safe_load_all(SEVERAL_HOSTS.read_text())
    configuration = next(each["data"]["sshd_config"] for each in documents if each["kind"] == "ConfigMap")
    keys = image.root / "keys"
    shutil.rmtree(keys, ignore_errors=True)
    keys.mkdir()
    (keys / "sshd_config").write_text(configuration)
    for name in ("user_key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
    shutil.copy(keys / "user_key.pub", keys / "authorized_keys")
    kind, key = (keys / "host_key.pub").read_text().split()[:2]
    (keys / "known_hosts").write_text(f"[127.0.0.1]:2222 {kind} {key}\n")
    for path in keys.iterdir():
        os.chown(path, 0, 1000)
        path.chmod(0o440)  # as the kubelet does for fsGroup
    sshd = subprocess.Popen(command(image, ["tini", "--", "/usr/sbin/sshd", "-D", "-e", "-f", "/keys/sshd_config"]))
    login = ["ssh", "-i", "/keys/user_key", "-p", "2222", "-o", "UserKnownHostsFile=/keys/known_hosts"]
    strict = ["-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "127.0.0.1", "t5-pretrain --version"]
    try:
        await_that(lambda: subprocess.run(command(image, [*login, *strict]), check=False).returncode == 0, 20)
    finally:
        sshd.terminate()
        sshd.wait(10)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--into", type=Path, required=True)
    made.add_argument("--bind", type=Path, action="append", default=[])
    given = made.parse_args()
    root = given.into.absolute()
    if not (root / "etc/debian_version").exists():
        _run("debootstrap", "--variant=minbase", "bookworm", str(root))
    mount(root, given.bind)
    image = build(root)
    for trial in (train_to_publication, stop_while_training, start_sshd):
        started = time.monotonic()
        trial(image)
        print(f"{time.monotonic() - started:6.1f} s  {(trial.__doc__ or '').splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
