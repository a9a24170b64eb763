"""Copies a run's checkpoints to a bucket while its ranks run, and restores the newest one if the run has lost its own.

The head has all complete checkpoints, whether hosts share the root or not, so only the head needs credentials. Ranks
never wait for a copy, and a store that does not answer neither ends a run that has begun nor keeps it from resuming.
"""

import logging
import threading
import time
from functools import partial

from infra.head.storage.store_claimant import claimant
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import is_asked_to_begin_again, tags_in, times_begun_again
from t5train.errors import (
    DigestMismatch,
    IncompleteCheckpoint,
    PublicationError,
    RunChanged,
    RunOwned,
    StoreError,
    T5TrainError,
)
from t5train.files.atomic import discard
from t5train.files.os_errors import in_one_line
from t5train.files.presence import names_in
from t5train.files.run_folder import CHECKPOINTS, STORING, is_tag
from t5train.progress import Interrupted, Interruptible, Progress, relayed
from t5train.release.checkpoint_store.checkpoint_upload import (
    Kept,
    begin_again_stored,
    linked,
    prune_store,
    set_aside_stored,
    store_checkpoint,
    take_stock,
)
from t5train.release.checkpoint_store.ledger import read_ledger
from t5train.release.checkpoint_store.restoring import restore_newest
from t5train.release.checkpoint_store.store_claim import StoreClaim, claim_store, require_claimable
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.store_errors import TRANSIENT
from t5train.release.object_store.write_check import check_writing, require_replacing
from t5train.spec import RunSpec

_TRIES = 2  # of one request: what fails is tried again later, and Ctrl-C should not take long
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 30.0
_INSIST_SECONDS = 600.0
_STOP_SECONDS = 15.0
_log = logging.getLogger(__name__)


class CheckpointCopies:
    """The copies of one run's checkpoints in its bucket, which this head claims until ``end``."""

    def __init__(self, spec: RunSpec, bucket: BucketFolder) -> None:
        self._spec, self._folder, self._bucket = spec, spec.run_folder, bucket
        self._keep = Kept(spec.storage.keep_last, spec.storage.keep_every_steps)
        self._claim: StoreClaim | None = None
        self._lost: RunOwned | None = None
        self._failed = dict[str, str]()
        """Why a checkpoint that is complete here cannot be stored."""
        self._thread: threading.Thread | None = None
        self._stop_requested, self._progress = threading.Event(), Interruptible()

    def claim(self) -> StoreClaim:
        """Claim the bucket, if it is not claimed yet. Raises the errors of ``claim_store``."""
        if self._claim is None:
            claim = claim_store(self._bucket, claimant(self._spec))
            try:
                take_stock(claim, set(names_in(self._folder / STORING)))
            except BaseException:
                claim.end()
                raise
            self._claim = claim
        return self._claim

    def require_kept(self) -> None:
        """Raise RunOwned if another head has taken over the run."""
        if self._lost is not None:
            raise self._lost
        if self._claim is not None:
            self._claim.require_kept()

    def confirm(self) -> None:
        """Renew the claim. Raises RunOwned if another head has taken over the run, and StoreError."""
        self.claim().renew()

    def prepare(self, progress: Progress) -> None:
        """Restore the newest checkpoint, unless the run has it or a newer one. Call this before ranks start.

        If the user asked to begin again, nothing is restored, and what is stored is set aside. Raises the errors of
        ``claim`` and ``restore_newest``, but only logs that the store does not answer if the run can resume without it;
        RunChanged if the run has begun again under another root.
        """
        self._failed.clear()
        try:
            claim = self._ready()
        except StoreError as error:
            if not can_do_without(self._spec, error):
                raise
            _log.warning("checkpoints are not stored for now: %s", error)
            return
        if is_asked_to_begin_again(self._folder):
            return
        held = next(iter(tags.complete_tags(self._folder / CHECKPOINTS)), None)
        if damaged := relayed(partial(restore_newest, claim.bucket, claim.ledger, self._folder, held), progress):
            set_aside_stored(claim, damaged)

    def _ready(self) -> StoreClaim:
        """Claim the bucket, and set aside what it has from before the run began again."""
        claim, asked = self.claim(), is_asked_to_begin_again(self._folder)
        times, stored = times_begun_again(self._folder) + asked, claim.ledger.times_begun_again
        if stored > times:
            raise RunChanged(
                f"run {self._folder.name} has begun again elsewhere since its checkpoints in {self._folder} were made, "
                f"and {claim.bucket.url} has those of the new beginning. To continue from them, use `t5-pretrain run "
                f"--from {claim.bucket.url}` with another --root"
            )
        if stored < times:
            begin_again_stored(claim, times)
        return claim

    def start(self) -> None:
        """Copy complete checkpoints from now on, in a thread."""
        if self._thread is None:
            self._stop_requested, self._progress = threading.Event(), Interruptible()
            given = (self._stop_requested, self._progress)
            self._thread = threading.Thread(
                target=self._copy_until_stopped, args=given, name="checkpoint copies", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A copy in progress is interrupted, and can be continued later.

        Does not wait for a store that does not answer.
        """
        self._progress.must_stop = True
        self._stop_requested.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    def catch_up(self, progress: Progress) -> None:
        """Copy the last checkpoint of a run that has finished.

        Insists for ten minutes if the store does not answer. Raises PublicationError, and RunOwned.
        """
        self.stop()
        deadline = time.monotonic() + _INSIST_SECONDS
        while True:
            try:
                self._ready()
                while relayed(self._copy_newest, progress):
                    pass
                break
            except RunOwned:
                raise
            except T5TrainError as error:
                left = deadline - time.monotonic()
                if not (isinstance(error, StoreError) and error.code in TRANSIENT) or left <= 0:
                    raise self._not_stored(str(error)) from error
                _log.warning("the last checkpoint is not stored yet, retrying for up to %.0f s: %s", left, error)
                time.sleep(min(left, _RETRY_SECONDS))
        last = next(iter(tags.complete_tags(self._folder / CHECKPOINTS)), None)
        if last in self._failed:
            raise self._not_stored(self._failed[last])

    def _not_stored(self, why: str) -> PublicationError:
        return PublicationError(
            f"training is done, but its last checkpoint is not in {self._bucket.url}: {why}. Start the same command "
            "again: no step is trained again, and an interrupted copy continues. To do without the copy, leave "
            "storage.publish_checkpoints_under out"
        )

    def end(self) -> None:
        """Stop the thread, and release the run in the bucket."""
        self.stop()
        if self._claim is not None:
            self._claim.end()

    def _copy_until_stopped(self, stop_requested: threading.Event, progress: Interruptible) -> None:
        said, seconds = "", 0.0
        while not stop_requested.wait(seconds):
            try:
                self._ready()
                was_copied = self._copy_newest(progress)
            except Interrupted:
                return
            except RunOwned as error:
                self._lost = error  # the head ends the run when it looks next
                return
            except Exception as error:
                if (text := in_one_line(error)) != said:
                    _log.warning("cannot store the newest checkpoint, will retry: %s", text)
                said, seconds = text, _RETRY_SECONDS
            else:
                said, seconds = "", 0.0 if was_copied else _LOOK_SECONDS

    def _copy_newest(self, progress: Progress) -> bool:
        """Copy the newest complete checkpoint that is not in the bucket. Returns whether there was one."""
        claim, tag = self.claim(), self._next()
        self._discard_others(tag)
        if tag is None:
            return False
        try:
            store_checkpoint(claim, linked(self._folder, tag), progress)
        except StoreError:
            raise
        except (IncompleteCheckpoint, DigestMismatch, PublicationError) as error:
            _log.warning("%s is not stored: %s", tag, error)
            self._failed[tag] = str(error)
            return True
        _log.info("%s is stored in %s", tag, claim.bucket.url)
        try:
            prune_store(claim, self._keep)
        except StoreError as error:
            _log.warning("old checkpoints stay in %s until the next one is stored: %s", claim.bucket.url, error)
        return True

    def _next(self) -> str | None:
        """The checkpoint to copy: one whose copy was interrupted, else the newest complete one."""
        if is_asked_to_begin_again(self._folder):
            return None  # until the old ones are set aside
        newest = self.claim().ledger.newest
        for tag in [*reversed(names_in(self._folder / STORING)), *tags_in(self._folder / CHECKPOINTS)]:
            if not is_tag(tag) or tag in self._failed or (newest is not None and tag <= newest.tag):
                continue
            if (self._folder / STORING / tag).exists() or tags.is_complete(self._folder / CHECKPOINTS / tag):
                return tag
        return None

    def _discard_others(self, tag: str | None) -> None:
        """Remove the links to other checkpoints, and what interrupted copies have left of them."""
        storing = self._folder / STORING
        for path in storing.iterdir() if storing.exists() else ():
            if tag is not None and tag in path.name:
                continue
            if path.is_dir():
                discard(path)
            else:
                path.unlink()


def begin_copies(spec: RunSpec) -> CheckpointCopies | None:
    """Claim the bucket of a run that has begun; None if its checkpoints are to be nowhere else.

    If the store does not answer and the run can do without it, the bucket is claimed later. Raises the errors of
    ``claim_store``.
    """
    if spec.checkpoints_url is None:
        return None
    copies = CheckpointCopies(spec, BucketFolder(spec.checkpoints_url, _TRIES))
    try:
        copies.claim()
    except StoreError as error:
        if not can_do_without(spec, error):
            raise
        _log.warning("checkpoints are not stored for now: %s", error)
    return copies


def can_do_without(spec: RunSpec, error: StoreError) -> bool:
    """Whether a run can go on without its bucket for now: the failure may pass, and the run has a checkpoint here."""
    return error.code in TRANSIENT and bool(tags_in(spec.run_folder / CHECKPOINTS))


def check_bucket(spec: RunSpec) -> None:
    """Raise the errors that storing checkpoints would raise: StoreError, PublicationError, RunOwned. Claims nothing."""
    if spec.checkpoints_url is None:
        return
    bucket = BucketFolder(spec.checkpoints_url)
    try:
        require_claimable(bucket, read_ledger(bucket), claimant(spec))
        check_writing(bucket)
        require_replacing(bucket)
    except StoreError as error:
        if not can_do_without(spec, error):
            raise
        _log.warning("checkpoints cannot be stored now: %s", error)
