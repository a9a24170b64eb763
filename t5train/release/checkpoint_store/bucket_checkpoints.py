"""Copies complete checkpoints to the bucket of their run, removes old ones there, and restores the newest."""

import logging
import os
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.retention import kept
from t5train.errors import (
    DigestMismatch,
    IncompleteCheckpoint,
    NothingVerifies,
    RecordError,
    StorageError,
    StoreError,
    T5TrainError,
)
from t5train.files.atomic import discard, filling, partial_of, set_aside
from t5train.files.os_errors import explain
from t5train.files.presence import is_there
from t5train.files.run_folder import CHECKPOINTS, METRICS, SET_ASIDE, STORING, step_of, tag_of
from t5train.progress import Progress
from t5train.records.digests import digest_files
from t5train.records.identity import current_provenance, fingerprint
from t5train.records.stage_records import MANIFEST, StoredCheckpoint
from t5train.release.checkpoint_store.ledger import Ledger, StoredTag, folder_of, is_checkpoint_folder
from t5train.release.checkpoint_store.store_claim import StoreClaim
from t5train.release.fetching import copied, require_names_for
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.bucket_publication import PART_BYTES, publish_to_bucket, published_in
from t5train.release.object_store.measured_file import measure
from t5train.release.verification import manifest_in

_BEST_STEP = "best_step"
"""The count of a stored checkpoint that is the step of the best checkpoint as of it, in runs that choose one."""
_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """Which checkpoints stay in the bucket; see ``t5train.checkpoint.retention.kept``."""

    keep_last: int
    keep_every_steps: int | None


def linked(run_folder: Path, tag: str) -> Path:
    """Return a folder with the files of a complete checkpoint, which the run can remove without disturbing an upload.

    The files are hard links, or copies if the file system has none. The metrics so far are copied, too. Raises
    IncompleteCheckpoint if the checkpoint was removed meanwhile, and StorageError.
    """
    source, target = run_folder / CHECKPOINTS / tag, run_folder / STORING / tag
    if is_there(target):
        return target
    sidecars = tags.require_agreement(sidecar.read_all(source), source)
    names = [*tags.files_of(sidecars), *(sidecar.sidecar_name(one.rank) for one in sidecars)]
    try:
        with filling(target) as unfinished:
            for name in names:
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                _link(source / name, unfinished / name)
            if is_there(run_folder / METRICS):
                shutil.copyfile(run_folder / METRICS, unfinished / METRICS)  # it grows, so no link
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{source} was removed before it could be stored") from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {explain(error)}") from error
    return target


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # some network file systems have no hard links
        shutil.copyfile(source, target)


def store_checkpoint(claim: StoreClaim, folder: Path, progress: Progress, part_bytes: int = PART_BYTES) -> StoredTag:
    """Copy a checkpoint to the bucket, or continue to, and add it to the ledger.

    Every file has the digest that its rank recorded, and the server's checksums prove every object, before the ledger
    names the checkpoint.

    Args:
        claim: This head's claim to the bucket.
        folder: The folder of the checkpoint's files, as ``linked`` returns it.
        progress: Called with the number of bytes that are stored.
        part_bytes: Files that are larger are sent in parts of this size.

    Returns:
        The entry in the ledger.

    Raises:
        IncompleteCheckpoint: The files are not those of one complete checkpoint.
        DigestMismatch: A file is not what its rank recorded.
        RunOwned: Another head has taken over the run; its ledger is unchanged.
        StoreError: The server refuses, or does not answer. Calling this again continues.

    """
    tag = folder.name
    sidecars = tags.require_agreement(sidecar.read_all(folder), folder)
    recorded = tags.files_of(sidecars)
    others = [*(sidecar.sidecar_name(one.rank) for one in sidecars), METRICS]
    digests = recorded | digest_files(folder, (name for name in others if is_there(folder / name)))
    files = measure(folder, digests, progress)
    of_run, shards = sidecars[0].run_fingerprint, sidecars[0].data.shards_fingerprint
    content, best_step = {name: digest.sha256 for name, digest in digests.items()}, sidecars[0].best_step
    identity = fingerprint({"stage": "stored-checkpoint", "run": of_run, "tag": tag, "files": content})
    beside_ledger = folder_of(tag, identity)
    bucket = claim.bucket.below(beside_ledger)
    record = StoredCheckpoint(
        path=Path(),
        url=bucket.url,
        fingerprint=identity,
        inputs={"run": of_run, "shards": shards, "beginning": _beginning(claim.ledger)},
        files=digests,
        counts={"ranks": len(sidecars), "samples": sidecars[0].data.samples_consumed}
        | ({} if best_step is None else {_BEST_STEP: best_step}),
        provenance=current_provenance(),
        step=sidecars[0].step,
        tag=tag,
    ).sealed()
    claim.renew()  # measuring takes a while, and a head that was superseded meanwhile sends nothing
    publish_to_bucket(bucket, folder, record, files, progress, part_bytes)
    entry = _entry(record, beside_ledger)
    claim.change(lambda ledger: _with(ledger, entry))
    return entry


def _entry(record: StoredCheckpoint, folder: str) -> StoredTag:
    size = sum(digest.size for digest in record.files.values())
    return StoredTag(tag=record.tag, folder=folder, size=size, best_step=record.counts.get(_BEST_STEP))


def _with(ledger: Ledger, entry: StoredTag) -> Ledger:
    others = [one for one in ledger.checkpoints if one.tag != entry.tag]
    replaced = {one.folder for one in ledger.checkpoints if one.tag == entry.tag and one.folder != entry.folder}
    return ledger.changed(
        checkpoints=tuple(sorted([*others, entry], key=lambda one: one.tag)),
        removing=tuple(name for name in ledger.removing if name != entry.folder),
        set_aside=tuple(sorted({*ledger.set_aside, *replaced} - {entry.folder})),
    )


def prune_store(claim: StoreClaim, keep: Kept) -> None:
    """Remove checkpoints that are not to be kept, and what earlier removals left.

    A checkpoint is removed from the ledger first, which only the run's own head can do, then its manifest, then its
    objects. So nobody begins to read what is about to vanish, and a head that was superseded removes nothing. Raises
    RunOwned and StoreError.
    """
    sizes = {step_of(one.tag): one.size for one in claim.ledger.checkpoints}
    bests = {step_of(one.tag): one.best_step for one in claim.ledger.checkpoints}
    steps = kept(sizes, keep.keep_last, keep.keep_every_steps, bests=bests)
    old = [one for one in claim.ledger.checkpoints if step_of(one.tag) not in steps]
    if old:
        claim.change(lambda ledger: _without(ledger, {one.folder for one in old}))
    remove_abandoned(claim)


def _without(ledger: Ledger, folders: set[str]) -> Ledger:
    staying = tuple(one for one in ledger.checkpoints if one.folder not in folders)
    return ledger.changed(checkpoints=staying, removing=tuple(sorted({*ledger.removing, *folders})))


def remove_abandoned(claim: StoreClaim) -> None:
    """Remove the folders that the ledger lists as to be removed. Raises RunOwned and StoreError."""
    for folder in claim.ledger.removing:
        claim.require_kept()
        bucket = claim.bucket.below(folder)
        for name, upload_id in bucket.uploads():
            bucket.abort(name, upload_id)
        names = bucket.names()
        for name in sorted(names, key=lambda name: name != MANIFEST):
            bucket.call("delete_object", name)
    if claim.ledger.removing:
        _log.info("removed from %s: %s", claim.bucket.url, ", ".join(claim.ledger.removing))
        claim.change(lambda ledger: ledger.changed(removing=()))


def take_stock(claim: StoreClaim, unfinished: set[str]) -> None:
    """Decide about the folders that the ledger does not list, which heads have left that were lost.

    If a checkpoint is complete, its head was lost before the ledger could name it: the ledger does from now on, unless
    it names another one of that step, or the run has begun again since. Folders without a manifest are marked for
    removal, except those of the tags in ``unfinished``, whose upload this head can continue. Call this right after the
    run was claimed. Raises RunOwned and StoreError.
    """
    ledger, bucket = claim.ledger, claim.bucket
    known = {one.folder for one in ledger.checkpoints} | {*ledger.removing, *ledger.set_aside}
    present = bucket.sizes()
    folders = {name.partition("/")[0] for name in (*present, *(name for name, _ in bucket.uploads()))}
    left = {name for name in folders if is_checkpoint_folder(name) and name not in known}
    finished = {name for name in left if f"{name}/{MANIFEST}" in present}
    for name in sorted(finished):
        if (entry := _entry_of(claim, name, present)) is not None:
            claim.change(partial(_with, entry=entry))
    if abandoned := {name for name in left - finished if name.rpartition("-")[0] not in unfinished}:
        claim.change(lambda ledger: _without(ledger, abandoned))


def _entry_of(claim: StoreClaim, folder: str, present: Mapping[str, int]) -> StoredTag | None:
    """The entry for a checkpoint that has a manifest; None, with a log line, if it must not be resumed from.

    ``present`` has the sizes of all objects.
    """
    bucket, ledger = claim.bucket.below(folder), claim.ledger
    try:
        record = published_in(bucket, StoredCheckpoint)
    except StoreError:
        raise
    except T5TrainError as error:
        _log.warning("%s is not used, and not removed: %s", bucket.url, error)
        return None
    if record is None or (record.inputs.get("run"), record.inputs.get("beginning")) != (
        ledger.fingerprint,
        _beginning(ledger),
    ):
        why = "it is not a checkpoint of this run, or the run has begun again since"
    elif any(one.tag == record.tag for one in ledger.checkpoints):
        why = f"the run has another {record.tag}"
    elif damaged := [
        f"{name} has {present.get(stored, 0):,} of {digest.size:,} bytes"
        for name, digest in record.files.items()
        if present.get(stored := f"{folder}/{record.name_beside_manifest(name)}") != digest.size
    ]:
        why = f"some of its files are missing or have another size ({', '.join(damaged[:5])})"
    else:
        return _entry(record, folder)
    _log.warning("%s is not used, and not removed: %s", bucket.url, why)
    return None


def _beginning(ledger: Ledger) -> str:
    """The id of the run's current beginning; empty for the first one."""
    return ledger.beginnings[-1] if ledger.beginnings else ""


def set_aside_stored(claim: StoreClaim, tags_to_leave: Collection[str]) -> None:
    """Resume no longer from these checkpoints, and remove nothing of them. Raises RunOwned and StoreError."""
    if leaving := {one.folder for one in claim.ledger.checkpoints if one.tag in tags_to_leave}:
        claim.change(lambda ledger: _leaving(ledger, leaving))


def _leaving(ledger: Ledger, folders: set[str], **values: tuple[str, ...]) -> Ledger:
    staying = tuple(one for one in ledger.checkpoints if one.folder not in folders)
    return ledger.changed(checkpoints=staying, set_aside=tuple(sorted({*ledger.set_aside, *folders})), **values)


def begin_again_stored(claim: StoreClaim, beginnings: tuple[str, ...]) -> None:
    """Resume from none of the checkpoints that are there now, because the run has begun again.

    Nothing is removed. Raises RunOwned and StoreError.
    """
    claim.change(lambda ledger: _leaving(ledger, {one.folder for one in ledger.checkpoints}, beginnings=beginnings))


def restore_newest(
    bucket: BucketFolder, ledger: Ledger, run_folder: Path, held: str | None, progress: Progress
) -> list[str]:
    """Copy the newest intact checkpoint, and the best one as of it, to a run's folder, unless the run has them.

    Every file is verified as it is written, and an interrupted copy is continued. What is in the way, such as an
    unfinished checkpoint of the same step, is set aside.

    Args:
        bucket: The bucket of the run.
        ledger: The run's ledger.
        run_folder: The folder of the run.
        held: The newest complete checkpoint that the run has with its best one; None if it has none.
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
            for one in _with_its_best(ledger, stored):
                if not tags.is_complete(run_folder / CHECKPOINTS / one.tag):
                    _restore(bucket, ledger, one, run_folder, progress)
        except (DigestMismatch, RecordError) as error:
            _log.warning("%s in %s is damaged: %s", stored.tag, bucket.url, error)
            damaged[stored.tag] = str(error)
            for tag in (stored.tag, tag_of(stored.best_step or step_of(stored.tag))):
                discard(partial_of(run_folder / CHECKPOINTS / tag))
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


def _with_its_best(ledger: Ledger, stored: StoredTag) -> list[StoredTag]:
    """Return a checkpoint and the best one as of it. The first one restored brings the metrics."""
    if stored.best_step is None or (best := tag_of(stored.best_step)) == stored.tag:
        return [stored]
    if (found := next((one for one in ledger.checkpoints if one.tag == best), None)) is None:
        raise RecordError(f"{best}, the best checkpoint as of {stored.tag}, is not stored")
    return [stored, found]


def _restore(bucket: BucketFolder, ledger: Ledger, stored: StoredTag, run_folder: Path, progress: Progress) -> None:
    where, target = bucket.below(stored.folder), run_folder / CHECKPOINTS / stored.tag
    record = manifest_in(where)
    if not isinstance(record, StoredCheckpoint) or (record.tag, record.inputs.get("run")) != (
        stored.tag,
        ledger.fingerprint,
    ):
        raise RecordError(f"{where.url}/{MANIFEST} is not that of {stored.tag} of this run")
    require_names_for(target, record, where)
    set_aside(target, run_folder / SET_ASIDE, f"it is not complete, and {stored.tag} is restored from {bucket.url}")
    with copied(where, record, target, progress) as unfinished:
        if is_there(unfinished / METRICS) and not is_there(run_folder / METRICS):
            (unfinished / METRICS).rename(run_folder / METRICS)
