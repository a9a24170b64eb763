"""Which checkpoint a run resumes from, and what becomes of newer ones that are damaged: they are moved aside.

A checkpoint is passed over only when something of it is provably absent or different. Where that cannot be known now,
the start is refused. Nothing here deletes anything, and nothing imports torch.
"""

import logging
from datetime import UTC, datetime
from pathlib import Path

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.last_complete import LastComplete, last_complete, note
from t5train.errors import IncompleteCheckpoint, NothingVerifies, SpecError
from t5train.files import run_folder as run_files
from t5train.files.atomic import sync_folder, write_text
from t5train.files.presence import is_folder, is_there, names_in
from t5train.files.run_folder import is_tag
from t5train.files.set_aside import set_aside
from t5train.progress import Progress, silent
from t5train.records.stage_records import MANIFEST

_MOST_REASONS = 3
_log = logging.getLogger(__name__)


def tags_in(checkpoints: Path) -> list[str]:
    """Tags of a run, the newest first, in whatever state."""
    return [name for name in reversed(names_in(checkpoints)) if is_tag(name) and is_folder(checkpoints / name)]


def resume_tag(run_folder: Path, progress: Progress = silent) -> str | None:
    """``newest_verified_tag``, with damaged tags that are newer moved aside; the caller holds the run, without ranks.

    Where the user asked to begin again, all tags are moved aside and there is none.
    """
    if is_asked_to_begin_again(run_folder):
        _begin_again(run_folder)
        return None
    tag, last = newest_verified_tag(run_folder, progress), last_complete(run_folder)
    if tag is not None:
        _set_newer_aside(run_folder, tag, last)
        if last is not None and last.tag > tag:
            _log.warning("%s was complete at %s, and is not any more: training goes on from %s", last.tag, last.at, tag)
        if last is None or last.tag != tag:
            note(run_folder, tag)
    return tag


def newest_verified_tag(run_folder: Path, progress: Progress = silent) -> str | None:
    """The newest tag whose every file has its digest; None for a run that never completed one.

    One that is unfinished or damaged is passed over with a warning. Raises NothingVerifies when no other is left, and
    Unreadable, UnknownVersion or UnlistedFile when that cannot be known of the newest that may be whole.
    """
    checkpoints, reasons = run_folder / run_files.CHECKPOINTS, list[str]()
    found = tags_in(checkpoints)
    for tag in found:
        try:
            written_as = tags.require_complete(checkpoints / tag, progress)[0].tag
        except IncompleteCheckpoint as error:
            reasons.append(str(error))
        else:
            if written_as == tag:
                return tag
            reasons.append(f"{checkpoints / tag} was {written_as} before: it was renamed")
        _log.warning("%s is passed over: %s", tag, reasons[-1])
    last = last_complete(run_folder)
    if last is None and all(is_unfinished(checkpoints / tag) for tag in found):
        return None
    if last is not None and last.tag not in found:
        reasons.insert(0, f"{checkpoints / last.tag}, which was complete at {last.at}, is missing")
    raise nothing_verifies(run_folder, reasons)


def nothing_verifies(run_folder: Path, reasons: list[str]) -> NothingVerifies:
    """The error for a run that had complete checkpoints and has none any more."""
    more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return NothingVerifies(
        f"no checkpoint of {run_folder.name} is complete any more: {'; '.join(reasons[:_MOST_REASONS])}{more}. Bring "
        "back the host, the disk or the files; or begin at step 0 with --begin-again, which deletes nothing: it moves "
        f"what is left to {run_folder / run_files.SET_ASIDE}"
    )


def is_unfinished(folder: Path) -> bool:
    """Whether the sidecar of some rank is absent, as a save that was killed leaves a tag: nothing can resume from it.

    A sidecar that is there, in whatever state, was written when its rank had finished. Raises Unreadable.
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
    """Have the next start of the ranks move all checkpoints aside, here and on hosts, and begin at step 0.

    Asked durably, as a start may fail before it gets so far. A run that has ended is open again. One that has never
    begun under this root may be about to adopt checkpoints on hosts.
    """
    set_aside(run_folder / MANIFEST, run_folder / run_files.SET_ASIDE, "the run begins again")
    write_text(run_folder / run_files.BEGIN_AGAIN, f"asked at {datetime.now(UTC).isoformat(timespec='seconds')}\n")


def is_asked_to_begin_again(run_folder: Path) -> bool:
    """Whether the user did, and it has not come to pass."""
    return is_there(run_folder / run_files.BEGIN_AGAIN)


def require_no_pending_begin_again(run_folder: Path) -> None:
    """SpecError where an earlier command was given --begin-again and failed before it began again."""
    if is_asked_to_begin_again(run_folder):
        raise SpecError(
            f"an earlier --begin-again of run {run_folder.name} has not taken effect. Repeat --begin-again to train "
            f"from step 0, or remove {run_folder / run_files.BEGIN_AGAIN} to resume from the last checkpoint"
        )


def _begin_again(run_folder: Path) -> None:
    checkpoints, aside = run_folder / run_files.CHECKPOINTS, run_folder / run_files.SET_ASIDE
    for tag in tags_in(checkpoints):
        set_aside(checkpoints / tag, aside, "the run begins again at step 0")
    set_aside(run_folder / run_files.LAST_COMPLETE, aside, "the run begins again at step 0")
    (run_folder / run_files.BEGIN_AGAIN).unlink()  # last: until then the next start does all this again
    sync_folder(run_folder)


def _set_newer_aside(run_folder: Path, tag: str, last: LastComplete | None) -> None:
    """Move away what is newer than ``tag`` and was complete once; what was never finished may be written again."""
    checkpoints = run_folder / run_files.CHECKPOINTS
    for newer in tags_in(checkpoints):
        never_complete = last is None or newer > last.tag
        if newer > tag and not (never_complete and is_unfinished(checkpoints / newer)):
            why = f"it is damaged, and newer than {tag}, from which training resumes"
            set_aside(checkpoints / newer, run_folder / run_files.SET_ASIDE, why)
