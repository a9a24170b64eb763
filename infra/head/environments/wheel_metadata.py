"""Reads what wheels need, and decides which of them a set of requirements needs on another machine.

pip evaluates the conditions of requirements (``; python_version < "3.12"``) for the Python that it runs with, even when
it downloads for another one. The wheels themselves are therefore asked here, for the machine that they are for.
"""

import platform
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from functools import cached_property
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ARCHITECTURES = ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64", "armv7l", "i686")
_METADATA_BYTES = 8 << 20


@dataclass(frozen=True)
class WheelFile:
    """A wheel on this machine's disk."""

    path: Path

    @property
    def project(self) -> str:
        """The normalised name of what it contains."""
        return canonicalize_name(self.path.name.split("-")[0])

    @property
    def version(self) -> str:
        """The version, as in the file's name."""
        return self.path.name.split("-")[1]

    @property
    def is_pure(self) -> bool:
        """Whether it suits every kind of machine."""
        return self.path.name.endswith("-none-any.whl")

    @property
    def unpacked_bytes(self) -> int:
        """What its files take on disk."""
        with zipfile.ZipFile(self.path) as archive:
            return sum(entry.file_size for entry in archive.infolist())

    @cached_property
    def requirements(self) -> list[Requirement]:
        """What it needs, with the conditions under which it does."""
        with zipfile.ZipFile(self.path) as archive:
            (entry,) = (
                each
                for each in archive.infolist()
                if each.filename.endswith(".dist-info/METADATA") and each.filename.count("/") == 1
            )
            if entry.file_size > _METADATA_BYTES:
                raise zipfile.BadZipFile(f"its METADATA has {entry.file_size} bytes")
            headers = BytesHeaderParser().parsebytes(archive.read(entry))
        return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def is_intact(path: Path) -> bool:
    """Whether a file is a whole zip file: the end of one that was cut off is missing, and checksums find the rest."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError):
        return False


def markers(python: str, platforms: Iterable[str]) -> dict[str, str]:
    """The values that conditions are evaluated with, for the newest patch release of ``python`` on these platforms."""
    found = {name: str(value) for name, value in default_environment().items()}
    if python != f"{sys.version_info.major}.{sys.version_info.minor}":
        full = f"{python}.99"
        found |= {"python_version": python, "python_full_version": full, "implementation_version": full}
    machine = next((each for name in platforms for each in _ARCHITECTURES if name.endswith(f"_{each}")), None)
    return found | {"platform_machine": machine or platform.machine()}


@dataclass(frozen=True)
class Closure:
    """The wheels that requirements need, and requirements for which there is no wheel."""

    wheels: list[WheelFile]
    missing: list[str]


def closure(wheels: Iterable[WheelFile], requirements: Iterable[str], values: dict[str, str]) -> Closure:
    """Return what ``requirements`` need of these wheels. Of each project, there must be one wheel at most."""
    by_project = {wheel.project: wheel for wheel in wheels}
    found: dict[str, WheelFile] = {}
    missing: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        project = canonicalize_name(requirement.name)
        wheel = by_project.get(project)
        if wheel is None or not (requirement.url or requirement.specifier.contains(wheel.version, prereleases=True)):
            missing[_without_condition(requirement)] = None
            continue
        found[project] = wheel
        for extra in {"", *requirement.extras} - {each for name, each in seen if name == project}:
            seen.add((project, extra))
            waiting += [
                each
                for each in wheel.requirements
                if each.marker is None or each.marker.evaluate({**values, "extra": extra})
            ]
    return Closure(sorted(found.values(), key=lambda each: each.path.name.lower()), list(missing))


def _without_condition(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"
