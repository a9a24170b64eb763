"""Wheels are collected for a target with pip: what exists only as source is built, and what verifies is kept."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from infra.head.environments.wheel_collection import (
    Collected,
    Target,
    _missing,
    _reason,
    collect,
    collect_project,
    this_platform,
)
from infra.head.environments.wheelhouse import read_wheelhouse, this_python
from t5train.errors import InputError, SpecError
from t5train.progress import silent
from tests.support.tiny_wheels import write_source, write_wheel

Collect = Callable[..., Collected]
CONFLICT = """\
ERROR: Cannot install first==1 because these package versions have conflicting dependencies.

The conflict is caused by:
    first 1 depends on second==2
    The user requested (constraint) second==2

To fix this you could try to:
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip can download from."""
    (tmp_path / "index").mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def collected(tmp_path: Path, index: Path) -> Collect:
    """Collect ``first`` into the folder ``wheels``."""
    (tmp_path / "constraints.txt").write_text("second==1.0\n")

    def run(target: Target | None = None) -> Collected:
        target = target or Target.of(None, None)
        return collect(tmp_path / "wheels", target, ["first"], tmp_path / "constraints.txt", silent)

    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_package_that_exists_only_as_source_is_built(collected: Collect, index: Path, tmp_path: Path) -> None:
    write_wheel(index, "first", requires=["second"])
    write_wheel(index, "unneeded")
    write_source(index, "second")
    made = collected()
    listed = ["first-1.0-py3-none-any.whl", "second-1.0-py3-none-any.whl"]
    assert [wheel.name for wheel in made.wheelhouse.wheels] == listed
    assert read_wheelhouse(tmp_path / "wheels") == made.wheelhouse
    assert names(tmp_path / "wheels") == [*listed, "wheelhouse.json"]
    assert (tmp_path / "wheels").stat().st_mode & 0o077 == 0

    for path in list(index.iterdir()):  # pip could not collect them again
        path.rename(tmp_path / path.name)
    assert collected() == Collected(made.wheelhouse, 2)

    (tmp_path / "wheels" / listed[0]).write_bytes(b"tampered")
    with pytest.raises(
        InputError, match=r"pip cannot collect the wheels for Python 3.* No matching distribution found for first"
    ):
        collected()
    (tmp_path / listed[0]).rename(index / listed[0])
    assert collected() == Collected(made.wheelhouse, 1)  # that which was built is used again


@pytest.mark.slow
def test_what_cannot_be_had_for_a_platform_is_named(collected: Collect, index: Path) -> None:
    write_wheel(index, "first", requires=["second"])
    foreign = Target.of("3.12", ["manylinux_2_28_s390x"])
    said = r"cannot collect the wheels for Python 3\.12 on manylinux_2_28_s390x: .* second==1\.0 .*no file that suits"
    with pytest.raises(InputError, match=said):
        collected(foreign)
    write_source(index, "second", tag=f"cp311-cp311-linux_{this_platform().split('_', 3)[3]}")
    with pytest.raises(InputError, match=r"no wheel of second==1.0 for .* has compiled code\. Run this command on a "):
        collected(foreign)
    assert not list(index.parent.glob("wheels/.*")), "work in progress is left behind"
    write_wheel(index, "second", tag="cp312-cp312-manylinux_2_28_s390x")
    assert len(collected(foreign).wheelhouse.wheels) == 2, "what the target has is not built"


def test_conditions_hold_for_the_target_and_not_for_this_python(tmp_path: Path) -> None:
    needs = [
        'newer; python_version >= "3.12"',
        'older>=2; python_full_version < "3.11.3"',
        'extra_one[more]; extra == "wanted"',
        'arm; platform_machine == "aarch64"',
        'windows; sys_platform == "win32"',
    ]
    first = write_wheel(tmp_path, "first", requires=needs)
    markers = Target.of("3.12", ["manylinux_2_28_aarch64"]).markers
    assert sorted(_missing(iter([first]), ["first[wanted]>=1"], markers)) == ["arm", "extra_one[more]", "newer"]
    other = "3.11" if this_python() == "3.12" else "3.12"
    assert Target.of(other, ["linux_x86_64"]).markers["python_full_version"] == f"{other}.99"
    assert _missing(iter([first]), ["first>=2"], markers) == ["first>=2"]


@pytest.mark.slow
def test_for_another_python_what_only_that_one_needs_is_collected_and_source_built(
    collected: Collect, index: Path
) -> None:
    other = "3.11" if this_python() == "3.12" else "3.12"
    write_wheel(index, "first", requires=["second", f'third; python_version == "{other}"'])
    write_source(index, "second")
    write_wheel(index, "third", requires=["fourth"])
    write_wheel(index, "fourth")
    made = collected(Target.of(other, ["manylinux_2_28_s390x"]))
    assert [wheel.name.split("-")[0] for wheel in made.wheelhouse.wheels] == ["first", "fourth", "second", "third"]


def test_older_platforms_suit_as_well() -> None:
    arguments = Target.of("3.12", ["manylinux_2_28_x86_64"]).arguments
    platforms = [word.partition("=")[2] for word in arguments if word.startswith("--platform=")]
    assert platforms[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(platforms)
    assert "manylinux_2_29_x86_64" not in platforms


@pytest.mark.parametrize(("python", "platforms"), [("3.10", []), ("3.11;", []), (None, ["--index-url=x"])])
def test_an_impossible_target_or_part_is_refused(tmp_path: Path, python: str | None, platforms: list[str]) -> None:
    with pytest.raises(SpecError, match="it must be"):
        Target.of(python, platforms)
    with pytest.raises(SpecError, match="--extra is 'flow': it must be one of dask, dev, flows"):
        collect_project(tmp_path, Target.of(None, None), ["flow"], silent)


def test_the_reason_of_a_conflict_is_shown_and_otherwise_the_last_errors() -> None:
    assert _reason([line.strip() for line in CONFLICT.splitlines()]).startswith("The conflict is caused by: / first 1 ")
    assert _reason(["Collecting a", "ERROR: No matching distribution found for a", "[notice] new pip"]).endswith(
        "for a"
    )


def test_setuptools_can_still_be_imported_after_pip_was_run(run_python: Callable[..., CompletedProcess[str]]) -> None:
    done = run_python(
        "import warnings; from infra.head.environments.wheel_collection import pip\n"
        "from t5train.progress import silent\n"
        "pip(['download', '--help'], 'help', silent)\n"
        "warnings.simplefilter('error')\nimport setuptools"
    )
    assert done.returncode == 0, done.stderr
