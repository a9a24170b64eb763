"""Fingerprints (the sha256 of canonical JSON), differences between two identities, and the provenance of results."""

import hashlib
import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no whitespace: the same text for equal values on every machine.

    Raises TypeError for values without a canonical form (sets, bytes, objects, non-string keys) and ValueError for NaN
    and infinities, instead of fingerprinting their ``repr``.
    """
    _require_canonical(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """The sha256 (64 hexadecimal digits) of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def is_sealed(document: Mapping[str, Any], seal: str) -> bool:
    """Whether a document is unaltered: its key named ``seal`` must hold the fingerprint of everything else.

    This also works for documents of other versions, with fields that this one does not know.
    """
    try:
        return document.get(seal) == fingerprint({key: value for key, value in document.items() if key != seal})
    except (TypeError, ValueError):  # NaN, which no version writes
        return False


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``"part.key: old -> new"`` for everything that differs between two identities."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found.extend(differences(before, after, f"{prefix}{key}."))
        elif before != after:
            found.append(f"{prefix}{key}: {json.dumps(before)} -> {json.dumps(after)}")
    return found


def _require_canonical(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: only finite numbers have a canonical form")
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_canonical(item, f"{where}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys must be strings")
            _require_canonical(item, f"{where}.{key}")
        return
    raise TypeError(f"{where} is a {type(value).__name__}: it has no canonical JSON form")


_log = logging.getLogger(__name__)


class Provenance(BaseModel):
    """Where, when and with which versions a record was made. This is never part of its identity."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    git_commit: str | None
    versions: dict[str, str]
    host: str
    created_at: str


def current_provenance() -> Provenance:
    """The current commit, versions, host and time."""
    return Provenance(
        git_commit=_git_commit(),
        versions=_versions(),
        host=platform.node(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@cache
def _versions() -> dict[str, str]:
    packages = ("t5-pretrain", "torch", "deepspeed", "transformers", "sentencepiece", "numpy", "matplotlib")
    return {"python": platform.python_version(), **installed_versions(packages)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@cache
def _git_commit() -> str | None:
    """Commit of the checkout this package runs from; None when it is installed from a wheel."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", os.fspath(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("cannot determine the git commit of %s: %s", checkout, error)
        return None
