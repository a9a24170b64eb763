"""Collects the wheels that hosts need, with pip: ``t5-pretrain wheelhouse``.

For machines like this one, ``pip wheel`` downloads wheels, and builds those of packages that exist only as source. For
others, such packages are built first, which suits if they hold no compiled code; ``pip download`` does the rest. Where
packages come from, and with them which build of torch, is for pip's own configuration to decide.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions, metadata, version
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.head.environments.wheelhouse import Wheel, Wheelhouse, faulty, is_platform, read_wheelhouse, this_python
from infra.node.attempts.log_tail import printable
from t5train.errors import InputError, RecordError, SpecError, StorageError
from t5train.files.locks import try_lock
from t5train.progress import Progress
from t5train.records.digests import digest_file

PROJECT = "t5-pretrain"
_CHECKOUT = Path(__file__).parents[3]
_CONSTRAINTS = _CHECKOUT / "constraints.txt"
_WORK = ".collecting"
_PYTHON = re.compile(r"3\.(1[12])")
_MANYLINUX = re.compile(r"manylinux_2_([0-9]{1,2})_([a-z0-9_]+)")
_OLDEST_GLIBC = 5
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_ARCHITECTURES = ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64", "armv7l", "i686")
_CONFLICT = "The conflict is caused by:"
_STEP = re.compile(r"\s*(?:Collecting|Downloading|Processing|Building wheel for|Saved) \S+")
# DeepSpeed would otherwise compile its operators for this machine; ranks compile those that they use.
_BUILD = {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "LC_ALL": "C.UTF-8"}
_SHOWN_LINES = 4


def this_platform() -> str:
    """The platform of wheels for this machine. Raises SpecError if its C library is not glibc."""
    name, number = platform.libc_ver()
    if name != "glibc" or not number:
        raise SpecError("the C library of this machine is not glibc: name the platform of the hosts with --platform")
    major, minor = number.split(".")[:2]
    return f"manylinux_{major}_{minor}_{platform.machine()}"


@dataclass(frozen=True)
class Target:
    """The Python and the platforms that wheels are collected for."""

    python: str
    platforms: tuple[str, ...]

    @classmethod
    def of(cls, python: str | None, platforms: Sequence[str] | None) -> "Target":
        """Fill in those of this machine. Raises SpecError for a Python or a platform that there is not."""
        python = python or this_python()
        if not _PYTHON.fullmatch(python):
            raise SpecError(f"--python is {python!r}: it must be 3.11 or 3.12")
        for name in platforms or ():
            if not is_platform(name):
                raise SpecError(f"--platform is {name!r}: it must be a platform such as {this_platform()}")
        return cls(python, tuple(platforms or [this_platform()]))

    @property
    def is_this_machine(self) -> bool:
        """Whether what is compiled here suits the target."""
        try:
            return self.python == this_python() and this_platform() in self.platforms
        except SpecError:
            return False

    @property
    def arguments(self) -> list[str]:
        """The options for pip, which takes names of platforms literally: older ones, which suit as well, are added."""
        names = dict.fromkeys(older for name in self.platforms for older in _with_older(name))
        words = [f"--platform={name}" for name in names]
        return [*words, f"--python-version={self.python}", "--implementation=cp", "--only-binary=:all:"]

    @property
    def markers(self) -> dict[str, str]:
        """The values for conditions of requirements, such as those of the newest patch release of the Python."""
        found = {name: str(value) for name, value in default_environment().items()}
        if self.python != this_python():
            full = f"{self.python}.99"
            found |= {"python_version": self.python, "python_full_version": full, "implementation_version": full}
        machines = [each for name in self.platforms for each in _ARCHITECTURES if name.endswith(f"_{each}")]
        return found | {"platform_machine": [*machines, platform.machine()][0]}

    def __str__(self) -> str:
        return f"Python {self.python} on {', '.join(self.platforms)}"


def _with_older(name: str) -> list[str]:
    match = _MANYLINUX.fullmatch(name)
    if match is None:
        return [name]
    newest, machine = int(match[1]), match[2]
    found = []
    for minor in range(newest, _OLDEST_GLIBC - 1, -1):
        found.append(f"manylinux_2_{minor}_{machine}")
        if minor in _LEGACY:
            found.append(f"{_LEGACY[minor]}_{machine}")
    return [*found, f"linux_{machine}"]


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
    parts = f"[{','.join(sorted(extras))}]" if extras else ""
    with tempfile.TemporaryDirectory(prefix="t5-wheels-") as temporary:
        constraints = _constraints(Path(temporary))
        if not (_CHECKOUT / "pyproject.toml").is_file():
            return collect(folder, target, [f"{PROJECT}{parts}=={version(PROJECT)}"], constraints, progress)
        # What builds this project is used from this environment if it is there.
        own = ["--no-build-isolation"] if PathFinder.find_spec("hatchling") else []
        build = ["wheel", "--no-deps", f"--wheel-dir={temporary}", f"--constraint={constraints}", *own, str(_CHECKOUT)]
        pip(build, f"build the wheel of {_CHECKOUT}", progress)
        (built,) = Path(temporary).glob("*.whl")
        requirement = f"{PROJECT}{parts}=={built.name.split('-')[1]}"
        return collect(folder, target, [requirement], constraints, progress, built)


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
    given: Path | None = None,
) -> Collected:
    """Collect the wheels that these requirements need for a target; ``given`` is a wheel that is already built.

    Wheels in the folder that verify are not downloaded again. Raises InputError that names what pip does not find for
    the target, and StorageError if another process is collecting wheels there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _work_folder(folder) as work:
        before = _earlier(folder)
        intact = _intact(folder, before)
        facts = {
            "python": target.python,
            "platforms": target.platforms,
            "requirements": tuple(requirements),
            "constraints_sha256": hashlib.sha256(constraints.read_bytes()).hexdigest(),
        }
        held = {wheel.sha256 for wheel in intact}
        has_given = given is None or digest_file(given).sha256 in held
        if before and has_given and len(intact) == len(before.wheels) and before == before.model_copy(update=facts):
            return Collected(before, len(intact))
        (source := work / "source").mkdir()
        if given is not None:
            shutil.copyfile(given, source / given.name)
        for wheel in intact:
            if given is None or wheel.name.split("-")[0] != given.name.split("-")[0]:
                os.link(folder / wheel.name, source / wheel.name)
        (out := work / "out").mkdir()
        arguments = [f"--constraint={constraints}", f"--find-links={source}"]
        _gather(target, requirements, arguments, source, out, progress)
        wheels = sorted(out.iterdir(), key=lambda path: path.name.lower())
        made = Wheelhouse(**facts, wheels=tuple(_listed(path) for path in wheels))
        _put(made, out, folder, before)
        return Collected(made, len({wheel.sha256 for wheel in made.wheels} & held))


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for work in progress, while no other process collects wheels in ``folder``."""
    work = folder / _WORK
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor):
            raise StorageError(f"another process is collecting wheels in {folder}: wait for it, then try again")
        shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
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


def _gather(
    target: Target, requirements: Sequence[str], arguments: list[str], source: Path, out: Path, progress: Progress
) -> None:
    """Fill ``out`` with the wheels that the requirements need. What ``source`` has already is used."""
    what = f"collect the wheels for {target}"
    if target.is_this_machine:
        pip(["wheel", f"--wheel-dir={out}", *arguments, *requirements], what, progress)
        return
    for requirement in _only_as_source(requirements, arguments, what, progress):
        _build(requirement, target, arguments, source, progress)
    asked = list(requirements)
    while True:
        pip(["download", *target.arguments, f"--dest={out}", *arguments, *asked], what, progress)
        missing = _missing(out.iterdir(), requirements, target.markers)
        if not missing:
            return
        if not set(missing) - set(asked):
            raise InputError(f"pip finds no {', '.join(missing)} for {target}, though other wheels need it")
        for wheel in list(out.iterdir()):  # the next download may choose other versions
            wheel.replace(source / wheel.name)
        asked += missing  # pip skipped it, because the condition does not hold for the Python that pip runs with


def _only_as_source(requirements: Sequence[str], arguments: list[str], what: str, progress: Progress) -> list[str]:
    """Those of the packages that these requirements need on this machine for which there is no wheel."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        words = ["install", "--dry-run", "--ignore-installed", f"--report={report.name}", *arguments, *requirements]
        pip(words, what, progress)
        found = json.load(report)["install"]
    return [
        f"{each['metadata']['name']}=={each['metadata']['version']}"
        for each in found
        if not each["download_info"]["url"].endswith(".whl")
    ]


def _build(requirement: str, target: Target, arguments: list[str], source: Path, progress: Progress) -> None:
    """Build the wheel of a package here, unless the target has one, which this machine has not.

    Raises InputError that names the package if its wheel does not suit the target.
    """
    what = f"collect {requirement} for {target}"
    with suppress(InputError):
        pip(["download", "--no-deps", *target.arguments, f"--dest={source}", *arguments, requirement], what, progress)
        return
    with tempfile.TemporaryDirectory(prefix="t5-wheels-", dir=source.parent) as temporary:
        words = ["wheel", "--no-deps", f"--wheel-dir={temporary}", *arguments, requirement]
        pip(words, f"build {requirement} for {target}", progress)
        (built,) = Path(temporary).iterdir()
        if not built.name.endswith("-none-any.whl"):
            raise InputError(
                f"there is no wheel of {requirement} for {target}, and {built.name}, which suits this machine, has "
                "compiled code. Run this command on a machine like the hosts"
            )
        built.replace(source / built.name)


def _missing(wheels: Iterator[Path], requirements: Sequence[str], markers: dict[str, str]) -> list[str]:
    """Return what the requirements need for which there is no wheel.

    pip evaluates the conditions of requirements (``; python_version < "3.12"``) for the Python that it runs with, even
    when it downloads for another one. The wheels themselves are therefore asked here, for the machine they are for.
    """
    found = {canonicalize_name(each.name): each for wheel in wheels for each in distributions(path=[str(wheel)])}
    needed, seen, missing = [Requirement(text) for text in requirements], set[tuple[str, str]](), dict[str, None]()
    for requirement in needed:  # grows meanwhile
        name = canonicalize_name(requirement.name)
        if name not in found or not requirement.specifier.contains(found[name].version, prereleases=True):
            requirement.marker = None
            missing[str(requirement)] = None
            continue
        for extra in {"", *requirement.extras} - {of for each, of in seen if each == name}:
            seen.add((name, extra))
            conditional = [Requirement(text) for text in found[name].requires or ()]
            needed += [
                each for each in conditional if not each.marker or each.marker.evaluate(markers | {"extra": extra})
            ]
    return list(missing)


def _listed(path: Path) -> Wheel:
    found = digest_file(path)
    with zipfile.ZipFile(path) as archive:
        unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    return Wheel(name=path.name, size=found.size, sha256=found.sha256, unpacked_bytes=unpacked_bytes)


def _put(made: Wheelhouse, out: Path, folder: Path, before: Wheelhouse | None) -> None:
    """Move the wheels into place, then list them, then remove those that the earlier list had and this one has not."""
    for wheel in made.wheels:
        (out / wheel.name).replace(folder / wheel.name)
    made.write(folder)
    names = {wheel.name for wheel in made.wheels}
    for wheel in before.wheels if before else ():
        if wheel.name not in names:
            (folder / wheel.name).unlink(missing_ok=True)


def pip(arguments: Sequence[str], what: str, progress: Progress) -> None:
    """Run this environment's pip, and report its steps. Raises InputError if it cannot do ``what``."""
    # importlib.util.find_spec would make setuptools believe that this is pip: importing it would then warn.
    if PathFinder.find_spec("pip") is None:
        raise InputError(f"{sys.prefix} has no pip, which collects wheels. Install it with `python -m ensurepip`")
    lines, steps = list[str](), 0
    # Builds of other packages must not see the path of this project's code.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pip", *arguments, "--no-color", "--progress-bar=off"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**environment, **_BUILD},
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(printable(line).strip())
                if _STEP.match(line):
                    steps += 1
                    progress(f"steps of pip, {lines[-1].partition(' (from')[0][:80]}", steps, None)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise InputError(f"pip cannot {what}: {_reason(lines)}. `pip config list` shows where pip looks")


def _reason(lines: list[str]) -> str:
    """The last lines of pip that say why it failed."""
    if _CONFLICT in lines:
        block = lines[lines.index(_CONFLICT) :]
        said = " / ".join(block[: block.index("") if "" in block else 2 * _SHOWN_LINES])
        return f"{said} (pip also says this of a package of which it finds no file that suits)"
    told = [line for line in lines if line and not line.startswith(("[notice]", "note:", "hint:"))]
    errors = [line for line in told if "rror" in line]
    return " / ".join((errors or told)[-_SHOWN_LINES:]) or "it says nothing"
