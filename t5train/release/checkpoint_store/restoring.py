"""Restores the newest checkpoint of a run from its bucket."""

import logging
from pathlib import Path

from t5train.errors import DigestMismatch, NothingVerifies, RecordError, StorageError
from t5train.files.atomic import discard, filling, partial_of
from t5train.files.confined import confined, require_distinct
from t5train.files.os_errors import explain
from t5train.files.presence import is_there
from t5train.files.run_folder import CHECKPOINTS, METRICS, SET_ASIDE
from t5train.files.set_aside import set_aside
from t5train.progress import Progress
from t5train.records.stage_records import MANIFEST, StoredCheckpoint
from t5train.release.checkpoint_store.ledger import Ledger, StoredTag
from t5train.release.fetching import copy_files
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.verification import manifest_in

_log = logging.getLogger(__name__)


def restore_newest(
    bucket: BucketFolder, ledger: Ledger, run_folder: Path, held: str | None, progress: Progress
) -> list[str]:
    """Copy the newest intact checkpoint to a run's folder, unless the run has it, or a newer one.

    Every file is verified as it is written, and an interrupted copy is continued. What is in the way, such as an
    unfinished checkpoint of the same step, is set aside.

    Args:
        bucket: The bucket of the run.
        ledger: The run's ledger.
        run_folder: The folder of the run.
        held: The newest complete checkpoint that the run has; None if it has none.
        progress: Called with the number of bytes that are on disk.

    Returns:
        The newer checkpoints in the bucket that are damaged.

    Raises:
        NothingVerifies: There are checkpoints, but none is intact, and the run has none.
        StoreError: The server does not answer.
        StorageError: The folder cannot be written, or is too small.

    """
    damaged = dict[str, str]()
    for stored in sorted(ledger.checkpoints, key=lambda one: one.tag, reverse=True):
        if held is not None and stored.tag <= held:
            break
        try:
            _restore(bucket, ledger, stored, run_folder, progress)
        except (DigestMismatch, RecordError) as error:
            _log.warning("%s in %s is damaged: %s", stored.tag, bucket.url, error)
            damaged[stored.tag] = str(error)
            discard(partial_of(run_folder / CHECKPOINTS / stored.tag))
            continue
        _log.info("%s was restored from %s", stored.tag, bucket.url)
        return [*damaged]
    if damaged and held is None:
        reasons = "; ".join(f"{tag}: {why}" for tag, why in damaged.items())
        raise NothingVerifies(
            f"run {run_folder.name} has no intact checkpoint, neither here nor in {bucket.url}: {reasons}. Restore the "
            "objects, or begin at step 0 with --begin-again"
        )
    return [*damaged]


def _restore(bucket: BucketFolder, ledger: Ledger, stored: StoredTag, run_folder: Path, progress: Progress) -> None:
    where, target = bucket.below(stored.folder), run_folder / CHECKPOINTS / stored.tag
    record = manifest_in(where)
    if not isinstance(record, StoredCheckpoint) or (record.tag, record.inputs.get("run")) != (
        stored.tag,
        ledger.fingerprint,
    ):
        raise RecordError(f"{where.url}/{MANIFEST} is not that of {stored.tag} of this run")
    for name in record.files:
        confined(target, name, f"{where.url}/{MANIFEST}")
    require_distinct(record.files, f"{where.url}/{MANIFEST}")
    set_aside(target, run_folder / SET_ASIDE, f"it is not complete, and {stored.tag} is restored from {bucket.url}")
    try:
        with filling(target, keep_unfinished=True) as unfinished:
            copy_files(where, record, unfinished, progress)
            if is_there(unfinished / METRICS) and not is_there(run_folder / METRICS):
                (unfinished / METRICS).rename(run_folder / METRICS)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {explain(error)}") from error
