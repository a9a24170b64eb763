"""Copies a run's checkpoints to a bucket while its ranks run, and restores the newest one if the run has lost its own.

The head has all complete checkpoints, whether hosts share the root or not, so only the head needs credentials. Ranks
never wait for a copy.
"""

import json
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import is_asked_to_begin_again, tags_in
from t5train.errors import IncompleteCheckpoint, PublicationError, RunOwned, SpecError, StoreError, T5TrainError
from t5train.files.atomic import discard
from t5train.files.os_errors import in_one_line
from t5train.files.presence import ABSENT, names_in, reading
from t5train.files.run_folder import CHECKPOINTS, CONFIG, RUN, STORING, is_tag
from t5train.progress import Interrupted, Interruptible, Progress, relayed
from t5train.release.checkpoint_store.checkpoint_upload import (
    Kept,
    abandon_unlisted,
    linked,
    prune_store,
    remove_abandoned,
    store_checkpoint,
)
from t5train.release.checkpoint_store.ledger import read_ledger
from t5train.release.checkpoint_store.restoring import restore_newest
from t5train.release.checkpoint_store.store_claim import Claimant, StoreClaim, claim_store, require_claimable
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.write_check import check_writing, require_replacing
from t5train.spec import RunSpec
from t5train.spec.config_text import run_text

_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 30.0
_log = logging.getLogger(__name__)


class CheckpointCopies:
    """The copies of one run's checkpoints in its bucket, which this head has claimed until ``end``."""

    def __init__(self, spec: RunSpec, claim: StoreClaim) -> None:
        self._folder, self._claim = spec.run_folder, claim
        self._keep = Kept(spec.storage.keep_last, spec.storage.keep_every_steps)
        self._thread: threading.Thread | None = None
        self._stop_requested, self._progress = threading.Event(), Interruptible()
        self._passed_over = set[str]()

    def require_kept(self) -> None:
        """Raise RunOwned if another head has taken over the run since."""
        self._claim.require_kept()

    def confirm(self) -> None:
        """Renew the claim. Raises RunOwned if another head has taken over the run, and StoreError."""
        self._claim.renew()

    def prepare(self, progress: Progress) -> None:
        """Restore the newest checkpoint, unless the run has it or a newer one. Call this before ranks start.

        If the user asked to begin again, the checkpoints in the bucket are kept, but no longer listed. Raises the
        errors of ``restore_newest``, and RunOwned.
        """
        if is_asked_to_begin_again(self._folder):
            discard(self._folder / STORING)
            self._claim.change(
                lambda ledger: ledger.changed(checkpoints=(), times_begun_again=ledger.times_begun_again + 1)
            )
            return
        held = next(iter(tags.complete_tags(self._folder / CHECKPOINTS)), None)
        restore = partial(restore_newest, self._claim.bucket, self._claim.ledger, self._folder, held)
        relayed(restore, progress)

    def start(self) -> None:
        """Copy complete checkpoints from now on, in a thread."""
        if self._thread is None:
            self._stop_requested.clear()
            self._progress = Interruptible()
            self._thread = threading.Thread(target=self._copy_until_stopped, name="checkpoint copies", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A copy in progress is interrupted, and can be continued later."""
        self._progress.must_stop = True
        self._stop_requested.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def catch_up(self, progress: Progress) -> None:
        """Copy the last checkpoint of a run that has finished. Raises PublicationError, and RunOwned."""
        self.stop()
        try:
            while relayed(self._copy_newest, progress):
                pass
        except RunOwned:
            raise
        except T5TrainError as error:
            raise PublicationError(
                f"training is done, but its last checkpoint is not in {self._claim.bucket.url}: {error}. Start the "
                "same command again: no step is trained again, and the copy continues"
            ) from error

    def end(self) -> None:
        """Stop the thread, and release the run in the bucket."""
        self.stop()
        self._claim.end()

    def _copy_until_stopped(self) -> None:
        said, seconds = "", 0.0
        self._try(self._abandon_unlisted)
        while not self._stop_requested.wait(seconds):
            try:
                was_copied = self._copy_newest(self._progress)
            except Interrupted:
                return
            except RunOwned:
                return  # the claim has logged it, and the head ends the run
            except Exception as error:
                if (text := in_one_line(error)) != said:
                    _log.warning("cannot store the newest checkpoint, will retry: %s", text)
                said, seconds = text, _RETRY_SECONDS
            else:
                said, seconds = "", 0.0 if was_copied else _LOOK_SECONDS

    def _abandon_unlisted(self) -> None:
        abandon_unlisted(self._claim, set(names_in(self._folder / STORING)))
        remove_abandoned(self._claim)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RunOwned:
            return  # as above
        except StoreError as error:
            _log.warning("what is no longer of use in %s stays for now: %s", self._claim.bucket.url, error)

    def _copy_newest(self, progress: Progress) -> bool:
        """Copy the newest complete checkpoint that is not in the bucket. Returns whether there was one."""
        if (tag := self._next()) is None:
            self._discard_others(None)
            return False
        try:
            folder = linked(self._folder, tag)
            self._discard_others(tag)
            store_checkpoint(self._claim, folder, progress)
        except IncompleteCheckpoint as error:
            _log.warning("%s is not stored: %s", tag, error)
            self._passed_over.add(tag)
            return True
        _log.info("%s is stored in %s", tag, self._claim.bucket.url)
        discard(folder)
        prune_store(self._claim, self._keep)
        return True

    def _next(self) -> str | None:
        """The checkpoint to copy: one whose copy was interrupted, else the newest complete one."""
        newest = self._claim.ledger.newest
        of_interest = [
            tag
            for tag in [*reversed(names_in(self._folder / STORING)), *tags_in(self._folder / CHECKPOINTS)]
            if is_tag(tag) and (newest is None or tag > newest.tag) and tag not in self._passed_over
        ]
        for tag in of_interest:
            if (self._folder / STORING / tag).exists() or tags.is_complete(self._folder / CHECKPOINTS / tag):
                return tag
        return None

    def _discard_others(self, tag: str | None) -> None:
        for name in names_in(self._folder / STORING):
            if is_tag(name) and name != tag:
                discard(self._folder / STORING / name)


def begin_copies(spec: RunSpec) -> CheckpointCopies | None:
    """Claim the bucket of a run that has begun; None if its checkpoints are to be nowhere else.

    Raises the errors of ``claim_store``.
    """
    if (url := spec.checkpoints_url) is None:
        return None
    return CheckpointCopies(spec, claim_store(BucketFolder(url), _claimant(spec)))


def check_bucket(spec: RunSpec) -> None:
    """Raise the errors that storing checkpoints would raise: StoreError, PublicationError, RunOwned. Claims nothing."""
    if (url := spec.checkpoints_url) is None:
        return
    bucket = BucketFolder(url)
    require_claimable(bucket, read_ledger(bucket), _claimant(spec))
    check_writing(bucket)
    require_replacing(bucket)


def _claimant(spec: RunSpec) -> Claimant:
    return Claimant(
        run=_run_file(spec.run_folder),
        config=run_text(spec, spec.run_folder / CONFIG),
        root=str(spec.storage.root.resolve()),
        lease_seconds=spec.cluster.lease_seconds,
    )


def _run_file(run_folder: Path) -> dict[str, object]:
    path = run_folder / RUN
    try:
        with reading(path):
            content = path.read_bytes()
    except ABSENT:
        return {}
    try:
        found = json.loads(content)
    except ValueError as error:
        raise SpecError(f"{path} is damaged ({error}). Restore the file, or choose another --name") from error
    return dict(found)
