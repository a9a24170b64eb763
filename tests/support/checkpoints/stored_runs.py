"""Runs with small checkpoints, and heads that store them in a bucket."""

from pathlib import Path
from typing import Any

from t5train.errors import RunOwned
from t5train.files.run_folder import CHECKPOINTS
from t5train.progress import silent
from t5train.release.checkpoint_store.bucket_checkpoints import Kept, linked, prune_store, store_checkpoint
from t5train.release.checkpoint_store.ledger import Ledger, StoredTag, read_ledger
from t5train.release.checkpoint_store.store_claim import Claimant, StoreClaim, claim_store
from t5train.release.object_store.bucket import BucketFolder
from tests.support.checkpoints import small_tags

RUN: dict[str, Any] = {"fingerprint": "r" * 64, "unique_id": "1" * 32}
LEASE_SECONDS = 4.0


def claimant(root: str = "/a", lease_seconds: float = LEASE_SECONDS, **of_run: str) -> Claimant:
    """A head that wants to store the checkpoints of a run. Heads with different roots are different ones."""
    return Claimant(RUN | of_run, "recipe: smoke\n", root, "a boot", lease_seconds)


def claim(url: str, root: str = "/a", lease_seconds: float = LEASE_SECONDS, **of_run: str) -> StoreClaim:
    return claim_store(BucketFolder(url), claimant(root, lease_seconds, **of_run))


def kill(claim: StoreClaim) -> None:
    """Renew a claim no longer, and do not release it either, as if its process was killed."""
    claim._release = lambda: None
    claim.release()


def store(claim: StoreClaim, run_folder: Path, step: int, keep_last: int = 2) -> StoredTag:
    tag = small_tags.save(run_folder / CHECKPOINTS, step).name
    entry = store_checkpoint(claim, linked(run_folder, tag), silent)
    prune_store(claim, Kept(keep_last, None))
    return entry


def ledger_at(url: str) -> Ledger:
    found = read_ledger(BucketFolder(url))
    assert found is not None
    return found.ledger


def is_superseded(claim: StoreClaim) -> bool:
    """Whether a head learns at its next change that another one has taken over the run."""
    try:
        claim.renew()
    except RunOwned:
        return True
    return False
