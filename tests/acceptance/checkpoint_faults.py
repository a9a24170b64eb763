"""Random damage that disks, copies and people do to a checkpoint's files.

A fault returns the files that it changes, and nothing if the checkpoint has no files of that kind. A change that a JSON
reader ignores (of white space) is not a fault.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from t5train.records.identity import fingerprint

Files = dict[str, bytes | None]
"""Contents by name; None for a missing file."""


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a tag, its undamaged files, the weights that it must give, and the files of a later step."""

    tag: Path
    files: Mapping[str, bytes]
    expected: Mapping[str, torch.Tensor]
    later: Mapping[str, bytes]


Fault = Callable[[Checkpoint, random.Random], Files]


def _any_file(checkpoint: Checkpoint, rng: random.Random) -> tuple[str, bytearray]:
    name = rng.choice(sorted(checkpoint.files))
    return name, bytearray(checkpoint.files[name])


def flipped_bit(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name, content = _any_file(checkpoint, rng)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {name: bytes(content)}


def truncated(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name, content = _any_file(checkpoint, rng)
    return {name: bytes(content[: rng.randrange(len(content) - 1)])}


def zeroed_range(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name, content = _any_file(checkpoint, rng)
    start = rng.choice([position for position, byte in enumerate(content) if byte])
    end = min(len(content), start + rng.randrange(1, 512))
    content[start:end] = bytes(end - start)
    return {name: bytes(content)}


def appended_bytes(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name, content = _any_file(checkpoint, rng)
    return {name: bytes(content) + b"\0" + rng.randbytes(rng.randrange(100))}


def missing(checkpoint: Checkpoint, rng: random.Random) -> Files:
    return {_any_file(checkpoint, rng)[0]: None}


def swapped(checkpoint: Checkpoint, rng: random.Random) -> Files:
    """Two files of the same kind, with their contents swapped."""
    endings = ("model_states.pt", "optim_states.pt", ".json")
    alike = [[name for name in sorted(checkpoint.files) if name.endswith(end)] for end in endings]
    pairs = [names for names in alike if len(names) > 1]
    if not pairs:
        return {}
    one, other = rng.sample(rng.choice(pairs), 2)
    return {one: checkpoint.files[other], other: checkpoint.files[one]}


def stale(checkpoint: Checkpoint, rng: random.Random) -> Files:
    """A file of another step of the same run. None if the tag has only one file: replacing that is no damage."""
    name = rng.choice(sorted(checkpoint.files))
    return {name: checkpoint.later[name]} if len(checkpoint.files) > 1 else {}


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.target,)


def hostile_pickle(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name = rng.choice([name for name in sorted(checkpoint.files) if name.endswith(".pt")])
    return {name: _hostile(checkpoint, name)}


def extra_pickle(checkpoint: Checkpoint, rng: random.Random) -> Files:
    """An extra pickle that no rank wrote, under a name that DeepSpeed would load."""
    name = f"mp_rank_{rng.randrange(1, 99):02d}_model_states.pt"
    return {name: _hostile(checkpoint, name)}


def _hostile(checkpoint: Checkpoint, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        torch.save({"module": Hostile(unpickling_marker(checkpoint))}, Path(scratch) / name)
        return (Path(scratch) / name).read_bytes()


def edited_sidecar(checkpoint: Checkpoint, rng: random.Random) -> Files:
    name, document = _sidecar(checkpoint, rng)
    holder, key = rng.choice(list(_leaves(document)))
    holder[key] = {"changed": repr(holder[key])} if rng.random() < 0.3 else _other_value(holder[key])
    return {name: json.dumps(document).encode()}


def forged_sidecar(checkpoint: Checkpoint, rng: random.Random) -> Files:
    """A sidecar of another run, step or rank, with a correct sha256 of its own content."""
    name, document = _sidecar(checkpoint, rng)
    key = rng.choice(["run_fingerprint", "step", "tag", "rank", "world_size"])
    return {name: _sealed(document | {key: _other_value(document[key])})}


def forged_digest(checkpoint: Checkpoint, rng: random.Random) -> Files:
    """A sidecar with a wrong size or digest of a file.

    Nothing shows which of the two is damaged, so both are returned.
    """
    name, document = _sidecar(checkpoint, rng)
    if not document["files"]:
        return {}
    file = rng.choice(sorted(document["files"]))
    key = rng.choice(["size", "sha256"])
    document["files"][file][key] = _other_value(document["files"][file][key])
    return {name: _sealed(document), file: checkpoint.files[file]}


def _sealed(document: dict[str, Any]) -> bytes:
    content = {key: value for key, value in document.items() if key != "sha256"}
    return json.dumps(content | {"sha256": fingerprint(content)}).encode()


FAULTS: dict[str, Fault] = {
    "flipped bit": flipped_bit,
    "truncated": truncated,
    "zeroed range": zeroed_range,
    "bytes appended": appended_bytes,
    "file missing": missing,
    "files swapped": swapped,
    "file of another step": stale,
    "hostile pickle": hostile_pickle,
    "extra file": extra_pickle,
    "sidecar edited": edited_sidecar,
    "sidecar forged": forged_sidecar,
    "digest forged": forged_digest,
}
SIDECAR_FAULTS = {"sidecar edited", "sidecar forged", "digest forged"}


def _sidecar(checkpoint: Checkpoint, rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice([name for name in sorted(checkpoint.files) if name.endswith(".json")])
    return name, json.loads(checkpoint.files[name])


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every plain value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, dict | list) and item:
            yield from _leaves(item)
        else:
            yield value, key


def _other_value(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return value[:-1] + ("0" if value[-1:] != "0" else "1") if isinstance(value, str) else "other"


def unpickling_marker(checkpoint: Checkpoint) -> Path:
    return checkpoint.tag.parent / "the-pickle-ran"
