"""The head's code reaches a host completely or not at all, and only once. Nothing but code can be sent this way."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.head.hosts.code_shipping import COMMAND, path_to, ship, shipped_code
from infra.head.hosts.nodes import node_command
from infra.node import code_bundle, code_receiver, node_folders
from infra.node.code_bundle import own_bundle
from infra.node.code_receiver import Delivery, Held
from infra.node.messages import decode, encode
from infra.node.node_folders import code_folder
from t5train.errors import HostUnreachable, RemoteFailed
from t5train.spec import ClusterSpec
from tests.support.simulated_nodes import ThisMachine

pytestmark = pytest.mark.usefixtures("own_node_folder")
GUARD = "infra/node/attempts/process_guard.py"
SOURCES = {"infra/__init__.py": "", GUARD: "x = 'ß'\n"}


def packed(sources: dict[str, str]) -> tuple[str, bytes]:
    content = json.dumps(sources, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest(), content


def hold(digest: str, content: bytes = b"") -> bool:
    return code_receiver.hold(os.getuid(), node_folders.node_path(), digest, content)


def stored() -> list[str]:
    return sorted(path.name for path in node_folders.node_path("code").iterdir())


def test_code_is_sent_only_to_a_host_that_lacks_it() -> None:
    hosts = ThisMachine()
    assert not ship(hosts, ["a"])
    assert len(hosts.sent_commands) == 2
    folder = code_folder(own_bundle().digest)
    sent_at = (folder / GUARD).stat().st_ctime_ns
    assert not ship(hosts, ["a"])
    assert len(hosts.sent_commands) == 3
    assert (folder / GUARD).stat().st_ctime_ns == sent_at
    assert code_bundle.bundle(folder) == own_bundle()


def test_a_host_runs_the_code_that_was_sent_although_another_one_is_lost() -> None:
    failed = ship(ThisMachine("b"), ["a", "b"])
    assert list(failed) == ["b"]
    assert isinstance(failed["b"], HostUnreachable)
    program = "import infra, t5train; print(infra.__file__, t5train.__file__)"
    command = node_command("facts", own_bundle().digest)
    argv = [*command[: command.index("-m")], "-c", program]
    output = subprocess.run(argv, capture_output=True, text=True, check=True, cwd="/").stdout.split()
    assert output == [str(code_folder(own_bundle().digest) / name / "__init__.py") for name in ("infra", "t5train")]


def test_the_receiver_command_is_the_same_for_every_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts, checkout = ThisMachine(), tmp_path / "checkout"
    (checkout / GUARD).parent.mkdir(parents=True)
    (checkout / GUARD).touch()
    ship(hosts, ["a"])
    monkeypatch.setattr("infra.head.hosts.code_shipping.own_bundle", lambda: code_bundle.bundle(checkout))
    ship(hosts, ["a"])
    assert len({tuple(argv[3:]) for argv in hosts.sent_commands}) == 1  # the words before that are those of `timeout`
    assert not any(str(node_folders.node_path()) in word or own_bundle().digest in word for word in COMMAND)
    assert len(stored()) == 2


@pytest.mark.parametrize("content", [b"{}", b"\0", packed(SOURCES)[1][:-9], packed(SOURCES)[1] + b" "])
def test_content_that_does_not_match_its_digest_is_not_stored(content: bytes) -> None:
    with pytest.raises(SystemExit, match=r"arrived damaged .*\. Start the command again"):
        hold(packed(SOURCES)[0], content)
    assert not node_folders.node_path().exists()


@pytest.mark.parametrize(
    "name",
    ["../x.py", "/etc/x.py", "infra/../../x.py", "infra//x.py", "infra/x.so", "x.py", "infra/x.py/", "infra/ .py", ""],
)
def test_a_bundle_with_an_invalid_module_path_is_not_stored(name: str) -> None:
    with pytest.raises(SystemExit, match="which is not a valid module path"):
        hold(*packed({**SOURCES, name: ""}))
    assert not node_folders.node_path().exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / GUARD).write_text("x = 1\n"),
        lambda folder: (folder / GUARD).unlink(),
        lambda folder: (folder / "torch.py").touch(),
        lambda folder: ((folder / GUARD).unlink(), (folder / GUARD).symlink_to("/etc/hostname")),
        lambda folder: (folder / "t5train").symlink_to("/"),
        lambda folder: os.mkfifo(folder / "infra/pipe"),
        lambda folder: folder.chmod(0o755),
        lambda folder: (folder.rename(folder.with_name("aside")), folder.symlink_to("aside")),
    ],
)
def test_code_that_somebody_has_changed_counts_as_missing_and_is_replaced(change: Callable[[Path], object]) -> None:
    digest, content = packed(SOURCES)
    assert not hold(digest)
    assert hold(digest, content)
    change(code_folder(digest))
    assert not hold(digest)
    assert hold(digest, content)
    assert hold(digest)
    assert {path.name for path in code_folder(digest).rglob("*.py")} == {"__init__.py", "process_guard.py"}


def test_bytecode_caches_in_the_code_folder_do_not_count_as_changes() -> None:
    digest, content = packed(SOURCES)
    assert hold(digest, content)
    importing = [sys.executable, "-P", "-c", "import infra.node.attempts.process_guard"]
    subprocess.run(importing, check=True, env={"PYTHONPATH": str(code_folder(digest))})
    assert list(code_folder(digest).rglob("*.pyc"))
    assert hold(digest)


def test_a_node_folder_that_other_users_can_access_is_refused(tmp_path: Path) -> None:
    digest, content = packed(SOURCES)
    node_folders.node_path().mkdir(mode=0o755)
    with pytest.raises(SystemExit, match=r"is not a folder that only user .* can access\. Move it away, then start"):
        hold(digest, content)
    node_folders.node_path().rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    node_folders.node_path().symlink_to("elsewhere")
    with pytest.raises(SystemExit, match="is not a folder that only user"):
        hold(digest, content)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_different_user_id_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"user id is \d+ on this host and \d+ on the head"):
        code_receiver.hold(os.getuid() + 1, tmp_path / "of-another", *packed(SOURCES))
    assert not (tmp_path / "of-another").exists()


def test_a_code_folder_that_cannot_be_written_is_an_error_of_that_host() -> None:
    node_folders.node_path().mkdir(mode=0o700)
    node_folders.node_path("code").touch()
    found = ship(ThisMachine(), ["a"])["a"]
    assert isinstance(found, RemoteFailed)
    assert "cannot be stored in" in str(found)


def test_an_interrupted_write_leaves_no_code_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, content = packed(SOURCES)

    def full(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[:1])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(code_receiver, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            hold(digest, content)
    assert stored() == []
    node_folders.node_path("code", f".{digest}.partial", "infra").mkdir(parents=True)  # of a receiver that was killed
    assert hold(digest, content)
    assert stored() == [digest]


def test_several_heads_can_send_the_same_code_at_once() -> None:
    digest, content = packed(SOURCES | {f"infra/module_{number}.py": "x = 1\n" for number in range(20)})
    request = encode(Delivery(os.getuid(), str(node_folders.node_path()), digest, content))

    def send(_: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(COMMAND, input=request, capture_output=True, check=False)

    with ThreadPoolExecutor(6) as heads:
        ended = list(heads.map(send, range(6)))
    assert [decode(each.stdout, Held) for each in ended] == [Held(is_held=True)] * 6, [each.stderr for each in ended]
    assert stored() == [digest]


def test_hosts_use_installed_code_unless_code_is_shipped(tmp_path: Path) -> None:
    assert shipped_code(ClusterSpec()) is None
    assert path_to(None) == {}
    sent = shipped_code(ClusterSpec(ship_code=True, hostfile=tmp_path / "hosts"))
    assert sent == own_bundle().digest
    assert path_to(sent) == {"PYTHONPATH": str(code_folder(sent))}
