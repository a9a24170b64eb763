"""The code and the packages that the bytes of a stage's result depend on: all hosts must have the head's."""

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from infra.node.code_bundle import own_bundle
from t5train.errors import HostMisconfigured


@dataclass(frozen=True)
class Makers:
    """What the bytes of a result depend on, so the head and all hosts must have the same."""

    code: str
    """The digest of this project's code."""
    versions: Mapping[str, str]
    """The versions of Python and of packages; empty for a package that is missing."""


def own_makers(packages: Iterable[str], code: str | None = None) -> Makers:
    """Return what this process has of these; ``code`` is the digest of code that is used in its place."""
    versions = {"Python": platform.python_version()} | {package: _version(package) for package in packages}
    return Makers(code or own_bundle().digest, versions)


def require_same(makers: Makers, remedy: str) -> None:
    """Raise HostMisconfigured unless this host has what the head has. ``remedy``: what helps, other than that."""
    own = own_makers(name for name in makers.versions if name != "Python")
    different = [name for name, wanted in makers.versions.items() if own.versions[name] != wanted]
    if different:
        raise HostMisconfigured(_difference(different, own, makers, remedy))
    if own.code != makers.code:
        raise HostMisconfigured(
            "the code of this project is not the head's, and could give another result. Install the head's version "
            "there, or use --ship-code"
        )


def _difference(different: list[str], own: Makers, head: Makers, remedy: str) -> str:
    found = ", ".join(f"{name} {own.versions[name] or 'missing'}" for name in different)
    wanted = ", ".join(f"{name} {head.versions[name] or 'missing'}" for name in different)
    packages = [f"{name}=={head.versions[name]}" for name in different if name != "Python" and head.versions[name]]
    command = f" ({sys.executable} -m pip install {' '.join(packages)})" if packages else ""
    return f"{found}, the head has {wanted}. Install the head's versions there{command}, {remedy}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
