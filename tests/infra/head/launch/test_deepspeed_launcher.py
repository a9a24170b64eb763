"""From our command line, DeepSpeed's launcher starts exactly the chosen ranks, and pdsh uses only our ssh settings."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infra
from infra.head.hosts.hostfile import Host, Hosts, parse
from infra.head.hosts.ssh import Ssh
from infra.head.launch.deepspeed_launcher import launch_command, launcher_variables, require_launchable, write_hostfile
from infra.node.code_bundle import own_bundle
from infra.node.node_folders import code_folder
from t5train.errors import SpecError
from t5train.spec import ClusterSpec

EQUAL = parse("node1 slots=2\nnode2 slots=2\n", "hosts")
UNEQUAL = parse("node1 slots=1\nnode2 slots=2", "hosts")
CHOSEN = Hosts((Host("node2", (1, 3)), Host("node1", (0,))))
SHIPPED_CODE = code_folder(own_bundle().digest)
MASTER = ("10.0.0.1", 29500)
PROGRAM = ("infra.node.attempts.process_guard", "/nodes/folder", sys.executable, "-m", "t5train.train")
# Runs DeepSpeed's launcher up to the point where it would start srun, mpirun or pdsh.
UP_TO_THE_START = """
import json, sys
from deepspeed.launcher import runner

class Started:
    returncode = 0

    def __init__(self, argv, env):
        started.append({"argv": argv, "env": dict(env)})

    def wait(self):
        pass

started = []
runner.subprocess.Popen = Started
for argv in json.load(sys.stdin):
    runner.main(argv)
json.dump(started, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The command and environment that DeepSpeed's launcher would start, by the name of ``cluster.launcher``."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "bin").mkdir()
    for program in ("pdsh", "sinfo", "ompi_info"):
        (folder / "bin" / program).touch(mode=0o700)
    (folder / ".deepspeed_env").write_text("SECRET=$(touch pwned)\n")
    hosts = {"pdsh": CHOSEN, "slurm": EQUAL, "openmpi": EQUAL}
    commands = []
    for launcher, chosen in hosts.items():
        (folder / launcher).mkdir()
        write_hostfile(chosen, folder / launcher)
        commands.append(command(launcher, chosen, folder / launcher)[3:])
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"DS_ACCELERATOR": "cpu", **launcher_variables(folder)}
    arguments = [sys.executable, "-c", UP_TO_THE_START, folder / "started.json"]
    subprocess.run(arguments, check=True, input=json.dumps(commands).encode(), env=environment, cwd="/")
    return dict(zip(hosts, json.loads((folder / "started.json").read_text()), strict=True))


def command(launcher: Any, hosts: Hosts = EQUAL, folder: Path = Path("/nodes"), **cluster: Any) -> list[str]:
    spec = ClusterSpec(launcher=launcher, **cluster)
    return launch_command(spec, hosts, folder, master=MASTER, program=PROGRAM)


def word_after(argv: list[str], word: str) -> str:
    return argv[argv.index(word) + 1]


@pytest.mark.slow
def test_pdsh_starts_the_chosen_slots_in_the_order_of_the_hosts(started: dict[str, dict[str, Any]]) -> None:
    argv = started["pdsh"]["argv"]
    assert "SECRET" not in str([one["argv"] for one in started.values()]), "the user's .deepspeed_env adds nothing"
    assert word_after(argv, "-w") == "node2,node1"
    world = next(word for word in argv if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {"node2": [1, 3], "node1": [0]}
    assert {"--master_addr=10.0.0.1", "--master_port=29500", "--module"} <= set(argv)
    assert argv[-len(PROGRAM) :] == list(PROGRAM)


def test_srun_starts_a_rank_for_each_slot_on_the_chosen_hosts(started: dict[str, dict[str, Any]]) -> None:
    argv = started["slurm"]["argv"]
    assert argv[:7] == ["srun", "-n", "4", "--nodelist", "node1,node2", "--nodes", "2"]
    guard = str(Path(infra.__file__).parent / "node/attempts/process_guard.py")
    assert argv[8:] == [sys.executable, "-u", guard, *PROGRAM[1:]]


def test_mpirun_starts_a_rank_for_each_slot_of_the_hostfile(started: dict[str, dict[str, Any]]) -> None:
    argv = started["openmpi"]["argv"]
    assert argv[:3] == ["mpirun", "-n", "4"]
    assert Path(word_after(argv, "-hostfile")).read_text() == "node1 slots=2\nnode2 slots=2\n"
    assert argv[argv.index(sys.executable) :] == [sys.executable, "-u", "-m", *PROGRAM]


def test_every_launcher_starts_the_shipped_code() -> None:
    shipped_guard = f"{SHIPPED_CODE}/infra/node/attempts/process_guard.py"
    for launcher, program in (("pdsh", PROGRAM[0]), ("openmpi", PROGRAM[0]), ("slurm", shipped_guard)):
        argv = command(launcher, ship_code=True, hostfile=Path("hosts"))
        assert argv[:3] == ["env", f"PYTHONPATH={SHIPPED_CODE}", sys.executable]
        assert program in argv


@pytest.mark.parametrize(
    ("launcher", "hosts", "words"),
    [
        ("slurm", CHOSEN, r"can use only .* slots \(1, 3\) of node2 are chosen\. Set cluster.launcher to pdsh"),
        ("openmpi", CHOSEN, r"can use only .* slots \(1, 3\) of node2 are chosen"),
        ("slurm", UNEQUAL, r"slurm starts the same number of ranks .* slots: \[1, 2\]"),
    ],
)
def test_slots_that_a_launcher_cannot_select_are_refused(launcher: Any, hosts: Hosts, words: str) -> None:
    with pytest.raises(SpecError, match=rf"cluster\.launcher is '{launcher}', .*{words}"):
        command(launcher, hosts)


@pytest.mark.parametrize("word", ["", "a b", "$(reboot)", "`x`", "a;b", "'", '"', "%n", "a\\b", "a\n", "*", "~"])
def test_a_word_that_a_shell_or_pdsh_would_change_is_refused(word: str) -> None:
    with pytest.raises(SpecError, match="is passed to a shell on every host"):
        launch_command(ClusterSpec(), EQUAL, Path("/nodes/folder"), master=MASTER, program=(*PROGRAM, word))


def test_a_python_path_that_a_shell_would_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/my programs/python")
        with pytest.raises(SpecError, match=r"/my programs/python. is passed to a shell .* Install Python and"):
            require_launchable(ClusterSpec(), EQUAL)
    monkeypatch.setenv("PYTHONPATH", "/a:/$(reboot)")
    with pytest.raises(SpecError, match=r"'/a:/\$\(reboot\)' is passed to a shell"):
        require_launchable(ClusterSpec(), EQUAL)


def test_pdsh_uses_only_our_ssh_configuration(sshd: Callable[..., Ssh]) -> None:
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh on this machine: apt-get install pdsh")
    environment = {"PATH": os.environ["PATH"], **launcher_variables(sshd().config.parent)}

    def pdsh(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["pdsh", "-S", "-w", *arguments], check=False, capture_output=True, env=environment)

    result = pdsh("localhost,127.0.0.1", "echo %n")
    assert sorted(result.stdout.splitlines()) == [b"127.0.0.1: 1", b"localhost: 0"]
    sshd(known="another")
    refused = pdsh("localhost", "echo ran")
    assert (refused.returncode, refused.stdout) == (255, b"")
    assert b"IDENTIFICATION HAS CHANGED" in refused.stderr
