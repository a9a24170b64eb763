"""The copy of a model that a run starts from and that is on the Hub or in a bucket: a folder below the root.

``t5train.release.remote_start`` makes it.
"""

import json
from contextlib import suppress
from pathlib import Path

from t5train.errors import InputError
from t5train.files.atomic import discard
from t5train.records.locations import hub_model, is_remote_model
from t5train.records.stage_records import MANIFEST

STARTS = "starts"
"""The folder below the root that has all copies."""
START_NOTE = "remote-start.json"
"""Says what the folder is a copy of, and which files it has once it is complete."""


def is_awaited(folder: Path) -> bool:
    """Whether a folder is an unfinished copy, which may lack weights."""
    return (folder / START_NOTE).exists() and not (folder / MANIFEST).exists()


def require_copied(start_from: str) -> None:
    """Raise InputError if the model that adapters are for is named by where it was copied from."""
    if is_remote_model(start_from):
        raise InputError(
            f"the model that the adapters are for is given as {start_from}, but must be a folder on this machine. Give "
            f"the folder of its copy, which is below {STARTS} in the root of the run"
        )


def origin(folder: Path) -> str | None:
    """Return what a folder is a copy of, as hf://OWNER/NAME@COMMIT or the URL in a bucket; None if it is no copy."""
    note = folder / START_NOTE
    if not note.exists():
        return None
    try:
        found = json.loads(note.read_bytes())
        start, revision = str(found["start"]), str(found["revision"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{note} is damaged ({error}). Remove {folder}, and start again") from None
    named = hub_model(start)
    return start if named is None else f"hf://{named[0]}@{revision}"


def remove(copy: Path) -> None:
    """Remove a copy, which may be unfinished. If a run names the model again, the newest revision is asked for."""
    for pin in copy.parent.glob(".*.json"):
        with suppress(ValueError):
            if json.loads(pin.read_bytes()).get("folder") == copy.name:
                pin.unlink()
    discard(copy)
