"""What a measurement depends on, apart from its settings: the code, the versions and the machine."""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from os import environ
from pathlib import Path

from infra.head.plain_ranks import rank_variables
from tests.support.hardware import hardware

CHECKOUT = Path(__file__).parents[1]
_MEASURED = ("t5train", "infra", "benchmarks")
_RESULTS = "benchmarks/results"
_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "triton")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def code_digest(checkout: Path = CHECKOUT) -> str:
    """Return a digest of all Python files that a measurement runs, committed or not."""
    digest = hashlib.sha256()
    for folder in _MEASURED:
        for path in sorted((checkout / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(checkout)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit(given: str | None = None, checkout: Path = CHECKOUT) -> str:
    """Return the commit of the checkout, with ``, changed`` if code that is measured has changed since.

    ``given`` goes first: a copy of the tree may have no repository, or one of its own. The digest of the code shows
    whether it is true.
    """
    if given:
        return given
    try:
        head = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--", *_MEASURED, f":!{_RESULTS}")
    except (OSError, subprocess.CalledProcessError):
        return "not known"
    return head + (", changed" if changed else "")


def machine_id() -> str:
    """Return an id of this machine since its last restart."""
    boot = _BOOT.read_text("utf-8").strip() if _BOOT.exists() else ""
    return hashlib.sha256(f"{platform.node()}|{boot}".encode()).hexdigest()[:12]


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Python and of every package that speed or results depend on."""
    return (("python", platform.python_version()), *((package, _version(package)) for package in _PACKAGES))


@cache
def device_name(accelerator: str | None) -> str:
    """Return the name of the accelerator, asked in another process, as this one must not use memory on it."""
    code = "from t5train.train.peak_flops import accelerator_name as name; print(name() or '')"
    variables = {**environ, **rank_variables(1, accelerator)}
    asked = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, check=True, text=True)
    return asked.stdout.removesuffix("\n").rpartition("\n")[2] or hardware()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(checkout: Path, *arguments: str) -> str:
    command: Sequence[str] = ("git", "-C", str(checkout), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
