"""A head's claim to the ledger of its run, renewed for as long as the head holds the run."""

import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from t5train.errors import PublicationError, RunOwned, StoreError, T5TrainError
from t5train.files.os_errors import in_one_line
from t5train.release.checkpoint_store.ledger import (
    Change,
    FoundLedger,
    Holder,
    Ledger,
    read_existing_ledger,
    read_ledger,
    write_ledger,
)
from t5train.release.object_store.bucket import BucketFolder

_RENEWALS_IN_A_LEASE = 4
_CLAIM_TRIES = 5
_END_SECONDS = 5.0
_SHORTEST_SECONDS, _LONGEST_SECONDS = 5.0, 15.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claimant:
    """The run that a head wants to store checkpoints of, and the head itself."""

    run: Mapping[str, Any]
    """The file ``run.json`` of the run's folder."""
    config: str
    root: str
    boot_id: str
    lease_seconds: float

    def holder(self) -> Holder:
        """Return a new holder of the ledger, for this head."""
        return Holder(
            token=secrets.token_hex(16),
            head=socket.gethostname(),
            root=self.root,
            boot_id=self.boot_id,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            lease_seconds=self.lease_seconds,
        )


class StoreClaim:
    """The claim to a run's ledger. Threads can share it."""

    def __init__(self, bucket: BucketFolder, of_ledger: BucketFolder, ledger: Ledger, etag: str | None) -> None:
        """Renew the claim from now on. ``ledger`` was just written by this head to ``of_ledger``, and has this ETag."""
        self.bucket, self._of_ledger = bucket, of_ledger
        self._ledger, self._etag = ledger, etag
        self._token = ledger.holder.token if ledger.holder else ""
        self._lost: RunOwned | None = None
        self._changing, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim in the store", daemon=True)
        self._thread.start()

    @property
    def ledger(self) -> Ledger:
        """The ledger as this head wrote it last."""
        return self._ledger

    def require_kept(self) -> None:
        """Raise RunOwned if another head has taken over the run since. Asks nobody."""
        if self._lost is not None:
            raise self._lost

    def change(self, change: Change) -> None:
        """Change the ledger.

        Raises RunOwned if another head has taken over the run, which then has changed nothing; and StoreError.
        """
        with self._changing:
            while True:
                self.require_kept()
                wanted = change(self._ledger)
                if (etag := write_ledger(self._of_ledger, wanted, self._etag)) is not None:
                    self._ledger, self._etag = wanted, etag
                    return
                self._read_again()

    def renew(self) -> None:
        """Renew the lease. Raises the errors of ``change``."""
        self.change(lambda ledger: ledger.changed())

    def end(self) -> None:
        """Stop renewing, and release the run, so that another head need not wait for the lease to expire.

        Tries to for a few seconds.
        """
        self._ended.set()
        releasing = threading.Thread(target=self._release, name="release in the store", daemon=True)
        releasing.start()
        releasing.join(_END_SECONDS)  # no longer: a store that does not answer must not delay the end of a command

    def _release(self) -> None:
        if self._lost is not None:
            return
        try:
            self.change(lambda ledger: ledger.changed(holder=None))
        except RunOwned:
            return  # it is the other head's now
        except T5TrainError as error:
            _log.warning("the claim to %s is not released, and expires by itself: %s", self.bucket.url, error)

    def _read_again(self) -> None:
        """Read the ledger, because it is not what this head wrote last. A write whose answer was lost is its own.

        If somebody has deleted the ledger, it is written again.
        """
        found = read_existing_ledger(self._of_ledger)
        holder = found.ledger.holder if found else None
        if found is None:
            self._etag = None
            return
        if holder is not None and holder.token == self._token:
            self._ledger, self._etag = found.ledger, found.etag
            return
        by = f"now belong to {holder}" if holder else "were taken over and released by another head"
        self._lost = RunOwned(
            f"the checkpoints in {self.bucket.url} {by}: this process ends, and stores nothing more. To continue the "
            "run here, end the other process first"
        )
        raise self._lost

    def _renew(self) -> None:
        interval = (self._ledger.holder.lease_seconds if self._ledger.holder else 0) / _RENEWALS_IN_A_LEASE
        was_silent = False
        while not self._ended.wait(interval):
            try:
                self.renew()
            except RunOwned as error:
                _log.error("%s", error)
                return
            except Exception as error:  # whatever it is, the lease has to be renewed
                if not was_silent:
                    _log.warning(
                        "the claim to %s cannot be renewed, will retry: %s", self.bucket.url, in_one_line(error)
                    )
                was_silent = True
            else:
                was_silent = False


def claim_store(bucket: BucketFolder, claimant: Claimant) -> StoreClaim:
    """Claim the ledger of a run for this head, and renew the claim until ``StoreClaim.end``.

    A claim of the same root on the same machine, since it was booted, is replaced at once, because only one process at
    a time holds a run's folder.

    Raises RunOwned if the lease of another head is valid, PublicationError if the ledger is another run's, and the
    errors of ``read_ledger``.
    """
    # Renewals must not wait for one lost answer until the lease has expired.
    wait_seconds = min(max(claimant.lease_seconds / _RENEWALS_IN_A_LEASE, _SHORTEST_SECONDS), _LONGEST_SECONDS)
    of_ledger = BucketFolder(bucket.url, 1, wait_seconds)
    holder = claimant.holder()
    for _ in range(_CLAIM_TRIES):
        found = read_ledger(bucket)
        require_claimable(bucket, found, claimant)
        if found is None:
            wanted = Ledger(run=dict(claimant.run), config=claimant.config, holder=None).changed(holder=holder)
        else:
            wanted = found.ledger.changed(config=claimant.config, holder=holder)
        etag = write_ledger(bucket, wanted, found.etag if found else None)
        if etag is None:
            continue  # perhaps the claim that is to be replaced was renewed meanwhile
        if found is not None and found.ledger.holder is not None:
            _log.warning("%s was taken over from %s", bucket.url, found.ledger.holder)
        return StoreClaim(bucket, of_ledger, wanted, etag)
    raise StoreError(f"{bucket.url} is changed by another head again and again. End that head, then start again")


def require_claimable(bucket: BucketFolder, found: FoundLedger | None, claimant: Claimant) -> None:
    """Raise the errors of ``claim_store`` for a ledger that this head may not claim now."""
    if found is None:
        return
    if found.ledger.unique_id != claimant.run.get("unique_id"):
        raise PublicationError(
            f"{bucket.url} holds checkpoints of another run with this name, which this machine does not have: choose "
            "another --name, or another folder with storage.publish_checkpoints_under. To continue that run here, use "
            f"`t5-pretrain run --from {bucket.url}`"
        )
    holder = found.ledger.holder
    here = (socket.gethostname(), claimant.root, claimant.boot_id)
    if holder is not None and (holder.head, holder.root, holder.boot_id) != here:
        require_expired(bucket, found)


def require_expired(bucket: BucketFolder, found: FoundLedger) -> None:
    """Raise RunOwned if the lease of the ledger's holder is valid."""
    if found.left_seconds > 0:
        raise RunOwned(
            f"the checkpoints in {bucket.url} belong to {found.ledger.holder}, whose lease is valid for another "
            f"{found.left_seconds:.0f} s: it may be running. End that head, or wait until its lease expires, then "
            "start again"
        )
