"""Identity of a value: sha256 of its canonical JSON; and what differs between two identities."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no whitespace, the same text for equal values on every machine.

    Raises TypeError for what has no canonical form (sets, bytes, objects, non-string keys) and ValueError
    for NaN and infinities, rather than fingerprint something by its ``repr``.
    """
    _require_canonical(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 (64 hexadecimal digits) of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def is_sealed(document: Mapping[str, Any], seal: str) -> bool:
    """Whether the value of the key ``seal`` is the fingerprint of everything else: the document is as it was written.

    That holds for documents of other versions too, with fields that this one does not know.
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
