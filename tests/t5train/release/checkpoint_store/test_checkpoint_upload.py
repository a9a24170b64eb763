"""Checkpoints in a real S3 server: what readers see, what is kept, and what is removed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import DigestMismatch, IncompleteCheckpoint, RecordError, StoreError
from t5train.files.atomic import discard
from t5train.files.run_folder import CHECKPOINTS, METRICS
from t5train.progress import silent
from t5train.release.checkpoint_store.bucket_checkpoints import (
    Kept,
    linked,
    prune_store,
    remove_abandoned,
    store_checkpoint,
    take_stock,
)
from t5train.release.checkpoint_store.store_claim import StoreClaim
from t5train.release.fetching import fetch
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.verification import verify
from tests.support.changed_answers import refusing
from tests.support.checkpoints import small_tags
from tests.support.checkpoints.stored_runs import claim, ledger_at, store
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow


@pytest.fixture
def this(destination: str) -> Iterator[StoreClaim]:
    """A head that may store the checkpoints of a run at the destination."""
    claimed = claim(destination)
    yield claimed
    claimed.release()


def test_a_stored_checkpoint_is_a_publication_with_its_ranks_files_and_the_metrics(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path
) -> None:
    (tmp_path / METRICS).write_text('{"step": 100}\n')
    entry = store(this, tmp_path, 100)
    where = f"{destination}/{entry.folder}"
    manifest = reader.require_only(where)
    assert set(manifest["files"]) == {"part0.pt", "part1.pt", "rank-00000.json", "rank-00001.json", METRICS}
    assert (manifest["tag"], manifest["step"], manifest["inputs"]["run"]) == ("step-00000100", 100, "r" * 64)
    assert verify(where).kind == "stored-checkpoint"
    with pytest.raises(RecordError, match=rf"holds the checkpoints of a run. Name one of them: {Path(where).name}"):
        verify(where.rpartition("/")[0])
    copy = fetch(where, tmp_path / "copy").path
    assert (copy / "part1.pt").read_bytes() == (tmp_path / CHECKPOINTS / "step-00000100" / "part1.pt").read_bytes()


def test_what_is_not_kept_leaves_the_ledger_first_then_its_manifest_then_its_objects(
    destination: str, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = claim(destination, lease_seconds=600)
    for step in (100, 200):
        store(this, tmp_path, step)
    sent: list[tuple[str, str]] = []
    call = BucketFolder.call

    def recorded(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        if operation in {"put_object", "delete_object"}:
            listed = [one.tag for one in ledger_at(destination).checkpoints]
            sent.append((f"{self.url.rpartition('/')[2]}/{name}", f"{'step-00000100' in listed}"))
        return call(self, operation, name, **arguments)

    store(this, tmp_path, 300, keep_last=3)
    monkeypatch.setattr(BucketFolder, "call", recorded)
    prune_store(this, Kept(2, None))
    folder, ledger, *removed, last = sent[0][0].rpartition("/")[0], sent[0], *sent[1:]
    assert ledger == (f"{folder}/run.json", "True")
    (gone,) = {name.partition("/")[0] for name, _ in removed}
    assert gone.startswith("step-00000100-")
    assert removed[0] == (f"{gone}/manifest.json", "False")
    assert len(removed) == 5
    assert last[0].endswith("/run.json")
    left = {name.partition("/")[0] for name in reader.keys(destination)}
    assert left == {"run.json", *(one.folder for one in ledger_at(destination).checkpoints)}
    assert len(left) == 3
    this.release()


def test_every_so_many_steps_a_checkpoint_is_kept(this: StoreClaim, destination: str, tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        store(this, tmp_path, step, keep_last=4)
    prune_store(this, Kept(1, 200))
    assert [one.tag for one in ledger_at(destination).checkpoints] == ["step-00000200", "step-00000400"]


def test_a_removal_that_was_interrupted_is_completed_later(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(this, tmp_path, 100)
    with monkeypatch.context() as patched:
        refusing(patched, "delete_object")
        with pytest.raises(StoreError):
            store(this, tmp_path, 200, keep_last=1)
    assert [one.tag for one in ledger_at(destination).checkpoints] == ["step-00000200"]
    assert any(name.startswith("step-00000100-") for name in reader.keys(destination))
    prune_store(this, Kept(1, None))
    assert not any(name.startswith("step-00000100-") for name in reader.keys(destination))


def test_a_checkpoint_that_the_run_removes_meanwhile_is_stored_nevertheless(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path
) -> None:
    tag = small_tags.save(tmp_path / CHECKPOINTS, 100)
    folder = linked(tmp_path, tag.name)
    discard(tag)
    entry = store_checkpoint(this, folder, silent)
    reader.require_only(f"{destination}/{entry.folder}")
    with pytest.raises(IncompleteCheckpoint):
        linked(tmp_path, "step-00000200")


def _altered(folder: Path) -> None:
    (folder / "part1.pt").write_bytes(b"x" * 100)


def _without_a_sidecar(folder: Path) -> None:
    (folder / "rank-00001.json").unlink()


@pytest.mark.parametrize(("damage", "error"), [(_altered, DigestMismatch), (_without_a_sidecar, IncompleteCheckpoint)])
def test_a_damaged_checkpoint_is_not_stored(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path,
    damage: Callable[[Path], None], error: type[Exception],
) -> None:  # fmt: skip
    small_tags.save(tmp_path / CHECKPOINTS, 100)
    folder = linked(tmp_path, "step-00000100")
    damage(folder)
    with pytest.raises(error):
        store_checkpoint(this, folder, silent)
    assert not ledger_at(destination).checkpoints
    assert reader.keys(destination) == {"run.json"}


ABANDONED, CONTINUED = "step-00000150-0123456789ab", "step-00000160-0123456789ab"


def test_what_a_lost_head_did_not_finish_is_removed_and_what_it_finished_is_used(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path
) -> None:
    first, second = (store(this, tmp_path, step) for step in (100, 200))
    this.change(lambda ledger: ledger.changed(checkpoints=()))  # as if it was lost right before it named them
    others = (f"{ABANDONED}/attempt/part0.pt", f"{CONTINUED}/attempt/part0.pt", "notes/step-00000170.txt")
    for name in others:
        reader.put(destination, name, b"left")
    take_stock(this, {"step-00000160"})
    remove_abandoned(this)
    left = {name.partition("/")[0] for name in reader.keys(destination)}
    assert left == {"run.json", first.folder, second.folder, CONTINUED, "notes"}
    assert ledger_at(destination).checkpoints == (first, second)
    assert ledger_at(destination).removing == ()


def test_a_complete_folder_that_is_not_this_runs_is_neither_used_nor_removed(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader.put(destination, f"{ABANDONED}/manifest.json", b"{}")
    take_stock(this, set())
    assert ledger_at(destination).checkpoints == ledger_at(destination).removing == ()
    assert f"{ABANDONED} is not used, and not removed" in caplog.text


def test_a_checkpoint_that_the_ledger_did_not_get_to_name_does_not_replace_a_later_one_of_its_step(
    this: StoreClaim, destination: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unnamed = store(this, tmp_path / "one", 100)
    this.change(lambda ledger: ledger.changed(checkpoints=()))
    small_tags.save(tmp_path / "two" / CHECKPOINTS, 100, versions={"torch": "another"})
    named = store_checkpoint(this, linked(tmp_path / "two", unnamed.tag), silent)
    take_stock(this, set())
    assert ledger_at(destination).checkpoints == (named,)
    assert f"{unnamed.folder} is not used, and not removed: the run has another step-00000100" in caplog.text


def test_a_checkpoint_of_an_earlier_beginning_or_without_its_files_is_not_used(
    this: StoreClaim, destination: str, reader: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    early, hollow = store(this, tmp_path, 100), store(this, tmp_path, 200)
    gone = next(name for name in reader.keys(destination) if hollow.folder in name and "part0" in name)
    reader.delete(destination, gone)
    this.change(lambda ledger: ledger.changed(checkpoints=()))
    take_stock(this, set())
    assert ledger_at(destination).checkpoints == (early,)
    assert "some of its files are missing or have another size (part0.pt has 0 of 100 bytes)" in caplog.text
    reader.put(destination, gone, b"cut off")
    take_stock(this, set())
    assert ledger_at(destination).checkpoints == (early,)
    assert "(part0.pt has 7 of 100 bytes)" in caplog.text
    this.change(lambda ledger: ledger.changed(checkpoints=(), beginnings=("0123456789abcdef",)))
    take_stock(this, set())
    assert ledger_at(destination).checkpoints == ()


def test_heads_that_store_different_files_of_one_step_do_not_mix_them(
    this: StoreClaim, destination: str, tmp_path: Path
) -> None:
    first = store(this, tmp_path / "one", 100)
    small_tags.save(tmp_path / "two" / CHECKPOINTS, 100, skipped_steps=0, versions={"torch": "another"})
    second = store_checkpoint(this, linked(tmp_path / "two", first.tag), silent)
    assert first.folder != second.folder
    assert ledger_at(destination).checkpoints == (second,)
    assert ledger_at(destination).set_aside == (first.folder,)
