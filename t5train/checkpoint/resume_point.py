"""Choose the checkpoint that a run resumes from, and move newer ones that are damaged aside.

A checkpoint is skipped only if a part of it is provably missing or changed. If that cannot be determined now, the run
does not start. The record of the last complete checkpoint distinguishes a lost checkpoint from one that was never
finished. Nothing here deletes anything or imports torch.
"""

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from t5train.checkpoint import sidecar, tags
from t5train.errors import IncompleteCheckpoint, NothingVerifies, RecordError, SpecError
from t5train.files.atomic import discard, set_aside, sync_folder, write_json, write_text
from t5train.files.presence import ABSENT, is_folder, is_there, names_in, reading
from t5train.files.run_folder import BEGIN_AGAIN, BEGINNINGS, CHECKPOINTS, LAST_COMPLETE, SET_ASIDE, STORING, is_tag
from t5train.progress import Progress, silent
from t5train.records.stage_records import MANIFEST

_MOST_REASONS = 3


@dataclass(frozen=True)
class LastComplete:
    """A checkpoint that was complete at the time ``at``."""

    tag: str
    at: str
    places: Mapping[str, Sequence[str]]
    """The hosts that had each file, if hosts do not share a disk."""


def note_complete(run_folder: Path, tag: str, places: Mapping[str, Sequence[str]] | None = None) -> None:
    """Record that a tag is complete, durably."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run_folder / LAST_COMPLETE, {"tag": tag, "at": at, "places": places or {}})


def last_complete(run_folder: Path) -> LastComplete | None:
    """The last recorded checkpoint; None if none was ever complete. Raises Unreadable and RecordError."""
    path = run_folder / LAST_COMPLETE
    try:
        with reading(path):
            return LastComplete(**json.loads(path.read_bytes()))
    except ABSENT:
        return None
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}). That file records the run's last complete checkpoint. Restore the file, or "
            "move it to another folder: the run then resumes from the newest checkpoint that is still complete, but "
            "begins at step 0 if no checkpoint was finished or all are lost"
        ) from error


def nothing_verifies(run_folder: Path, reasons: list[str]) -> NothingVerifies:
    """The error for a run that had complete checkpoints and has none left."""
    more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return NothingVerifies(
        f"run {run_folder.name} has no complete checkpoint left: {'; '.join(reasons[:_MOST_REASONS])}{more}. Bring "
        "back the host, the disk or the files, or begin at step 0 with --begin-again, which deletes nothing: it moves "
        f"the remaining files to {run_folder / SET_ASIDE}"
    )


_log = logging.getLogger(__name__)


def tags_in(checkpoints: Path) -> list[str]:
    """All tags of a run, complete or not, the newest first."""
    return [name for name in reversed(names_in(checkpoints)) if is_tag(name) and is_folder(checkpoints / name)]


def resume_tag(run_folder: Path, progress: Progress = silent) -> str | None:
    """Return the ``newest_verified_tag``, after moving newer tags that are damaged aside.

    The caller must hold the run's lock, and no ranks may be running. If the user asked to begin again, all tags are
    moved aside, and None is returned.
    """
    if is_asked_to_begin_again(run_folder):
        _begin_again(run_folder)
        return None
    tag, last = newest_verified_tag(run_folder, progress), last_complete(run_folder)
    if tag is not None:
        _set_newer_aside(run_folder, tag, last)
        if last is not None and last.tag > tag:
            _log.warning("%s was complete at %s but no longer is: resuming from %s", last.tag, last.at, tag)
        if last is None or last.tag != tag:
            note_complete(run_folder, tag)
    return tag


def newest_verified_tag(run_folder: Path, progress: Progress = silent) -> str | None:
    """The newest tag whose files, and those of its best tag, match their digests; None if none was ever complete.

    Unfinished and damaged tags are skipped with a warning. Raises NothingVerifies if no complete tag is left. Raises
    Unreadable, UnknownVersion or UnlistedFile if it cannot be determined whether a tag is complete: an older one
    must not be used in its place.
    """
    checkpoints, reasons = run_folder / CHECKPOINTS, list[str]()
    found = tags_in(checkpoints)
    for tag in found:
        try:
            first = tags.require_complete(checkpoints / tag, progress)[0]
            tags.require_best(checkpoints, first, progress)
        except IncompleteCheckpoint as error:
            reasons.append(str(error))
        else:
            if first.tag == tag:
                return tag
            reasons.append(f"{checkpoints / tag} was renamed: it was written as {first.tag}")
        _log.warning("skipping %s: %s", tag, reasons[-1].removesuffix(". Choose another tag"))
    last = last_complete(run_folder)
    if last is None and all(is_unfinished(checkpoints / tag) for tag in found):
        return None
    if last is not None and last.tag not in found:
        reasons.insert(0, f"{checkpoints / last.tag}, which was complete at {last.at}, is missing")
    raise nothing_verifies(run_folder, reasons)


def is_unfinished(folder: Path) -> bool:
    """Whether a rank's sidecar is missing, as after a save that was killed. No run can resume from such a tag.

    A sidecar that exists, even a damaged one, was written after its rank had finished. Raises Unreadable and
    UnknownVersion.
    """
    present = [name for name in names_in(folder) if sidecar.is_sidecar(name)]
    for name in present:
        try:
            world_size = sidecar.read(folder, int(name[5:-5])).world_size
        except (IncompleteCheckpoint, ValueError):
            continue
        return not set(present).issuperset(map(sidecar.sidecar_name, range(world_size)))
    return not present


def ask_to_begin_again(run_folder: Path) -> None:
    """Make the next start of the ranks move all checkpoints aside, here and on hosts, and begin at step 0.

    The request is stored on disk, because a start may fail before it takes effect. A run that has ended is reopened.
    The request also applies to a run that has never begun under this root, because such a run can adopt checkpoints
    that hosts have.
    """
    set_aside(run_folder / MANIFEST, run_folder / SET_ASIDE, "the run begins again")
    write_text(run_folder / BEGIN_AGAIN, f"asked at {datetime.now(UTC).isoformat(timespec='seconds')}\n")


def is_asked_to_begin_again(run_folder: Path) -> bool:
    """Whether the user asked to begin again, and that has not happened yet."""
    return is_there(run_folder / BEGIN_AGAIN)


def beginnings(run_folder: Path) -> tuple[str, ...]:
    """An id for each time that the run has begun again. Checkpoints of other beginnings must not be resumed from.

    Raises Unreadable, and RecordError if the file is damaged.
    """
    path = run_folder / BEGINNINGS
    try:
        with reading(path):
            return tuple(map(str, json.loads(path.read_bytes())))
    except ABSENT:
        return ()
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}). It must have a JSON list with an id for each time that the run began again. "
            "Restore it, or move it away and begin again with --begin-again"
        ) from error


def note_beginnings(run_folder: Path, ids: Sequence[str]) -> None:
    """Record the ids of a run's beginnings, durably."""
    write_json(run_folder / BEGINNINGS, list(ids))


def require_no_pending_begin_again(run_folder: Path) -> None:
    """Raise SpecError if an earlier command with --begin-again failed before it took effect."""
    if is_asked_to_begin_again(run_folder):
        raise SpecError(
            f"an earlier --begin-again of run {run_folder.name} has not taken effect. Repeat --begin-again to train "
            f"from step 0, or remove {run_folder / BEGIN_AGAIN} to resume from the last checkpoint"
        )


def _begin_again(run_folder: Path) -> None:
    checkpoints, aside = run_folder / CHECKPOINTS, run_folder / SET_ASIDE
    for tag in tags_in(checkpoints):
        set_aside(checkpoints / tag, aside, "the run begins again at step 0")
    set_aside(run_folder / LAST_COMPLETE, aside, "the run begins again at step 0")
    discard(run_folder / STORING)
    note_beginnings(run_folder, (*beginnings(run_folder), secrets.token_hex(8)))
    (run_folder / BEGIN_AGAIN).unlink()  # last, so that the next start repeats this if it is interrupted
    sync_folder(run_folder)


def _set_newer_aside(run_folder: Path, tag: str, last: LastComplete | None) -> None:
    """Move tags that are newer than ``tag`` aside if they may once have been complete; others may be overwritten."""
    checkpoints = run_folder / CHECKPOINTS
    for newer in tags_in(checkpoints):
        never_complete = last is None or newer > last.tag
        if newer > tag and not (never_complete and is_unfinished(checkpoints / newer)):
            why = f"it is damaged and newer than {tag}, which training resumes from"
            set_aside(checkpoints / newer, run_folder / SET_ASIDE, why)
