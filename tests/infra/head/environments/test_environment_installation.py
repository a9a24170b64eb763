"""On a host, only wheels with the right digests become an environment, and no folder of others is touched."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.head.environments.environment_installation import Installed, install_on, require_environment_path
from infra.head.environments.wheelhouse import Wheelhouse
from infra.node import node_folders
from infra.node.environments import environment_installer
from infra.node.environments.environment_folder import MARKER
from infra.node.environments.installation_messages import Job, Refusal
from t5train.errors import HostError, InputError, ProtocolMismatch, SpecError
from t5train.progress import silent
from tests.support.simulated_nodes import ThisMachine
from tests.support.tiny_wheels import wheelhouse_of, write_wheel

Install = Callable[..., Installed | HostError]


@pytest.fixture
def wheels(tmp_path: Path, own_node_folder: None) -> Wheelhouse:
    """A wheelhouse of two wheels in ``wheels``. The node folder is within ``tmp_path``, too."""
    (tmp_path / "wheels").mkdir()
    first = write_wheel(tmp_path / "wheels", "first", requires=["second>=1"])
    return wheelhouse_of(tmp_path / "wheels", [first, write_wheel(tmp_path / "wheels", "second")])


@pytest.fixture
def install(tmp_path: Path, wheels: Wheelhouse) -> Install:
    """Install the wheelhouse into ``env`` on this machine, as on a host."""

    def run(transport: ThisMachine | None = None, into: Path = tmp_path / "env") -> Installed | HostError:
        found = install_on(transport or ThisMachine(), ["a"], tmp_path / "wheels", wheels, into, silent)
        return found["a"]

    return run


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (each.st_ino, each.st_mtime_ns) for path, each in found.items()}


def test_a_folder_that_this_command_has_not_made_is_left_alone(install: Install, tmp_path: Path) -> None:
    (tmp_path / "env/lib").mkdir(parents=True)
    (tmp_path / "env/lib/mine.py").touch()
    before = state_of(tmp_path / "env")
    assert "exists and was not made by this command" in str(install())
    assert state_of(tmp_path / "env") == before
    shutil.rmtree(tmp_path / "env")
    (tmp_path / "env").symlink_to(tmp_path)
    assert "is not a folder" in str(install())


def test_an_environment_of_another_wheelhouse_or_that_others_can_change_is_refused(
    install: Install, tmp_path: Path, wheels: Wheelhouse
) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / MARKER).write_text(json.dumps({"wheelhouse": "f" * 64, "complete": True}))
    assert "is an environment of another wheelhouse (ffffffffffff)" in str(install())
    (tmp_path / "env" / MARKER).write_text(json.dumps({"wheelhouse": wheels.digest, "complete": True}))
    assert install() == Installed(is_new=False)
    (tmp_path / "env").chmod(0o777)
    assert "other users can change" in str(install())


def test_a_tampered_wheel_is_refused_by_the_host_and_leaves_no_environment(install: Install, tmp_path: Path) -> None:
    path = tmp_path / "wheels/second-1.0-py3-none-any.whl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"VALUE = '1.0'", b"VALUE = '6.6'"))
    assert "second-1.0-py3-none-any.whl arrived with sha256" in str(install())
    assert not (tmp_path / "env").exists()
    assert not list(node_folders.node_path("wheels").rglob("second*"))
    path.unlink()
    with pytest.raises(InputError, match="is missing, or not the file"):
        install()


@pytest.mark.slow
def test_an_environment_is_made_once_and_what_was_sent_is_not_sent_again(
    install: Install, tmp_path: Path, wheels: Wheelhouse
) -> None:
    first = wheels.wheels[0]
    part = node_folders.node_path("wheels", first.sha256, f"{first.name}.part")  # of an interrupted call
    node_folders.node_path().mkdir(mode=0o700)
    node_folders.node_path("wheels").mkdir(mode=0o700)
    part.parent.mkdir(mode=0o700)
    part.write_bytes((tmp_path / "wheels" / first.name).read_bytes()[:100])
    assert install() == Installed(is_new=True)
    assert not part.exists()
    before = state_of(tmp_path / "env")
    assert before[str(tmp_path / "env")]
    assert install() == Installed(is_new=False)
    assert state_of(tmp_path / "env") == before
    assert (tmp_path / "env").stat().st_mode & 0o077 == 0


def test_a_host_without_a_suitable_python_is_named_with_what_to_install(install: Install) -> None:
    class WithoutPython(ThisMachine):
        def command(self, host: str, argv: Sequence[str]) -> list[str]:
            return [*super().command(host, argv)[:6], "/nowhere/python"]

    assert "there is no Python 3" in str(install(WithoutPython()))
    assert "-venv" in str(install(WithoutPython()))


@pytest.mark.parametrize("starts", ['{"../x.whl": 0}', '{"first-1.0-py3-none-any.whl": -1}'])
def test_a_host_gets_only_bytes_of_the_wheelhouse(install: Install, starts: str) -> None:
    class Hostile(ThisMachine):
        def command(self, host: str, argv: Sequence[str]) -> list[str]:
            super().command(host, argv)
            return ["sh", "-c", 'echo "$1"; cat > /dev/null', "sh", f'{{"Wanted": {{"starts": {starts}}}}}']

    assert isinstance(install(Hostile()), ProtocolMismatch)


def job(tmp_path: Path, **changes: Any) -> Job:
    store, into = str(tmp_path / "store"), str(tmp_path / "env")
    return replace(Job(os.getuid(), store, into, "3.11", "a" * 64, unpacked_bytes=1, wheels=[]), **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wheels": [("../x.whl", 1, "a" * 64)]}, "not the plain name"),
        ({"wheels": [("x.whl", 1, "../" * 20)]}, "not the plain name"),
        ({"user": -1}, "user id"),
        ({"into": "relative"}, "cannot be the folder"),
        ({"into": "/"}, "cannot be the folder"),
        ({"python": "2.7"}, "the wheels are for 2.7"),
    ],
)
def test_a_host_checks_the_job_itself(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(Refusal, match=said), open(os.devnull, "rb") as stdin:
        environment_installer.install(job(tmp_path, **changes), stdin)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    large = job(tmp_path, unpacked_bytes=10**18, python=environment_installer.sys.version[:4])
    with pytest.raises(Refusal, match=r"free, and the environment needs .* GB\. Free"), open(os.devnull, "rb") as stdin:
        environment_installer.install(large, stdin)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a\nb", "/it's", "/a b", "/a:b", "/$(x)", "/"])
def test_the_path_of_an_environment_is_absolute_and_plain(path: str) -> None:
    with pytest.raises(SpecError, match="must be an absolute path"):
        require_environment_path(Path(path))
