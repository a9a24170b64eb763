"""On a host, only wheels with the right digests become an environment, and no folder of others is touched."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.head.environments import environment_installation
from infra.head.environments.environment_installation import install_on, require_environment_path
from infra.head.environments.wheelhouse import Wheelhouse, this_python
from infra.head.hosts.nodes import Nodes
from infra.node import node_folders
from infra.node.environment_installer import MARKER, Install, Installed
from infra.node.storage.file_channel import Wanted
from t5train.errors import HostError, HostTimeout, InputError, ProtocolMismatch, RemoteFailed, SpecError
from t5train.progress import silent
from tests.support.simulated_nodes import LocalHosts, await_end
from tests.support.tiny_wheels import wheelhouse_of, write_wheel


class ThisHost(LocalHosts):
    """A host that is a folder of this machine, with programs of this machine."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return super().command(host, argv) if "infra.node" in argv else list(argv)


Installer = Callable[..., Installed | HostError]


@pytest.fixture
def wheels(tmp_path: Path, own_node_folder: None) -> Wheelhouse:
    """A wheelhouse of two wheels in ``wheels``."""
    (tmp_path / "wheels").mkdir()
    first = write_wheel(tmp_path / "wheels", "first", requires=["second>=1"])
    return wheelhouse_of(tmp_path / "wheels", [first, write_wheel(tmp_path / "wheels", "second")])


@pytest.fixture
def install(tmp_path: Path, wheels: Wheelhouse) -> Installer:
    """Install the wheelhouse into ``env`` on the host."""

    def run(transport: LocalHosts | None = None, wheelhouse: Wheelhouse = wheels) -> Installed | HostError:
        place = transport or ThisHost(tmp_path)
        return install_on(place, ["a"], tmp_path / "wheels", wheelhouse, tmp_path / "env", silent)["a"]

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The wheels that the host keeps."""
    return tmp_path / "a" / node_folders.node_path().name / "wheels"


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (each.st_ino, each.st_mtime_ns) for path, each in found.items()}


def test_a_folder_that_this_command_has_not_made_is_left_alone(install: Installer, tmp_path: Path) -> None:
    (tmp_path / "env/lib").mkdir(parents=True)
    (tmp_path / "env/lib/mine.py").touch()
    before = state_of(tmp_path / "env")
    assert "exists and was not made by this command" in str(install())
    assert state_of(tmp_path / "env") == before
    shutil.rmtree(tmp_path / "env")
    (tmp_path / "env").symlink_to(tmp_path)
    assert "is not a folder" in str(install())


def test_an_environment_of_another_wheelhouse_or_that_others_can_change_is_refused(
    install: Installer, tmp_path: Path, wheels: Wheelhouse
) -> None:
    (tmp_path / "env").mkdir(mode=0o700)
    (tmp_path / "env" / MARKER).write_text(json.dumps({"wheelhouse": "f" * 64, "complete": True}))
    assert "is an environment of another wheelhouse (ffffffffffff)" in str(install())
    (tmp_path / "env" / MARKER).write_text(json.dumps({"wheelhouse": wheels.digest, "complete": True}))
    assert install() == Installed(is_new=False)
    (tmp_path / "env").chmod(0o777)
    assert "other users can change" in str(install())


def test_a_tampered_wheel_is_refused_by_the_host_and_leaves_no_environment(
    install: Installer, tmp_path: Path, store: Path
) -> None:
    path = tmp_path / "wheels/second-1.0-py3-none-any.whl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"VALUE = '1.0'", b"VALUE = '6.6'"))
    assert "second-1.0-py3-none-any.whl is damaged: it arrived with sha256" in str(install())
    assert [each.name for each in (tmp_path / "env").iterdir()] == [MARKER]
    assert not list(store.rglob("*second*"))
    path.unlink()
    with pytest.raises(InputError, match="is missing, or not the file"):
        install()


@pytest.mark.slow
def test_an_environment_is_made_once_and_what_was_sent_is_not_sent_again(
    tmp_path: Path, wheels: Wheelhouse, store: Path
) -> None:
    first = wheels.wheels[0]
    store.parent.mkdir(mode=0o700, parents=True)
    store.mkdir(mode=0o700)
    (store / first.name).write_bytes((tmp_path / "wheels" / first.name).read_bytes())  # of an interrupted call
    held = (store / first.name).stat()

    def install() -> list[Installed | HostError]:
        """Install on two hosts that share the folder of the environment."""
        place = ThisHost(tmp_path), ["a", "b"], tmp_path / "wheels", wheels, tmp_path / "env", silent
        return [*install_on(*place).values()]

    assert sorted(map(str, install())) == ["Installed(is_new=False)", "Installed(is_new=True)"]
    assert (store / first.name).stat().st_ino == held.st_ino
    before = state_of(tmp_path / "env")
    assert install() == [Installed(is_new=False)] * 2
    assert state_of(tmp_path / "env") == before
    assert (tmp_path / "env").stat().st_mode & 0o077 == 0


def test_a_host_without_a_suitable_python_is_named_with_what_to_install(install: Installer, tmp_path: Path) -> None:
    class WithoutPython(ThisHost):
        def command(self, host: str, argv: Sequence[str]) -> list[str]:
            return ["3.99" if word == this_python() else word for word in super().command(host, argv)]

    assert "there is no Python 3" in str(install(WithoutPython(tmp_path)))
    assert "-venv" in str(install(WithoutPython(tmp_path)))


@pytest.mark.parametrize("name", ["../wheels/first-1.0-py3-none-any.whl", "wheelhouse.json"])
def test_a_host_gets_only_bytes_of_the_wheelhouse(install: Installer, tmp_path: Path, name: str) -> None:
    class Hostile(ThisHost):
        def command(self, host: str, argv: Sequence[str]) -> list[str]:
            if "infra.node" not in argv:
                return super().command(host, argv)
            request = {"FileRange": {"name": name, "offset": 0, "size": 10}}
            return ["sh", "-c", 'echo "$1"; cat > /dev/null', "sh", json.dumps(request)]

    assert isinstance(install(Hostile(tmp_path)), ProtocolMismatch)


@pytest.mark.parametrize(
    ("name", "said"), [("../x.whl", "not the plain name of a file"), ("requirements.txt", "which is not a wheel")]
)
def test_a_host_checks_the_job_itself(tmp_path: Path, name: str, said: str) -> None:
    wheel = Wanted(name, 1, "a" * 64)
    request = Install(tmp_path / "env", "a" * 64, (wheel,), unpacked_bytes=1)
    with pytest.raises(RemoteFailed, match=said):
        await_end(Nodes(LocalHosts(tmp_path), ("a",)), "a", request)
    assert not list(tmp_path.rglob("x.whl"))


class Deaf(ThisHost):
    """A host that requests bytes without end, and reads none."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        if "infra.node" not in argv:  # the code is sent first
            return super().command(host, argv)
        request = {"FileRange": {"name": "first-1.0-py3-none-any.whl", "offset": 0, "size": 500}}
        return ["sh", "-c", 'for i in $(seq 1000); do echo "$1"; done; exec sleep 600', "sh", json.dumps(request)]


def test_the_deadline_ends_an_installation_on_a_host_that_hangs(
    install: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_installation, "_DEADLINE_SECONDS", 1.0)
    begun = time.monotonic()
    assert isinstance(install(Deaf(tmp_path)), HostTimeout)
    assert time.monotonic() - begun < 300


def test_a_disk_that_is_too_small_is_named_before_anything_is_sent(
    install: Installer, wheels: Wheelhouse, store: Path
) -> None:
    huge = wheels.wheels[0].model_copy(update={"unpacked_bytes": 10**18})
    assert "free, and the environment needs" in str(
        install(wheelhouse=wheels.model_copy(update={"wheels": (huge, *wheels.wheels[1:])}))
    )
    assert not list(store.iterdir())


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a\nb", "/it's", "/a b", "/a:b", "/$(x)", "/"])
def test_the_path_of_an_environment_is_absolute_and_plain(path: str) -> None:
    with pytest.raises(SpecError, match="must be an absolute path"):
        require_environment_path(Path(path))
