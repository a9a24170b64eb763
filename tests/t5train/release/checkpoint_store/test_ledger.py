"""The ledger of a run in a real S3 server: which head may change it, and what a superseded head can still do."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import DigestMismatch, PublicationError, RunOwned, StoreError, T5TrainError
from t5train.files import ownership
from t5train.release.checkpoint_store import store_claim
from t5train.release.checkpoint_store.ledger import LEDGER, FoundLedger, read_ledger
from t5train.release.checkpoint_store.store_claim import StoreClaim
from t5train.release.object_store.bucket import BucketFolder
from tests.support.changed_answers import answering
from tests.support.checkpoints.stored_runs import LEASE_SECONDS, claim, is_superseded, kill, ledger_at, store
from tests.support.s3_reader import Reader
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow


def await_expired(destination: str) -> None:
    """Wait until the lease of the ledger's holder has expired, by the server's clock."""

    def has_expired() -> bool:
        found = read_ledger(BucketFolder(destination))
        return found is not None and found.left_seconds == 0

    await_that(has_expired)


def test_a_run_is_refused_while_its_head_renews_its_lease_and_taken_over_after_that(
    destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_claim, "RENEWALS_IN_A_LEASE", 20)  # one that a busy machine delays must not matter
    first = claim(destination, "/a")
    store(first, tmp_path, 100)
    time.sleep(LEASE_SECONDS)  # a living head renews its lease
    with pytest.raises(RunOwned, match=r"belong to head .*, root /a, .* is valid for another \d s"):
        claim(destination, "/b")
    kill(first)
    await_expired(destination)
    second = claim(destination, "/b")
    with pytest.raises(RunOwned, match=r"now belong to head .*, root /b"):
        store(first, tmp_path, 200, keep_last=1)
    assert [one.tag for one in ledger_at(destination).checkpoints] == ["step-00000100"]
    with pytest.raises(RunOwned):
        first.require_kept()
    assert not is_superseded(second)
    second.release()


def test_of_eight_heads_that_take_a_run_over_at_once_exactly_one_gets_it(destination: str) -> None:
    kill(claim(destination, "/gone", lease_seconds=0.2))
    await_expired(destination)
    barrier, won, refused = threading.Barrier(8), list[StoreClaim](), list[T5TrainError]()

    def take_over(number: int) -> None:
        barrier.wait()
        try:
            won.append(claim(destination, f"/{number}", lease_seconds=60))
        except (RunOwned, StoreError) as error:
            refused.append(error)

    threads = [threading.Thread(target=take_over, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    assert not is_superseded(won[0])
    won[0].release()


def test_a_released_run_and_one_of_the_same_head_and_root_are_claimed_at_once(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_END_SECONDS", 60.0)  # a busy machine may not release it within five seconds
    claim(destination, "/a").release()
    second = claim(destination, "/b")
    again = claim(destination, "/b")
    assert is_superseded(second)
    kill(second)
    again.release()


def test_a_head_finds_its_own_ledger_although_the_list_of_objects_is_stale(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any, **__: Any) -> list[str]:
        raise AssertionError("the list was asked for, and would be stale")

    head = claim(destination, "/a")
    with monkeypatch.context() as patch:
        patch.setattr(BucketFolder, "names", stale)
        head._etag = f'"{"0" * 32}"'  # as after a write whose answer was lost
        head.renew()
    assert not is_superseded(head)
    head.release()


def test_a_claim_that_is_renewed_while_it_is_replaced_is_replaced(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_END_SECONDS", 60.0)  # ample, as above
    first, read, renewed = claim(destination, "/a"), store_claim.read_ledger, list[int]()

    def read_before_a_renewal(bucket: BucketFolder) -> FoundLedger | None:
        found = read(bucket)
        if not renewed:
            renewed.append(1)
            first.renew()
        return found

    monkeypatch.setattr(store_claim, "read_ledger", read_before_a_renewal)
    second = claim(destination, "/a")
    assert renewed
    assert not is_superseded(second)
    kill(first)
    second.release()


def test_a_ledger_of_another_run_and_a_folder_with_other_files_are_refused(destination: str, reader: Reader) -> None:
    claim(destination).release()
    with pytest.raises(PublicationError, match=r"checkpoints of another run .* run --from"):
        claim(destination, unique_id="2" * 32)
    reader.put(f"{destination}-model", "manifest.json", b"{}")
    with pytest.raises(PublicationError, match=r"holds no checkpoints of a run \(manifest\.json\)"):
        claim(f"{destination}-model")


def test_a_write_whose_answer_is_lost_counts(destination: str, monkeypatch: pytest.MonkeyPatch) -> None:
    this = claim(destination)
    lost = [StoreError("no answer", code="ReadTimeoutError")]

    def losing(send: Callable[[], Any], _: str | None) -> Any:
        answer = send()
        if lost:
            raise lost.pop()
        return answer

    answering(monkeypatch, "put_object", losing)
    this.change(lambda ledger: ledger.changed(removing=("step-00000100-0123456789ab",)))
    assert not lost
    assert ledger_at(destination).removing == ("step-00000100-0123456789ab",)
    assert not is_superseded(this)
    this.release()


@pytest.mark.parametrize(
    ("field", "value", "error", "said"),
    [
        (b'"beginnings": [', b'"0"', DigestMismatch, "was altered"),
        (b'"removing": [', b'"../step-00000100"', T5TrainError, "is not the folder of a check"),
    ],
)
def test_an_altered_ledger_is_refused_and_not_replaced(
    destination: str, reader: Reader, field: bytes, value: bytes, error: type[T5TrainError], said: str
) -> None:
    claim(destination).release()
    altered = reader.content(destination, LEDGER).replace(field, field + value)
    reader.put(destination, LEDGER, altered)
    with pytest.raises(error, match=said):
        claim(destination)
    assert reader.content(destination, LEDGER) == altered
