"""A wheelhouse: a folder of wheels for one Python and kind of machine, and ``wheelhouse.json``, which lists them.

The list is written last and atomically. Only files that it names are installed, and only with the digests that it
records. Its names are plain names of wheels, so that none leads out of a folder, neither here nor on a host.
"""

import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from t5train.errors import DigestMismatch, InputError, RecordError
from t5train.files.atomic import write_text
from t5train.files.os_errors import explain
from t5train.records.digests import FileDigest, verify_file
from t5train.spec import settings

MANIFEST = "wheelhouse.json"
_MAX_NAME_CHARACTERS = 200
_TAG = r"[A-Za-z0-9_.]+"
_WHEEL = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9_.]*-[A-Za-z0-9_.+!]+(?:-[0-9][A-Za-z0-9_.]*)?-{_TAG}-{_TAG}-{_TAG}\.whl", re.ASCII
)
_PLATFORM = re.compile(r"[a-z][a-z0-9_]{0,60}", re.ASCII)


def this_python() -> str:
    """The minor version of this Python, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def is_wheel_name(name: str) -> bool:
    """Whether a name is that of a wheel, without any folder."""
    return len(name) <= _MAX_NAME_CHARACTERS and _WHEEL.fullmatch(name) is not None


def is_platform(name: str) -> bool:
    """Whether a name can be that of a platform, such as manylinux_2_28_x86_64."""
    return _PLATFORM.fullmatch(name) is not None


def _wheel_name(name: str) -> str:
    if not is_wheel_name(name):
        raise ValueError(f"{name[:80]!r} is not the plain name of a wheel")
    return name


def _platform(name: str) -> str:
    if not is_platform(name):
        raise ValueError(f"{name[:80]!r} is not the name of a platform")
    return name


class Wheel(FileDigest):
    """A wheel: its name, size and sha256, and how much disk space its files take when they are installed."""

    name: Annotated[str, AfterValidator(_wheel_name)]
    unpacked_bytes: int = Field(ge=0)


class Wheelhouse(BaseModel):
    """The content of ``wheelhouse.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["wheelhouse"] = "wheelhouse"
    schema_version: Literal[1] = 1
    python: str = Field(pattern=r"^3\.[0-9]{1,2}$")
    """The minor version of Python that the wheels are for, such as 3.11."""
    platforms: tuple[Annotated[str, AfterValidator(_platform)], ...]
    requirements: tuple[str, ...]
    """What was asked for; the wheels are these and everything that they need."""
    constraints_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """The digest of the constraints on versions that held when the wheels were collected."""
    wheels: tuple[Wheel, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({wheel.name for wheel in self.wheels}) < len(self.wheels):
            raise ValueError("a wheel is listed twice")
        return self

    @property
    def text(self) -> str:
        """The text of ``wheelhouse.json``."""
        return self.model_dump_json(indent=1) + "\n"

    @property
    def digest(self) -> str:
        """The sha256 of ``text``, which identifies an environment with exactly these wheels."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """The size of all wheels."""
        return sum(wheel.size for wheel in self.wheels)

    def write(self, folder: Path) -> None:
        """Write the list, atomically."""
        write_text(folder / MANIFEST, self.text)


def read_wheelhouse(folder: Path) -> Wheelhouse:
    """Read the list of a wheelhouse. Raises InputError if there is none, RecordError if it is damaged."""
    path = folder / MANIFEST
    try:
        return Wheelhouse.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{folder} is not a wheelhouse: {explain(error)}. Make one with `t5-pretrain wheelhouse {folder}`"
        ) from error
    except ValidationError as error:
        raise RecordError(
            f"{path} is damaged: {settings.explain(error)}. Make it again with `t5-pretrain wheelhouse {folder}`"
        ) from error


def faulty(folder: Path, wheels: Iterable[Wheel]) -> list[str]:
    """Names of those wheels that are missing in the folder, or differ from what is recorded."""
    found = []
    for wheel in wheels:
        try:
            verify_file(folder / wheel.name, FileDigest(size=wheel.size, sha256=wheel.sha256))
        except DigestMismatch:
            found.append(wheel.name)
    return found
