"""Which checkpoint was last seen to be complete, and where its files were: so that it can be said what is missing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from infra.node_store.inventory import HEAD
from infra.node_store.survey import Survey
from infra.node_store.tags import FoundTag, shortcomings
from t5train.atomic import write_json
from t5train.errors import IncompleteCheckpoint

_LEDGER = "last-seen.json"
_MOST_FILES = 4


@dataclass(frozen=True)
class Seen:
    """A checkpoint that was complete at that time."""

    tag: str
    at: str
    places: Mapping[str, Sequence[str]]
    """Where each file was."""

    @property
    def hosts(self) -> set[str]:
        """Those that had some of it."""
        return {place for places in self.places.values() for place in places if place != HEAD}


def note(run_folder: Path, tag: FoundTag) -> None:
    """Remember the newest complete checkpoint."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run_folder / _LEDGER, {"tag": tag.name, "at": at, "places": tag.places})


def last_seen(run_folder: Path) -> Seen | None:
    """The newest checkpoint that was ever seen to be complete."""
    path = run_folder / _LEDGER
    return Seen(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def nothing_complete(run_folder: Path, survey: Survey, damaged: Sequence[str]) -> IncompleteCheckpoint | None:
    """What to say where no checkpoint is complete, though one was; None if none ever was: then the run just begins.

    ``damaged`` tells of those that looked complete and were not.
    """
    if (seen := last_seen(run_folder)) is None:
        return None
    held = {file for inventory in survey.found.values() if seen.tag in inventory for file in inventory[seen.tag].files}
    missing = {file: places for file, places in seen.places.items() if file not in held}
    said = [*(_missing(missing, seen) if missing else ()), *damaged, *(str(each) for each in survey.silent.values())]
    said = said or list(shortcomings(survey.found).values())
    return IncompleteCheckpoint(
        f"no checkpoint of {run_folder.name} is complete any more: {'; '.join(said)}. Bring back the host or the disk, "
        f"or begin anew under another --name (or remove {run_folder / _LEDGER})"
    )


def _missing(missing: Mapping[str, Sequence[str]], seen: Seen) -> list[str]:
    named = [
        f"{file} (last seen {seen.at} on {', '.join(place or 'the head' for place in missing[file])})"
        for file in sorted(missing)[:_MOST_FILES]
    ]
    more = f" and {len(missing) - len(named)} more files" if len(missing) > len(named) else ""
    return [f"{seen.tag} lacks {', '.join(named)}{more}"]
