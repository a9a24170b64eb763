"""What lies on a node and no run needs. Standard library only, as nodes import it.

What this cannot judge is left: a run of which the head that asks knows nothing may be another head's.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.node_folder import CODE, node_folder
from infra.node_store.occupancy import is_at_work, remove_unused, staged_places, users
from infra.node_store.paths import SHARDS, STAGED, run_place, scratch_folder, within
from infra.node_store.sent_code import remove_code, unused_code
from t5train.atomic_folder import discard
from t5train.run_files import CHECKPOINTS, RUNS


@dataclass(frozen=True)
class Garbage:
    """A folder by its place within the scratch folder, or on the head within the root; its size in bytes.

    Code that was sent lies within the node folder.
    """

    place: str
    size: int
    why: str


def garbage(request: dict[str, Any]) -> dict[str, Any]:
    """What no run needs here; ``finished`` are runs whose last checkpoint the head has, by ``name_on_nodes``."""
    return {"found": [asdict(each) for each in _found(scratch_folder(request["scratch"]), request["finished"])]}


def free(request: dict[str, Any]) -> dict[str, Any]:
    """Remove ``places``, as far as no run needs them now; the answer says which were removed."""
    scratch = scratch_folder(request["scratch"])
    found = [each for each in _found(scratch, request["finished"]) if each.place in request["places"]]
    return {"freed": [each.place for each in found if _remove(scratch, each.place)]}


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; what goes away meanwhile does not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def _found(scratch: Path, finished: Sequence[str]) -> Iterator[Garbage]:
    for place in staged_places(scratch):
        if not users(scratch, place):
            yield Garbage(place, size_of(within(scratch, place)), "staged, and used by no run")
    for folder in sorted((scratch / RUNS).glob("[!.]*")):
        if folder.name in finished and not is_at_work(folder.name):
            yield Garbage(run_place(folder.name), size_of(folder), "the head has the finished run")
    for folder in unused_code():
        yield Garbage(f"{CODE}/{folder.name}", size_of(folder), "code that was sent, and is used by no attempt")
    for parent in (SHARDS, STAGED, RUNS, f"{RUNS}/*/{CHECKPOINTS}"):
        for folder in sorted(scratch.glob(f"{parent}/.*.discarded")):
            yield Garbage(str(folder.relative_to(scratch)), size_of(folder), "left by a removal that was killed")


def _remove(scratch: Path, place: str) -> bool:
    if place.startswith(f"{CODE}/"):
        return remove_code(within(node_folder(), place))
    if place in staged_places(scratch):
        return remove_unused(scratch, place)
    discard(within(scratch, place))
    return True
