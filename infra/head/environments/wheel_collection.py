"""Collects the wheels that hosts need: ``t5-pretrain wheelhouse``.

pip downloads them. Packages that exist only as source are built here, which a wheel for other kinds of machines allows
if it holds no compiled code. Work is done in ``.collecting`` within the wheelhouse; what an interrupted call leaves
there is used by the next one, if it is intact.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions, metadata, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.head.environments.pip_commands import PipFailed, Target, build, pip
from infra.head.environments.wheel_metadata import Closure, WheelFile, closure, is_intact, markers
from infra.head.environments.wheelhouse import Wheel, Wheelhouse, faulty, is_wheel_name, read_wheelhouse
from t5train.errors import InputError, RecordError, SpecError, StorageError
from t5train.files.locks import try_lock
from t5train.progress import Progress
from t5train.records.digests import digest_file

PROJECT = "t5-pretrain"
_CHECKOUT = Path(__file__).parents[3]
_CONSTRAINTS = _CHECKOUT / "constraints.txt"
_WORK = ".collecting"
_MOST_ROUNDS = 60


@dataclass(frozen=True)
class Collected:
    """A wheelhouse, and how many of its wheels were there before."""

    wheelhouse: Wheelhouse
    reused: int


def collect_project(folder: Path, target: Target, extras: Sequence[str], progress: Progress) -> Collected:
    """Collect the wheel of this project and of all that training needs; ``extras`` are optional parts of it.

    Raises SpecError for a part that does not exist, and otherwise as ``collect`` does.
    """
    known = metadata(PROJECT).get_all("Provides-Extra") or []
    if unknown := sorted(set(extras) - set(known)):
        raise SpecError(f"--extra is {unknown[0]!r}: it must be one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="t5-wheels-") as temporary:
        constraints = _constraints(Path(temporary))
        parts = f"[{','.join(sorted(extras))}]" if extras else ""
        root = f"{PROJECT}{parts}=={version(PROJECT)}"
        if not (_CHECKOUT / "pyproject.toml").is_file():
            return collect(folder, target, [root], constraints, progress)
        built = build(str(_CHECKOUT), constraints, Path(temporary), progress, own=True)
        if isinstance(built, str):
            raise InputError(f"there is no wheel of {_CHECKOUT}: {built}")
        own = f"{PROJECT}{parts}=={WheelFile(built).version}"
        return collect(folder, target, [own], constraints, progress, [built])


def _constraints(folder: Path) -> Path:
    """The versions that this project is tested with; without a checkout, those that are installed here."""
    if _CONSTRAINTS.is_file():
        return _CONSTRAINTS
    found = {each.name: each.version.partition("+")[0] for each in distributions() if each.name != PROJECT}
    path = folder / "constraints.txt"
    path.write_text("".join(f"{name}=={number}\n" for name, number in sorted(found.items())), "utf-8")
    return path


def collect(
    folder: Path,
    target: Target,
    requirements: Sequence[str],
    constraints: Path,
    progress: Progress,
    given: Sequence[Path] = (),
) -> Collected:
    """Collect the wheels that these requirements need for a target; ``given`` are wheels that are already built.

    Wheels in the folder that verify are not downloaded again. Raises InputError that names what cannot be had for the
    target, and StorageError if another process is collecting wheels there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _work_folder(folder) as work:
        before = _earlier(folder)
        digest = hashlib.sha256(constraints.read_bytes()).hexdigest()
        intact = _intact(folder, before)
        wanted = before and before.model_copy(
            update={
                "python": target.python,
                "platforms": target.platforms,
                "requirements": tuple(requirements),
                "constraints_sha256": digest,
            }
        )
        if before is not None and wanted == before and len(intact) == len(before.wheels) and _has(before, given):
            _clear(work)
            return Collected(before, len(intact))
        _begin(work, folder, intact, given)
        found = _complete(work, target, requirements, constraints, set(work.glob("*.whl")), progress)
        made = Wheelhouse(
            python=target.python,
            platforms=target.platforms,
            requirements=tuple(requirements),
            constraints_sha256=digest,
            wheels=tuple(_listed(each) for each in found),
        )
        _put(made, work, folder, before)
        return Collected(made, len({wheel.sha256 for wheel in made.wheels} & {wheel.sha256 for wheel in intact}))


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder for work in progress, while no other process uses it."""
    work = folder / _WORK
    work.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor):
            raise StorageError(f"another process is collecting wheels in {folder}: wait for it, then try again")
        yield work
    finally:
        os.close(descriptor)


def _earlier(folder: Path) -> Wheelhouse | None:
    try:
        return read_wheelhouse(folder)
    except (InputError, RecordError):
        return None


def _intact(folder: Path, before: Wheelhouse | None) -> list[Wheel]:
    if before is None:
        return []
    bad = set(faulty(folder, before.wheels))
    return [wheel for wheel in before.wheels if wheel.name not in bad]


def _has(before: Wheelhouse, given: Sequence[Path]) -> bool:
    listed = {(wheel.name, wheel.sha256) for wheel in before.wheels}
    return all((path.name, digest_file(path).sha256) in listed for path in given)


def _clear(work: Path) -> None:
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _begin(work: Path, folder: Path, intact: Sequence[Wheel], given: Sequence[Path]) -> None:
    """Put into ``work`` one intact wheel of each project: a given one, else an earlier one, else a leftover."""
    taken = {WheelFile(path).project for path in given}
    links = {wheel.name for wheel in intact if WheelFile(folder / wheel.name).project not in taken}
    taken |= {WheelFile(folder / name).project for name in links}
    for path in list(work.iterdir()):
        keep = is_wheel_name(path.name) and WheelFile(path).project not in taken and is_intact(path)
        if keep:
            taken.add(WheelFile(path).project)
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in links:
        os.link(folder / name, work / name)
    for path in given:
        shutil.copyfile(path, work / path.name)


def _complete(
    work: Path,
    target: Target,
    requirements: Sequence[str],
    constraints: Path,
    old: set[Path],
    progress: Progress,
) -> list[WheelFile]:
    """Download and build until nothing is missing; returns the wheels that the requirements need."""
    values, asked, tried = markers(target.python, target.platforms), list(requirements), set[str]()
    common = [f"--constraint={constraints}", f"--find-links={work}", f"--dest={work}"]
    for _ in range(_MOST_ROUNDS):
        failed = pip(["download", *target.arguments, *common, *asked], progress)
        if failed is None:
            found = _needed(work, old, requirements, values)
            new = [text for text in found.missing if text not in asked]
            if not found.missing:
                return found.wheels
            if not new:
                raise InputError(f"{', '.join(found.missing)} cannot be had for {target}, though other wheels need it")
            asked += new  # pip skipped it, because the condition does not hold for the Python that pip runs with
            continue
        lacking = _without_wheel(failed, [*target.arguments, *common], progress)
        if not set(lacking) - tried:
            raise InputError(
                f"pip cannot collect the wheels for {target}: {failed.reason}. `pip config list` shows where pip looks"
            )
        for requirement in lacking:
            tried.add(requirement)
            _build(requirement, target, constraints, work, progress)
    raise InputError(f"more than {_MOST_ROUNDS} packages for {target} exist only as source. Collect on such a machine")


def _without_wheel(failed: PipFailed, arguments: Sequence[str], progress: Progress) -> list[str]:
    """Those of the requirements in pip's error that have no wheel, apart from this project's."""
    others = [text for text in failed.suspects if canonicalize_name(Requirement(text).name) != PROJECT]
    return [text for text in others if pip(["download", "--no-deps", *arguments, text], progress) is not None]


def _needed(work: Path, old: set[Path], requirements: Sequence[str], values: dict[str, str]) -> Closure:
    """What the requirements need. A wheel that pip has just downloaded replaces an earlier one of its project."""
    by_project: dict[str, WheelFile] = {}
    for path in sorted(work.glob("*.whl"), key=lambda each: each not in old):
        by_project[WheelFile(path).project] = WheelFile(path)
    return closure(by_project.values(), requirements, values)


def _build(requirement: str, target: Target, constraints: Path, work: Path, progress: Progress) -> None:
    """Build the wheel of a package that has none for the target. Raises InputError that names it if that fails."""
    with tempfile.TemporaryDirectory(prefix="t5-wheels-", dir=work) as temporary:
        built = build(requirement, constraints, Path(temporary), progress)
        if isinstance(built, str):
            raise InputError(
                f"{requirement} cannot be had for {target}: there is no wheel for it, and {built}. `pip config list` "
                "shows where pip looks"
            )
        if not (WheelFile(built).is_pure or target.is_this_machine):
            raise InputError(
                f"{requirement} cannot be had for {target}: there is no wheel, and {built.name}, which suits this "
                "machine, has compiled code. Run this command on a machine like the hosts"
            )
        built.replace(work / built.name)


def _listed(wheel: WheelFile) -> Wheel:
    found = digest_file(wheel.path)
    return Wheel(name=wheel.path.name, size=found.size, sha256=found.sha256, unpacked_bytes=wheel.unpacked_bytes)


def _put(made: Wheelhouse, work: Path, folder: Path, before: Wheelhouse | None) -> None:
    """Move the wheels into place, then list them, then remove those that the earlier list had and this one has not."""
    for wheel in made.wheels:
        (work / wheel.name).replace(folder / wheel.name)
    made.write(folder)
    names = {wheel.name for wheel in made.wheels}
    for wheel in before.wheels if before else ():
        if wheel.name not in names:
            (folder / wheel.name).unlink(missing_ok=True)
    _clear(work)
