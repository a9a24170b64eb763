"""Continues a run whose machines are lost, from what it stored in a bucket."""

import logging
from pathlib import Path
from typing import NamedTuple

from t5train.checkpoint import resume_point
from t5train.checkpoint.continuation import changed_settings
from t5train.checkpoint.resume import unique_id
from t5train.checkpoint.resume_point import note_beginnings
from t5train.errors import InputError, RecordError, RunChanged, SpecError
from t5train.files.atomic import write_json
from t5train.files.presence import visible_in
from t5train.files.run_folder import BEGINNINGS, LAST_COMPLETE, LAST_START, RUN
from t5train.release.checkpoint_store.ledger import FoundLedger, read_ledger
from t5train.release.checkpoint_store.store_claim import require_expired
from t5train.release.object_store.bucket import BucketFolder
from t5train.spec import RunSpec, build

_WRITTEN_FIRST = {LAST_COMPLETE, LAST_START, BEGINNINGS}
"""What ``take_identity`` writes before the run has an identity."""
_log = logging.getLogger(__name__)


class StoredRun(NamedTuple):
    """A run in a bucket."""

    bucket: BucketFolder
    found: FoundLedger

    @property
    def config(self) -> str:
        """The configuration file that started the run."""
        return self.found.ledger.config

    @property
    def name(self) -> str:
        """The name of the run."""
        return build(self.found.ledger.run.get("spec", {})).run_name

    @property
    def under(self) -> str:
        """The URL for ``storage.publish_checkpoints_under``."""
        return self.bucket.url.rpartition("/")[0]


def stored_run(url: str) -> StoredRun:
    """Return the run whose checkpoints are at a URL.

    Raises InputError if the URL is not that of a run's folder in S3, RecordError if there is no run, and the errors of
    ``read_ledger``.
    """
    if not url.startswith("s3://"):
        raise InputError(f"{url} is not in S3: give s3://BUCKET/FOLDER/NAME, the folder of a run's checkpoints")
    bucket = BucketFolder(url)
    found = read_ledger(bucket)
    if found is None:
        raise RecordError(
            f"{bucket.url} holds no run: give the folder that storage.publish_checkpoints_under and the run's name make"
        )
    stored = StoredRun(bucket, found)
    if bucket.url.rpartition("/")[2] != stored.name:
        raise InputError(
            f"{bucket.url} holds the checkpoints of the run {stored.name!r}, so the last part of the URL must be "
            f"{stored.name!r}: rename the folder in the bucket"
        )
    return stored


def require_own_settings(spec: RunSpec, stored: StoredRun) -> None:
    """Raise RunChanged if a spec differs from the stored run's in settings that affect the weights."""
    if changed := changed_settings(build(stored.found.ledger.run.get("spec", {})), spec):
        raise RunChanged(
            f"the run in {stored.bucket.url} was begun with other settings ({'; '.join(changed)}), and --from "
            "continues it only with its own: set these back"
        )


def take_identity(spec: RunSpec, stored: StoredRun) -> None:
    """Begin the run's folder on this machine with the identity that the run was begun with.

    Its checkpoint is restored when training starts. Does nothing if this machine has the run already. Raises RunOwned
    if the lease of the head that stores the run's checkpoints is valid, and SpecError if the folder belongs to another
    run.
    """
    folder, ledger = spec.run_folder, stored.found.ledger
    here = unique_id(folder)
    if here == ledger.unique_id:
        return
    if here is not None or (folder.exists() and {path.name for path in visible_in(folder)} - _WRITTEN_FIRST):
        raise SpecError(
            f"{folder} has files of another run, so the run in {stored.bucket.url} cannot be continued there: choose "
            "another --root, or move that folder away"
        )
    require_expired(stored.bucket, stored.found)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    note_beginnings(folder, ledger.beginnings)
    (folder / LAST_COMPLETE).unlink(missing_ok=True)  # of an earlier call that was killed
    if ledger.newest is None:
        _log.warning("%s has no checkpoint yet, so the run begins at step 0", stored.bucket.url)
    else:
        resume_point.note_complete(folder, ledger.newest.tag)  # without it, the run must not begin at step 0
    write_json(folder / RUN, ledger.run)


def config_file(stored: StoredRun, folder: Path) -> Path:
    """Write the run's configuration file to a folder, and return it."""
    path = folder / f"{stored.name}.yaml"
    path.write_text(stored.config, "utf-8")
    return path
