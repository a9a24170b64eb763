import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.ssh import Ssh
from infra.node import node_folders, processes
from infra.node.__main__ import ACTIONS
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.ports import free_port
from infra.node.processes import ProcessIdentity
from t5train.spec import ClusterSpec
from tests.support.prepared_python import prepared_python
from tests.support.simulated_nodes import LocalHosts, Site

Start = Callable[..., subprocess.Popen[bytes]]
Until = Callable[..., None]
Survivors = Callable[[str], set[int]]


@pytest.fixture
def this(tmp_path: Path) -> Attempt:
    """An attempt whose head is the test itself."""
    return attempt.begin(tmp_path / "run", ProcessIdentity.of(os.getpid()))


@pytest.fixture
def over_hosts(tmp_path: Path) -> Attempt:
    """An attempt with a rank on each of two hosts."""
    return attempt.begin(tmp_path / "run", None, lease_seconds=60.0, hosts={"node1": (0,), "node2": (0,)})


@pytest.fixture
def own_node_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the node folder of this machine in ``tmp_path``."""
    monkeypatch.setattr(node_folders, "PARENT", tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python with the given arguments; the test leaves no such process behind."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / "output.txt", "ab") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, *arguments], stdout=output, stderr=output, env={**os.environ, **environment}
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_guard(this: Attempt, start: Start) -> Start:
    """Guards a Python program as rank 0 of the attempt."""

    def start_guard(program: str) -> subprocess.Popen[bytes]:
        arguments = ("-m", "infra.node.attempts.process_guard", str(this.folder), sys.executable, "-c", program)
        return start(*arguments, RANK="0", T5_RUN_ID=this.run_id)

    return start_guard


@pytest.fixture
def until() -> Until:
    """Waits for a condition, and fails the test if it does not come."""

    def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in {seconds} s"
            time.sleep(0.02)

    return until


@pytest.fixture
def survivors() -> Survivors:
    """Pids of the living processes of a run id."""
    return lambda run_id: processes.find(processes.in_run(run_id))


@pytest.fixture
def running(this: Attempt, start_guard: Start, until: Until) -> Start:
    """Start a guard and wait until its rank prints that it is ready."""

    def running(program: str) -> subprocess.Popen[bytes]:
        guard = start_guard(program)
        until(lambda: this.log("rank-00000").exists() and b"ready" in this.log("rank-00000").read_bytes())
        until((this.folder / "rank-00000.pid").exists)
        return guard

    return running


@pytest.fixture
def local_hosts(tmp_path: Path, python_of_nodes: str) -> LocalHosts:
    (tmp_path / "hosts").mkdir()
    return LocalHosts(tmp_path / "hosts", python_of_nodes)


@pytest.fixture(scope="session")
def python_of_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python that has imported the modules of most actions."""
    modules = dict.fromkeys(each.partition(":")[0] for each in ACTIONS.values() if not re.search("inspe|tokeni", each))
    with prepared_python(tmp_path_factory.mktemp("nodes"), [*modules, "infra.node.__main__"], {}) as python:
        yield python


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Callable[..., Ssh]]:
    """Makes an ssh client for a server of this test's own on loopback, at a free port.

    ``known`` is whose key the client knows for the server's, ``identity`` by which key it comes.
    """
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None:
        pytest.skip("no sshd on this machine: apt-get install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as its service makes it
    for name in ("host", "user", "another"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    settings = {"Port": free_port(), "ListenAddress": "127.0.0.1", "HostKey": tmp_path / "host"}
    settings |= {"AuthorizedKeysFile": tmp_path / "user.pub", "AcceptEnv": "*", "PidFile": "none"}
    settings |= {"StrictModes": "no", "UsePAM": "no", "PasswordAuthentication": "no", "PermitRootLogin": "yes"}
    (tmp_path / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    process = subprocess.Popen([server, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    while b"listening" not in process.stderr.readline():
        assert process.poll() is None, "sshd does not start"

    def client(known: str | None = "host", identity: str = "user") -> Ssh:
        names = ",".join(f"[{name}]:{settings['Port']}" for name in ("127.0.0.1", "localhost"))
        (tmp_path / "known_hosts").write_text(f"{names} {(tmp_path / f'{known}.pub').read_text()}" if known else "")
        ssh = Ssh.configured(ClusterSpec(ssh_port=settings["Port"], known_hosts=tmp_path / "known_hosts"), tmp_path)
        with open(ssh.config, "a") as config:
            config.write(f"IdentityFile {tmp_path / identity}\nIdentitiesOnly yes\n")
        return ssh

    yield client
    process.kill()
    process.communicate()


@pytest.fixture
def site(tmp_path: Path, local_hosts: Any) -> Site:
    """Two nodes."""
    return Site(tmp_path, local_hosts, "ab")


@pytest.fixture
def make_site(tmp_path: Path, local_hosts: Any) -> Callable[[str], Site]:
    return lambda hosts: Site(tmp_path, local_hosts, hosts)
