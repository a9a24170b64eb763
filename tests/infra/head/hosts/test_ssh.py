"""Commands on other machines get exactly their arguments, end in time, and fail with errors that name a remedy."""

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.head.hosts import ssh as ssh_module
from infra.head.hosts.nodes import ask, connection
from infra.head.hosts.ssh import Ssh, Transport, failure_of_ssh, quoted, ssh_config
from infra.node import processes
from t5train.errors import HostError, HostKeyMismatch, HostTimeout, HostUnreachable, RemoteFailed, SpecError
from t5train.spec import ClusterSpec
from tests.infra.conftest import Until

HERE = "127.0.0.1"
PRINT_ARGUMENTS = ("printf", r"%s\0")
SPECIAL_ARGUMENTS = ["", " ", "a  b", "'", '"', "$(touch pwned)", "`x`", "\\", "!!", "~", "*", "-n", "%n", "a\nb\r"]
SPECIAL_ARGUMENTS += ["\udcff", "A=b"]
Sshd = Callable[..., Ssh]


@dataclass(frozen=True)
class Name:
    """A question, and its answer."""

    host: str


def run(transport: Transport, host: str, argv: Sequence[str]) -> None:
    """Run a command on one host, which is to fail. Raises its error."""
    answer = ask(transport, argv, {host: Name(host)}, Name, 60)[host]
    assert isinstance(answer, HostError)
    raise answer


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


def test_ssh_passes_arguments_input_and_output_unchanged(sshd: Sshd) -> None:
    ssh = sshd()
    printed = b"".join(os.fsencode(argument) + b"\0" for argument in SPECIAL_ARGUMENTS)
    with connection(ssh, HERE, [*PRINT_ARGUMENTS, *SPECIAL_ARGUMENTS]) as channel:
        assert channel.read(len(printed)) == printed
    every_byte = bytes(range(256)) * 999
    with connection(ssh, HERE, ["cat"]) as channel:
        channel.send(Name(HERE), every_byte)
        assert channel.receive(Name) == Name(HERE)
        assert channel.read(len(every_byte)) == every_byte


def test_no_environment_variable_of_this_machine_is_sent(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_TOKEN", "s3cret")  # Debian's ssh sends it by default, and this server accepts it
    found = subprocess.run(sshd().command(HERE, ["env"]), check=True, capture_output=True).stdout
    assert b"s3cret" not in found
    assert b"LC_T5_PRETRAIN=1" in found


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
    run_id = secrets.token_hex(8)
    script = 'read line; case $line in *localhost*) trap "" TERM;; esac; echo begun >&2; sleep 600'
    hanging = ["env", f"{processes.RUN_ID_VARIABLE}={run_id}", "sh", "-c", script]
    seconds = 10  # enough for it to start on a busy machine
    questions = {host: Name(host) for host in (HERE, "localhost")}
    for host, error in ask(sshd(), hanging, questions, Name, seconds).items():
        assert isinstance(error, HostTimeout)
        assert re.search(rf"^{host}: .* timed out after 10 s\. .* last output: begun", str(error))
    until(lambda: not processes.find(processes.in_run(run_id)))


def test_a_machine_without_ssh_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnreachable, match=r"ssh is not installed on this machine\. Install openssh-client"):
        run(Ssh(tmp_path / "config"), "node1", ["true"])


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


@pytest.mark.parametrize("name", ["absent", 'a"b', "a%b", "${HOME}"])
def test_a_known_hosts_path_that_ssh_cannot_use_is_refused(name: str, tmp_path: Path) -> None:
    if name != "absent":
        (tmp_path / name).touch()
    with pytest.raises(SpecError, match=r"cluster\.known_hosts is "):
        ssh_config(ClusterSpec(known_hosts=tmp_path / name))
