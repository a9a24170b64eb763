"""Runs this environment's pip: downloads wheels for a target, and builds wheels of packages that exist only as source.

Where packages come from, and with them which build of torch, is for pip's own configuration to decide.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from infra.head.environments.wheelhouse import is_platform
from infra.node.attempts.log_tail import printable
from t5train.errors import InputError, SpecError
from t5train.progress import Progress

_PYTHON = re.compile(r"3\.(1[12])")
_MANYLINUX = re.compile(r"manylinux_2_([0-9]{1,2})_([a-z0-9_]+)")
_OLDEST_GLIBC = 5
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_SUSPECT = re.compile(
    r"^(?:ERROR: No matching distribution found for| .* depends on| .*\(constraint\)) (.+?)(?: \(from .*\))?$",
    re.MULTILINE,
)
_CONFLICT = "The conflict is caused by:"
_STEP = re.compile(r"\s*(?:Collecting|Downloading|Processing|Building wheel for|Saved) \S+")
# DeepSpeed would otherwise compile its operators for this machine; ranks compile those that they use.
_BUILD = {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "LC_ALL": "C.UTF-8"}
_SHOWN_LINES = 4


def this_python() -> str:
    """The minor version of this Python, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def this_platform() -> str:
    """The platform of wheels for this machine. Raises SpecError if its C library is not glibc."""
    name, version = platform.libc_ver()
    if name != "glibc" or not version:
        raise SpecError("the C library of this machine is not glibc: name the platform of the hosts with --platform")
    major, minor = version.split(".")[:2]
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
class PipFailed:
    """What pip said when it failed."""

    output: str

    @property
    def suspects(self) -> list[str]:
        """The requirements that pip names, of which it may have found no file. One for each project.

        If versions are constrained, pip calls it a conflict when a project has no file at all.
        """
        found: dict[str, str] = {}
        for match in _SUSPECT.finditer(self.output):
            with suppress(InvalidRequirement):
                requirement = Requirement(match[1])
                found.setdefault(canonicalize_name(requirement.name), str(requirement))
        return list(found.values())

    @property
    def reason(self) -> str:
        """The last lines that say something."""
        lines = [printable(line).strip() for line in self.output.splitlines()]
        if _CONFLICT in lines:
            block = lines[lines.index(_CONFLICT) :]
            return " / ".join(block[: block.index("") if "" in block else 2 * _SHOWN_LINES])
        told = [line for line in lines if line and not line.startswith(("[notice]", "note:", "hint:"))]
        errors = [line for line in told if "rror" in line]
        return " / ".join((errors or told)[-_SHOWN_LINES:]) or "nothing"


def pip(arguments: Sequence[str], progress: Progress) -> PipFailed | None:
    """Run pip, and report its steps. Raises InputError if this environment has no pip."""
    # importlib.util.find_spec would make setuptools believe that this is pip: importing it would then warn.
    if PathFinder.find_spec("pip") is None:
        raise InputError(f"{sys.prefix} has no pip, which collects wheels. Install it with `python -m ensurepip`")
    lines, steps = [], 0
    command = [sys.executable, "-P", "-m", "pip", *arguments, "--no-color", "--progress-bar=off"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**_without_pythonpath(), **_BUILD},
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                if _STEP.match(line):
                    steps += 1
                    step = printable(line).partition(" (from")[0].strip()
                    progress(f"steps of pip, {step[:80]}", steps, None)
        except BaseException:
            process.kill()
            raise
    return PipFailed("".join(lines)) if process.returncode else None


def _without_pythonpath() -> dict[str, str]:
    """The environment without the path of this project's code, which builds of other packages must not see."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build(requirement: str, constraints: Path, folder: Path, progress: Progress, *, own: bool = False) -> Path | str:
    """Build one wheel without what it needs, into an empty folder; returns its path, or why there is none.

    What builds this project is used from this environment if it is there (``own``).
    """
    arguments = ["wheel", "--no-deps", f"--wheel-dir={folder}", f"--constraint={constraints}"]
    if own and PathFinder.find_spec("hatchling") is not None:
        arguments.append("--no-build-isolation")
    if failed := pip([*arguments, requirement], progress):
        return "pip finds neither a wheel nor source" if failed.suspects else f"building it failed: {failed.reason}"
    found = list(folder.glob("*.whl"))
    return found[0] if len(found) == 1 else f"pip made {len(found)} wheels instead of one"
