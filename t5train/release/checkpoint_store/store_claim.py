"""A head's claim to the ledger of its run, renewed for as long as the head holds the run."""

import logging
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from t5train.errors import PublicationError, RunOwned, StoreError
from t5train.files.ownership import Ownership
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

RENEWALS_IN_A_LEASE = 4
_CLAIM_TRIES = 5
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


class StoreClaim(Ownership):
    """The claim to a run's ledger."""

    def __init__(self, bucket: BucketFolder, holder: Holder, ledger: Ledger, etag: str | None) -> None:
        """Keep the claim of ``holder``. ``ledger`` was just written with it, and has this ETag."""
        interval = holder.lease_seconds / RENEWALS_IN_A_LEASE
        # Renewals must not wait for one lost answer until the lease has expired.
        wait_seconds = min(max(interval, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self.bucket, self._of_ledger = bucket, BucketFolder(bucket.url, 1, wait_seconds)
        self.ledger = ledger
        """The ledger as this head wrote it last."""
        self._token, self._etag = holder.token, etag
        super().__init__(f"the claim to {bucket.url}", interval)

    def change(self, change: Change) -> None:
        """Change the ledger.

        Raises RunOwned if another head has taken over the run, which then has changed nothing; and StoreError.
        """
        self._while_kept(partial(self._write, change))

    def _renew(self) -> None:
        self._write(lambda ledger: ledger.changed())

    def _release(self) -> None:
        self._write(lambda ledger: ledger.changed(holder=None))

    def _write(self, change: Change) -> None:
        while True:
            wanted = change(self.ledger)
            if (etag := write_ledger(self._of_ledger, wanted, self._etag)) is not None:
                self.ledger, self._etag = wanted, etag
                return
            self._read_again()

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
            self.ledger, self._etag = found.ledger, found.etag
            return
        by = f"now belong to {holder}" if holder else "were taken over and released by another head"
        raise RunOwned(
            f"the checkpoints in {self.bucket.url} {by}: this process ends, and stores nothing more. To continue the "
            "run here, end the other process first"
        )


def claim_store(bucket: BucketFolder, claimant: Claimant) -> StoreClaim:
    """Claim the ledger of a run for this head, and renew the claim until it is released.

    A claim of the same root on the same machine, since it was booted, is replaced at once, because only one process at
    a time holds a run's folder.

    Raises RunOwned if the lease of another head is valid, PublicationError if the ledger is another run's, and the
    errors of ``read_ledger``.
    """
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
        return StoreClaim(bucket, holder, wanted, etag)
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
