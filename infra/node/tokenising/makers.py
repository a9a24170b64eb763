"""Compares what makes shards on the head and on a host: another version could make other shards of the same text."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from infra.node.code_bundle import own_bundle
from infra.node.tokenising.worker_messages import Makers
from t5train.errors import HostMisconfigured

_PACKAGES = ("distributed", "isal", "numpy", "pyarrow", "sentencepiece")


def own_makers(code: str | None = None) -> Makers:
    """Return what this process would make shards with; ``code`` is the digest of code that is used in its place."""
    versions = {"Python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}
    return Makers(code or own_bundle().digest, versions)


def require_same(makers: Makers) -> None:
    """Raise HostMisconfigured unless this host has what the head has."""
    own = own_makers()
    different = [name for name, wanted in makers.versions.items() if own.versions.get(name) != wanted]
    if different:
        raise HostMisconfigured(_difference(different, own, makers))
    if own.code != makers.code:
        raise HostMisconfigured(
            "the code of this project is not the head's, and could make other shards. Install the head's version "
            "there, or use --ship-code"
        )


def _difference(different: list[str], own: Makers, head: Makers) -> str:
    found = ", ".join(f"{name} {own.versions.get(name) or 'missing'}" for name in different)
    wanted = ", ".join(f"{name} {head.versions[name] or 'missing'}" for name in different)
    packages = [f"{name}=={head.versions[name]}" for name in different if name != "Python" and head.versions[name]]
    command = f" ({sys.executable} -m pip install {' '.join(packages)})" if packages else ""
    return (
        f"{found}, the head has {wanted}. Install the head's versions there{command}, leave the host out with "
        "cluster.exclude, or set shards.executor=local"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
