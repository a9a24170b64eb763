"""Commands on other machines get exactly their arguments, end in time, and fail with errors that name a remedy."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.head.hosts import code_shipping, node_client
from infra.head.hosts import ssh as ssh_module
from infra.head.hosts.ssh import Output, Ssh, Transport, quoted, run_everywhere, ssh_config
from infra.head.hosts.ssh_errors import failure_of_ssh
from infra.node import processes
from infra.node.node_folders import node_path
from t5train.errors import HostError, HostKeyMismatch, HostTimeout, HostUnreachable, RemoteFailed, SpecError
from t5train.spec import ClusterSpec
from tests.infra.conftest import Until
from tests.support.waiting import await_that

HERE = "127.0.0.1"
PRINT_ARGUMENTS = ("printf", r"%s\0")
SPECIAL_ARGUMENTS = ["", " ", "a  b", "'", '"', "$(touch pwned)", "`x`", "\\", "!!", "~", "*", "-n", "%n", "a\nb\r"]
SPECIAL_ARGUMENTS += ["\udcff", "A=b"]
Sshd = Callable[..., Ssh]


@dataclass(frozen=True)
class Shell:
    """A host that is a shell of this machine."""

    shell: str = "sh"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
        return [self.shell, "-c", quoted(argv)]


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash", "zsh", "dash", "ksh") if shutil.which(shell)])
@given(arguments=st.lists(st.binary().map(lambda text: os.fsdecode(text.replace(b"\0", b""))), min_size=1, max_size=5))
def test_a_shell_splits_a_quoted_line_into_exactly_the_arguments(shell: str, arguments: list[str]) -> None:
    line = quoted([*PRINT_ARGUMENTS, *arguments])
    output = subprocess.run([shell, "-c", line], check=True, capture_output=True).stdout
    assert output == b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


@pytest.mark.parametrize("name", ["if", "A=b", "~", "-x", "a b", "$(x)", "time"])
def test_the_first_word_runs_as_a_program_even_if_it_is_shell_syntax(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("#!/bin/sh\necho it ran\n")
    (tmp_path / name).chmod(0o700)
    shell = ["/bin/sh", "-c", quoted([name])]
    assert subprocess.run(shell, check=False, capture_output=True, env={"PATH": str(tmp_path)}).stdout == b"it ran\n"


def run(transport: Transport, host: str, argv: Sequence[str], stdin: bytes = b"") -> Output:
    """The output of a command on one host. Raises its error."""
    replies = run_everywhere(transport, [host], argv, stdin_of=lambda _: stdin, deadline_seconds=60)
    if isinstance(reply := replies[host], HostError):
        raise reply
    return reply


def test_ssh_passes_arguments_input_and_output_unchanged(sshd: Sshd) -> None:
    ssh = sshd()
    printed = run(ssh, HERE, [*PRINT_ARGUMENTS, *SPECIAL_ARGUMENTS]).stdout.split(b"\0")
    assert [os.fsdecode(each) for each in printed[:-1]] == SPECIAL_ARGUMENTS
    every_byte = bytes(range(256)) * 999
    assert run(ssh, HERE, ["cat"], stdin=every_byte).stdout == every_byte


def test_no_environment_variable_of_this_machine_is_sent(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_TOKEN", "s3cret")  # Debian's ssh sends it by default, and this server accepts it
    assert b"s3cret" not in run(sshd(), HERE, ["env"]).stdout


def test_a_changed_host_key_is_refused_with_the_command_that_removes_the_old_one(sshd: Sshd, tmp_path: Path) -> None:
    ssh = sshd(known="another")
    with pytest.raises(HostKeyMismatch, match=r"its host key has changed\. .*`ssh-keygen -R '\[127\.0\.0\.1\]:\d+'`"):
        run(ssh, HERE, ["touch", str(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


def test_a_name_that_leads_to_another_known_host_is_refused_and_no_key_removed(sshd: Sshd, tmp_path: Path) -> None:
    ssh = sshd(known="another")
    with open(tmp_path / "known_hosts", "a") as known_hosts:
        known_hosts.write(f"node2 {(tmp_path / 'host.pub').read_text()}")
    with pytest.raises(HostKeyMismatch, match=f"^{HERE}: the machine that answers has the host key of node2") as raised:
        run(ssh, HERE, ["true"])
    assert "ssh-keygen -R" not in str(raised.value)


def test_an_unknown_host_key_is_refused_with_the_command_that_adds_it(sshd: Sshd) -> None:
    with pytest.raises(HostKeyMismatch, match=r"`ssh-keyscan -p \d+ 127\.0\.0\.1 >> ~/\.ssh/known_hosts`"):
        run(sshd(known=None), HERE, ["true"])


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HERE, r"connection refused\. Start sshd there"),
        ("no-such-host.invalid", r"its name does not resolve\. Correct the hostfile"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_a_remedy(host: str, words: str, tmp_path: Path) -> None:
    ssh = Ssh.configured(ClusterSpec(ssh_port=1), tmp_path)
    with pytest.raises(HostUnreachable, match=f"{host}: {words}.* ssh said: ssh: "):
        run(ssh, host, ["true"])


def add_users_settings(ssh: Ssh, settings: str) -> None:
    """Have the client read these settings where it reads ~/.ssh/config."""
    users = ssh.config.with_name("users")
    users.write_text(f"{settings}\n")
    ssh.config.write_text(ssh.config.read_text().replace("Include ~/.ssh/config", f"Include {users}"))


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ("Ciphers 3des-cbc", r"ssh's configuration on this machine does not suit .* ssh said: Unable to negotiate"),
        ("BindAddress 192.0.2.1", r"ssh's configuration on this machine does not suit .* ssh said: bind 192\.0\.2\.1"),
        ("ProxyCommand /no/such/program", r"the jump host or proxy command of ssh's configuration does not lead to it"),
        (
            "HostName 127.0.0.1\nUserKnownHostsFile /dev/null",
            r"`ssh-keyscan -p \d+ 127\.0\.0\.1 >> .*UserKnownHostsFile\)",
        ),
    ],
)
def test_a_setting_of_the_user_that_prevents_a_connection_is_named(users: str, words: str, sshd: Sshd) -> None:
    ssh = sshd(known=None) if "HostName" in users else sshd()
    add_users_settings(ssh, users)
    with pytest.raises(HostError, match=words):
        run(ssh, "node1" if "HostName" in users else HERE, ["true"])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Received disconnect: Too many authentication failures", "IdentitiesOnly yes"),
        ("root@node1: Permission denied (publickey).", "ssh-add"),
        ("Connection timed out during banner exchange", "its port accepted the connection, but sshd did not answer"),
        ("bash: line 1: exec: nc: not found\nkex_exchange_identification: x", "Correct ProxyJump or ProxyCommand"),
        ("zsh:1: permission denied: ./proxy\nkex_exchange_identification: x", "Correct ProxyJump or ProxyCommand"),
    ],
)
def test_the_remedy_fits_what_ssh_said(said: str, words: str) -> None:
    assert words in str(failure_of_ssh("node1", said.encode()))


def test_a_host_name_that_looks_like_an_ssh_option_runs_no_command(tmp_path: Path) -> None:
    ssh = Ssh.configured(ClusterSpec(), tmp_path)
    with pytest.raises(HostUnreachable):
        run(ssh, f"-oProxyCommand=touch {tmp_path}/ran", ["true"])
    assert not (tmp_path / "ran").exists()


# Kills the server of the connection: the next sshd among the parents of the shell.
KILL = 'p=$PPID; until grep -q ^sshd /proc/$p/comm; do p=$(cut -d" " -f4 /proc/$p/stat); done; kill -9 $p'


@pytest.mark.parametrize(
    ("identity", "argv", "error", "words"),
    [
        ("host", ["true"], HostUnreachable, r"rejects this user's SSH keys\. Run `ssh-copy-id 127\.0\.0\.1`"),
        ("user", ["sh", "-c", "echo bad >&2; exit 3"], RemoteFailed, r"ended with exit code 3\. .* last output: bad"),
        ("user", ["/nowhere/python"], RemoteFailed, r"code 127\. Install Python and this package there"),
        ("user", ["sh", "-c", KILL], HostUnreachable, r"the connection was lost.* ssh said: .*closed"),
    ],
)
def test_a_command_that_fails_is_reported_with_what_it_or_ssh_said(
    sshd: Sshd, identity: str, argv: list[str], error: type[HostError], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(sshd(identity=identity), HERE, argv)


def test_a_command_that_hangs_is_also_ended_on_the_host(sshd: Sshd, until: Until) -> None:
    run_id, trap = secrets.token_hex(8), {HERE: b"", "localhost": b"trap '' TERM"}
    script = 'read trap; eval "$trap"; echo begun >&2; sleep 600'
    hanging = ["env", f"{processes.RUN_ID_VARIABLE}={run_id}", "sh", "-c", script]
    replies = run_everywhere(
        *(sshd(), [*trap], hanging),
        stdin_of=lambda host: trap[host] + b"\n",
        deadline_seconds=10,  # enough for it to start on a busy machine
    )
    for host, reply in replies.items():
        assert isinstance(reply, HostTimeout)
        assert re.search(rf"^{host}: .* timed out after 10 s\. .* last output: begun", str(reply))
    until(lambda: not processes.find(processes.in_run(run_id)))


def test_all_hosts_are_asked_in_parallel_and_replies_keep_their_order(tmp_path: Path) -> None:
    hosts = [f"node{number}" for number in range(64)]
    seen: list[tuple[str, threading.Thread]] = []
    script = 'read line; touch "$line"; until test -e all; do sleep 0.2; done; test "$line" != node7 && echo "$line"'

    def release_all() -> None:
        await_that(lambda: len(list(tmp_path.iterdir())) == len(hosts))
        (tmp_path / "all").touch()

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release_all)
        replies = run_everywhere(
            Shell(),
            hosts,
            ["env", "-C", str(tmp_path), "sh", "-c", script],
            stdin_of=lambda host: f"{host}\n".encode(),
            deadline_seconds=600,
            on_reply=lambda host, _reply: seen.append((host, threading.current_thread())),
        )
    released.result()
    assert list(replies) == hosts
    assert isinstance(replies.pop("node7"), RemoteFailed)
    assert all(isinstance(reply, Output) and reply.stdout == f"{host}\n".encode() for host, reply in replies.items())
    assert {host for host, _ in seen} == set(hosts)
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_running_commands_are_ended_when_the_caller_is_interrupted(sshd: Sshd) -> None:
    def interrupt(host: str, _reply: ssh_module.Reply) -> None:
        assert host == HERE
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_everywhere(
            sshd(),
            [HERE, "localhost"],
            ["sh", "-c", 'read line; test "$line" = 127.0.0.1 || sleep 600'],
            stdin_of=lambda host: f"{host}\n".encode(),
            deadline_seconds=600,
            on_reply=interrupt,
        )
    assert time.monotonic() - started < 300


def test_a_machine_without_ssh_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnreachable, match=r"ssh is not installed on this machine\. Install openssh-client"):
        run(Ssh(tmp_path / "config"), "node1", ["true"])


def test_the_node_program_runs_with_absolute_paths_and_shipped_code_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:some/where")
    path = f"PYTHONPATH={Path.cwd()}:{Path.cwd()}/some/where"
    assert node_client.node_command("facts", None) == [
        *("env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", path, sys.executable, "-m", "infra.node", "facts")
    ]
    checkout = Path(code_shipping.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{checkout}:/torch")
    paths = [word for word in node_client.node_command("facts", "c0de") if word.startswith("PYTHONPATH=")]
    assert paths == [f"PYTHONPATH={node_path('code', 'c0de')}:/torch"]
    monkeypatch.delenv("PYTHONPATH")
    assert not any(word.startswith("PYTHONPATH") for word in node_client.node_command("facts", None))


def test_a_missing_package_is_distinguished_from_a_missing_python() -> None:
    missing = b"/usr/bin/python3: Error while finding module specification for 'infra.node' (No module named 'infra')"
    assert "or have its code sent with --ship-code" in str(ssh_module.failure_of("a", ["python"], 1, missing))
    assert "--ship-code" not in str(ssh_module.failure_of("a", ["python"], 1, b"No module named 'infrared'"))
    assert "at the same paths as here. The" in str(ssh_module.failure_of("a", ["python"], 127, b"python: not found"))


@given(lease_seconds=st.floats(5, 1e6))
def test_a_silent_connection_is_closed_about_when_the_lease_expires(lease_seconds: float) -> None:
    lines = dict(line.split(" ", 1) for line in ssh_config(ClusterSpec(lease_seconds=lease_seconds)).splitlines())
    silent = int(lines["ServerAliveInterval"]) * int(lines["ServerAliveCountMax"])
    assert lease_seconds <= silent <= 1.4 * lease_seconds + 1


# Settings of a user that would break every connection, disturb some, or make them less safe, and what ssh -G must show.
DISTURBING = {
    "StrictHostKeyChecking no": "stricthostkeychecking true",  # what a user may have set, and what is in force
    "ForwardAgent yes": "forwardagent no",
    "User root": "user trainer",
    "StdinNull yes": "stdinnull no",
    "SessionType none": "sessiontype default",
    "ForkAfterAuthentication yes": "forkafterauthentication no",
    "RemoteCommand x": None,
    "RequestTTY force": "requesttty false",
    "ControlMaster auto": "controlmaster false",
    "ControlPath /tmp/%C": None,
    "PermitLocalCommand yes": "permitlocalcommand no",
    "ForwardX11 yes": "forwardx11 no",
    "Tunnel yes": "tunnel false",
    "VisualHostKey yes": "visualhostkey no",
    "LogLevel QUIET": "loglevel INFO",
    "LogVerbose *": "logverbose none",
    "BatchMode no": "batchmode yes",
    "EscapeChar ~": "escapechar none",
    "AddKeysToAgent ask": "addkeystoagent false",
    "NoHostAuthenticationForLocalhost yes": "nohostauthenticationforlocalhost no",
    "LocalForward 7000 x:7000": None,
    "SetEnv PYTHONHOME=/nowhere": "setenv LC_T5_PRETRAIN=1",
    "ExitOnForwardFailure yes": "exitonforwardfailure no",
}


def test_no_setting_of_the_user_weakens_security_or_disturbs_commands_or_their_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh on this machine: apt-get install openssh-client")
    with monkeypatch.context() as without_ssh:  # What one ssh knows is not what another does.
        without_ssh.setenv("PATH", str(tmp_path))
        ssh_config(ClusterSpec())
    (tmp_path / "users").write_text("".join(f"{line}\n" for line in DISTURBING))
    (tmp_path / "known hosts").touch()
    cluster = ClusterSpec(ssh_user="trainer", ssh_port=2222, known_hosts=tmp_path / "known hosts")
    config = tmp_path / "config"
    config.write_text(ssh_config(cluster).replace("Include ~/.ssh/config", f"Include {tmp_path}/users"))
    output = subprocess.run(["ssh", "-G", "-F", config, "node1"], check=True, capture_output=True, text=True).stdout
    found = set(output.splitlines())
    shown = {line.partition(" ")[0] for line in found}
    for setting, expected in DISTURBING.items():
        if expected is not None:
            assert expected in found, setting
        elif not setting.startswith("LocalForward"):  # ssh shows it, but sets up none: see ClearAllForwardings
            assert setting.partition(" ")[0].lower() not in shown
    assert {"clearallforwardings yes", "port 2222", f"userknownhostsfile {tmp_path}/known hosts"} <= found


def test_a_connection_that_a_busy_sshd_drops_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        """A host whose sshd drops the first two connections."""

        def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
            said = "kex_exchange_identification: Connection closed by remote host"
            script = f'echo x >> "$1"; test $(wc -l < "$1") -gt "$2" || {{ echo "{said}" >&2; exit 255; }}; cat'
            return ["sh", "-c", script, "sh", str(tmp_path / "tries"), limit]

    monkeypatch.setattr("infra.head.hosts.ssh._RETRY_SECONDS", (0.0, 0.0))
    limit = "2"
    assert run(Busy(), "node1", ["x"], stdin=b"hello").stdout == b"hello"
    limit = "1000"
    with pytest.raises(HostUnreachable, match=r"node1: sshd there closed .* MaxStartups .* ssh said: kex_exchange_id"):
        run(Busy(), "node1", ["x"])


@pytest.mark.parametrize("name", ["absent", 'a"b', "a%b", "${HOME}"])
def test_a_known_hosts_path_that_ssh_cannot_use_is_refused(name: str, tmp_path: Path) -> None:
    if name != "absent":
        (tmp_path / name).touch()
    with pytest.raises(SpecError, match=r"cluster\.known_hosts is "):
        ssh_config(ClusterSpec(known_hosts=tmp_path / name))
