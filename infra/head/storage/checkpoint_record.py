"""The head's records of checkpoints on hosts: the last complete one, and the hosts that still have abandoned ones."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from infra.head.storage.checkpoint_inventory import FoundTag, Survey, finished_once, missing_parts
from infra.node.storage.stored_checkpoints import HEAD
from t5train.checkpoint import resume_point
from t5train.checkpoint.resume_point import LastComplete, nothing_verifies
from t5train.errors import NothingVerifies, RecordError
from t5train.files.atomic import write_json
from t5train.files.presence import ABSENT, reading
from t5train.files.run_folder import NOT_BEGUN_AGAIN, is_tag

_MOST_FILES = 4


def note(run_folder: Path, tag: FoundTag) -> None:
    """Record the newest complete checkpoint."""
    resume_point.note_complete(run_folder, tag.name, tag.places)


def note_adopted(run_folder: Path, survey: Survey) -> None:
    """Record the newest checkpoint of an adopted run, whether it is complete on these hosts or not.

    Only the run's former head knows which checkpoints were complete. If parts of one are missing here, it must not be
    overwritten like a checkpoint that was never finished.
    """
    newest = max((name for inventory in survey.found.values() for name in inventory if is_tag(name)), default="")
    seen = resume_point.last_complete(run_folder)
    if newest and (seen is None or seen.tag < newest):
        resume_point.note_complete(run_folder, newest)


def former_hosts(run_folder: Path) -> list[str]:
    """Return the hosts that had parts of the last complete checkpoint."""
    seen = resume_point.last_complete(run_folder)
    return sorted({place for places in seen.places.values() for place in places if place != HEAD}) if seen else []


def note_not_begun_again(run_folder: Path, hosts: Collection[str]) -> None:
    """Record the hosts whose checkpoints must still be set aside, because the run has begun again without them."""
    if hosts or not_begun_again(run_folder):
        write_json(run_folder / NOT_BEGUN_AGAIN, sorted(hosts))


def not_begun_again(run_folder: Path) -> set[str]:
    """Return the hosts that ``note_not_begun_again`` recorded. Raises Unreadable, or RecordError if it is damaged."""
    path = run_folder / NOT_BEGUN_AGAIN
    try:
        with reading(path):
            return set(json.loads(path.read_bytes()))
    except ABSENT:
        return set()
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}). It must be a JSON list of the hosts that still have checkpoints from before "
            "the run began again (--begin-again), which are to be moved aside. Write that list into the file"
        ) from error


def nothing_complete(run_folder: Path, survey: Survey, damaged: Sequence[str]) -> NothingVerifies | None:
    """Return the error for a run that had a complete checkpoint and has none now; None if it never had one.

    ``damaged`` describes the checkpoints that looked complete but were not.
    """
    seen = resume_point.last_complete(run_folder)
    if seen is None and not finished_once(survey.found):
        return None
    said = [*(_missing(seen, survey) if seen else ()), *damaged, *(str(each) for each in survey.silent.values())]
    return nothing_verifies(run_folder, said or list(missing_parts(survey.found).values()))


def _missing(seen: LastComplete, survey: Survey) -> list[str]:
    held = {file for inventory in survey.found.values() if seen.tag in inventory for file in inventory[seen.tag].files}
    missing: Mapping[str, Sequence[str]] = {file: at for file, at in seen.places.items() if file not in held}
    named = [
        f"{file} (last seen {seen.at} on {', '.join(place or 'the head' for place in missing[file])})"
        for file in sorted(missing)[:_MOST_FILES]
    ]
    more = f" and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
    return [f"{seen.tag} lacks {', '.join(named)}{more}"] if named else []
