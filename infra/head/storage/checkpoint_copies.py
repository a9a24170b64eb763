"""Copies a run's checkpoints to a bucket while its ranks run, and restores the newest one if the run has lost its own.

The head has all complete checkpoints, whether hosts share the root or not, so only the head needs credentials. Ranks
never wait for a copy, and a store that does not answer neither ends a run that has begun nor keeps it from resuming.
"""

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

from infra.head.storage.store_claimant import claimant
from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.resume_point import beginnings, is_asked_to_begin_again, tags_in
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
from t5train.files.run_folder import CHECKPOINTS, STORING, is_tag, tag_of
from t5train.progress import Interrupted, Interruptible, Progress, Report, relayed
from t5train.release.checkpoint_store.bucket_checkpoints import (
    Kept,
    begin_again_stored,
    linked,
    prune_store,
    restore_newest,
    set_aside_stored,
    store_checkpoint,
    take_stock,
)
from t5train.release.checkpoint_store.ledger import read_ledger
from t5train.release.checkpoint_store.store_claim import StoreClaim, claim_store, require_claimable
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.store_errors import IN_PROGRESS, TRANSIENT
from t5train.release.object_store.write_check import check_writing, require_replacing
from t5train.spec import RunSpec

_TRIES = 2  # of one request: what fails is tried again later, and Ctrl-C should not take long
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 30.0
_INSIST_SECONDS = 600.0
_STOP_SECONDS = 15.0
_CONFIRM_SECONDS, _POLL_SECONDS = 10.0, 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    """Why nothing is copied for now."""

    error: Exception
    since: float
    """When the first of the failures since the last progress was, by time.monotonic."""
    reported: Report | None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StoreError) and error.code in (*TRANSIENT, IN_PROGRESS)


class CheckpointCopies:
    """The copies of one run's checkpoints in its bucket, which this head claims until ``end``."""

    def __init__(self, spec: RunSpec, bucket: BucketFolder) -> None:
        self._spec, self._folder, self._bucket = spec, spec.run_folder, bucket
        self._keep = Kept(spec.storage.keep_last, spec.storage.keep_every_steps)
        self._claiming = threading.Lock()
        self._claim: StoreClaim | None = None
        self._lost: T5TrainError | None = None
        self._failed = dict[str, str]()
        """Why a checkpoint that is complete here cannot be stored."""
        self._failure: _Failure | None = None
        self._thread: threading.Thread | None = None
        self._stop_requested, self._wake, self._progress = threading.Event(), threading.Event(), Interruptible()

    def claim(self) -> StoreClaim:
        """Claim the bucket, if it is not claimed yet. Raises the errors of ``claim_store``."""
        with self._claiming:
            if self._claim is None:
                claim = claim_store(self._bucket, claimant(self._spec))
                try:
                    take_stock(claim, set(names_in(self._folder / STORING)))
                except BaseException:
                    claim.release()
                    raise
                self._claim = claim
            return self._claim

    def require_kept(self) -> None:
        """Raise RunOwned if another head has taken over the run, and RunChanged if it has begun again elsewhere."""
        if self._lost is not None:
            raise self._lost
        if self._claim is not None:
            self._claim.require_kept()

    def confirm(self) -> None:
        """Renew the claim, and insist for ten minutes. Raises RunOwned if another head has taken over the run."""
        deadline = time.monotonic() + _INSIST_SECONDS
        while True:
            try:
                return self.claim().renew()
            except StoreError as error:
                if not _may_pass(error) or time.monotonic() > deadline:
                    raise
                _log.warning("cannot confirm that this head still has the run, will retry: %s", error)
            time.sleep(_CONFIRM_SECONDS)

    def prepare(self, progress: Progress) -> None:
        """Restore the newest checkpoint, unless the run has it or a newer one. Call this before ranks start.

        If the user asked to begin again, nothing is restored. If the store does not answer, this is only logged if the
        run can resume without it. Raises the errors of ``claim`` and ``restore_newest``, and RunChanged if the run has
        begun again under another root.
        """
        self._forget_failures()
        try:
            claim = self._ready()
        except StoreError as error:
            if not can_do_without(self._spec, error):
                raise
            _log.warning("checkpoints are not stored for now: %s", error)
            return
        if is_asked_to_begin_again(self._folder):
            return
        complete = tags.complete_tags(self._folder / CHECKPOINTS)
        held = next((tag for tag in complete if self._best_of(tag) in complete), None)
        restore = partial(restore_newest, claim.bucket, claim.ledger, self._folder, held)
        if damaged := relayed(restore, progress, "copying the newest checkpoint from the bucket"):
            set_aside_stored(claim, damaged)

    def _ready(self) -> StoreClaim:
        """Claim the bucket, and set aside what it has from before the run began again, once that has taken effect."""
        claim = self.claim()
        if is_asked_to_begin_again(self._folder):  # removed last, so that the beginnings are read after that
            return claim
        here, stored = beginnings(self._folder), claim.ledger.beginnings
        if here[: len(stored)] != stored:
            raise RunChanged(
                f"run {self._folder.name} has begun again elsewhere since its checkpoints in {self._folder} were made, "
                f"and {claim.bucket.url} has those of the new beginning. To continue from them, use `t5-pretrain run "
                f"--from {claim.bucket.url}` with another --root"
            )
        if here != stored:
            begin_again_stored(claim, here)
        return claim

    def start(self) -> None:
        """Copy complete checkpoints from now on, in a thread."""
        if self._thread is None or not self._thread.is_alive():
            self._stop_requested, self._wake, self._progress = threading.Event(), threading.Event(), Interruptible()
            self._failure = None
            given = (self._stop_requested, self._wake, self._progress)
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
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    def catch_up(self, progress: Progress) -> None:
        """Wait until the last checkpoint of a run that has finished is copied.

        Insists for ten minutes after the store has answered last. Raises PublicationError, and the errors of
        ``require_kept``.
        """
        self._forget_failures()  # those from while ranks were running do not count
        self.start()
        self._wake.set()
        last = next(iter(tags.complete_tags(self._folder / CHECKPOINTS)), None)
        while last is not None and not self._has(last):
            self.require_kept()
            if last in self._failed:
                raise self._not_stored(self._failed[last])
            failure = self._failure
            if failure is not None and not (_may_pass(failure.error) and failure.seconds < _INSIST_SECONDS):
                raise self._not_stored(in_one_line(failure.error)) from failure.error
            self._progress.pass_on(progress)
            time.sleep(_POLL_SECONDS)

    def _forget_failures(self) -> None:
        self._failed.clear()
        self._failure = None

    def _has(self, tag: str) -> bool:
        """Whether a checkpoint, or a newer one, is in the bucket."""
        newest = None if self._claim is None else self._claim.ledger.newest
        return newest is not None and newest.tag >= tag

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
            self._claim.release()

    def _copy_until_stopped(
        self, stop_requested: threading.Event, wake: threading.Event, progress: Interruptible
    ) -> None:
        seconds = 0.0
        while not stop_requested.is_set():
            try:
                self._ready()
                was_copied = self._copy_newest(progress)
            except Interrupted:
                return
            except (RunOwned, RunChanged) as error:
                self._lost = error  # the head ends the run when it looks next
                return
            except Exception as error:
                self._note(error, progress)
                seconds = _RETRY_SECONDS
            else:
                self._failure, seconds = None, 0.0 if was_copied else _LOOK_SECONDS
            wake.wait(seconds)
            wake.clear()

    def _note(self, error: Exception, progress: Interruptible) -> None:
        """Note a failure, and log it unless it is the last one again."""
        before, reported = self._failure, progress.last
        if before is None or in_one_line(before.error) != in_one_line(error):
            _log.warning("cannot store the newest checkpoint, will retry: %s", in_one_line(error))
        has_progressed = before is None or before.reported != reported
        since = time.monotonic() if before is None or has_progressed else before.since
        self._failure = _Failure(error, since, reported)

    def _copy_newest(self, progress: Progress) -> bool:
        """Copy the newest complete checkpoint that is not in the bucket. Returns whether there was one."""
        claim, tag = self.claim(), self._next()
        self._discard_others(tag)
        if tag is None:
            return False
        try:
            stored = store_checkpoint(claim, linked(self._folder, tag), progress)
        except StoreError:
            raise
        except (IncompleteCheckpoint, DigestMismatch, PublicationError) as error:
            _log.warning("%s is not stored: %s", tag, error)
            self._failed[tag] = str(error)
            return True
        _log.info("%s is stored in %s", tag, claim.bucket.below(stored.folder).url)
        self._discard_others(None)  # now: links of a run that ends here would keep a deleted checkpoint's bytes
        try:
            prune_store(claim, self._keep)
        except StoreError as error:
            _log.warning("old checkpoints stay in %s until the next one is stored: %s", claim.bucket.url, error)
        return True

    def _next(self) -> str | None:
        """Return the checkpoint to copy next, or None.

        An interrupted copy is continued first. After that comes the newest complete checkpoint.
        """
        if is_asked_to_begin_again(self._folder):
            return None  # until the old ones are set aside
        newest = self.claim().ledger.newest
        for tag in [*reversed(names_in(self._folder / STORING)), *tags_in(self._folder / CHECKPOINTS)]:
            if not is_tag(tag) or tag in self._failed or (newest is not None and tag <= newest.tag):
                continue
            if (self._folder / STORING / tag).exists():
                return tag
            if tags.is_complete(self._folder / CHECKPOINTS / tag) and (first := self._first_of(tag)) is not None:
                return first
        return None

    def _first_of(self, tag: str) -> str | None:
        """Return the best checkpoint as of ``tag`` if it is not stored yet, as a run resumes only with it, or ``tag``.

        None if the best one can no longer be stored.
        """
        best = self._best_of(tag)
        if best == tag or any(one.tag == best for one in self.claim().ledger.checkpoints):
            return tag
        if best in self._failed:
            self._failed[tag] = self._failed[best]
            return None
        return best if tags.is_complete(self._folder / CHECKPOINTS / best) else None

    def _best_of(self, tag: str) -> str:
        """Return the best checkpoint as of a complete one; ``tag`` itself in runs that choose none."""
        step = sidecar.read(self._folder / CHECKPOINTS / tag, 0).best_step
        return tag if step is None else tag_of(step)

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
    bucket = BucketFolder(spec.checkpoints_url, _TRIES)
    try:
        require_claimable(bucket, read_ledger(bucket), claimant(spec))
        check_writing(bucket)
        require_replacing(bucket)
    except StoreError as error:
        if not can_do_without(spec, error):
            raise
        _log.warning("checkpoints cannot be stored now: %s", error)
