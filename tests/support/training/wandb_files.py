"""Reads what Weights & Biases stores of a run offline: a log in LevelDB's format, with one protocol buffer a record."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES, _FILE_HEADER_BYTES = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    content, offset, parts = path.read_bytes(), _FILE_HEADER_BYTES, b""
    while offset + _HEADER_BYTES <= len(content):
        left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            offset += left
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        parts += content[offset + _HEADER_BYTES : offset + _HEADER_BYTES + length]
        offset += _HEADER_BYTES + length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def segments(run_folder: Path) -> list[Path]:
    """The files of a run's attempts, the oldest first."""
    return sorted(run_folder.glob("wandb/offline-run-*/*.wandb"))


def history(path: Path) -> dict[int, dict[str, Any]]:
    """The metrics in a file: ``{step: {name: value}}``."""
    found: dict[int, dict[str, Any]] = {}
    for record in records(path):
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = items.pop("_step", record.history.step.num)
            found.setdefault(step, {}).update({name: value for name, value in items.items() if name[0] != "_"})
    return found
