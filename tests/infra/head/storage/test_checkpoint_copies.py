"""The head copies checkpoints to a real S3 server while ranks run, and continues runs from there."""

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.head.storage.checkpoint_copies import CheckpointCopies, begin_copies, check_bucket
from infra.head.storage.continued_run import stored_run, take_identity
from t5train import errors
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import ask_to_begin_again, resume_tag
from t5train.files.run_folder import CHECKPOINTS, RUN, STORING
from t5train.progress import silent
from t5train.release.checkpoint_store.bucket_checkpoints import linked, prune_store
from t5train.release.object_store.bucket import BucketFolder
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.checkpoints import small_tags
from tests.support.checkpoints.stored_runs import kill, ledger_at
from tests.support.s3_reader import Reader
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

HANG_SECONDS = 120
Make = Callable[..., RunSpec]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(f"infra.head.storage.checkpoint_copies.{name}", 0.1)


@pytest.fixture
def make_spec(tmp_path: Path, destination: str) -> Make:
    """Makes the spec of the run ``wiki`` under a root of this name, begun there unless it is called ``fresh``."""

    def make(root: str = "a", **settings: Any) -> RunSpec:
        storage = {"storage.root": json.dumps(str(tmp_path / root)), "storage.publish_checkpoints_under": destination}
        spec = recipe("smoke").with_settings({**storage, "name": "wiki", "cluster.lease_seconds": 600, **settings})
        if root != "fresh":
            spec.run_folder.mkdir(parents=True)
            begun = {"fingerprint": "r" * 64, "unique_id": "1" * 32, "spec": spec.model_dump(mode="json")}
            (spec.run_folder / RUN).write_text(json.dumps(begun))
        return spec

    return make


def copies_of(spec: RunSpec) -> CheckpointCopies:
    copies = begin_copies(spec)
    assert copies is not None
    return copies


def store_one(spec: RunSpec) -> None:
    """Store a checkpoint of step 100, and release the run."""
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies.catch_up(silent)
    copies.end()


def begin_again(spec: RunSpec) -> None:
    ask_to_begin_again(spec.run_folder)
    resume_tag(spec.run_folder)


def stored_tags(spec: RunSpec) -> list[str]:
    return [one.tag for one in ledger_at(str(spec.checkpoints_url)).checkpoints]


def await_stored(spec: RunSpec, *expected: str) -> None:
    await_that(lambda: stored_tags(spec) == [*expected])


def test_complete_checkpoints_are_copied_while_ranks_run_and_the_newest_ones_kept(
    make_spec: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    spec, links_left = make_spec(), list[list[Path]]()

    def look_and_prune(*of: Any) -> None:
        links_left.append(list((spec.run_folder / STORING).iterdir()))
        prune_store(*of)

    monkeypatch.setattr("infra.head.storage.checkpoint_copies.prune_store", look_and_prune)
    copies = copies_of(spec)
    copies.start()
    for step in (100, 200, 300):
        small_tags.save(spec.run_folder / CHECKPOINTS, step + 50, ranks=1, world_size=2)  # it lacks rank 1
        small_tags.save(spec.run_folder / CHECKPOINTS, step)
        await_stored(spec, *[f"step-{one:08d}" for one in (100, 200, 300) if step - 200 < one <= step])
    copies.end()
    for one in ledger_at(str(spec.checkpoints_url)).checkpoints:  # as `verify` and `fetch` take it
        assert f"{one.tag} is stored in {spec.checkpoints_url}/{one.folder}\n" in caplog.text
    assert links_left == [[], [], []], "links keep a deleted checkpoint's bytes"
    assert ledger_at(str(spec.checkpoints_url)).holder is None


def test_a_store_that_does_not_answer_is_logged_once_and_nothing_else_ends_until_training_has(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec()
    copies = copies_of(spec)
    tried = threading.Semaphore(0)

    def failing(*_: object, **__: object) -> object:
        tried.release()
        raise errors.StoreError("s3 cannot be written: the server is busy", code="SlowDown")

    with monkeypatch.context() as patched:
        patched.setattr(BucketFolder, "call", failing)
        patched.setattr("infra.head.storage.checkpoint_copies._RETRY_SECONDS", 0.1)
        patched.setattr("infra.head.storage.checkpoint_copies._INSIST_SECONDS", 1)
        small_tags.save(spec.run_folder / CHECKPOINTS, 100)
        copies.start()
        for _ in range(9):  # several times, with each of its tries
            assert tried.acquire(timeout=HANG_SECONDS)
        copies.require_kept()
        assert caplog.text.count("cannot store the newest checkpoint, will retry") == 1
        with pytest.raises(errors.PublicationError, match=r"training is done, but .* no step is trained again"):
            copies.catch_up(silent)
    copies.catch_up(silent)
    assert stored_tags(spec) == ["step-00000100"]
    copies.end()


def test_a_head_that_was_superseded_stops(make_spec: Make) -> None:
    spec, other = make_spec(), make_spec("b")
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    claim = copies.claim()
    assert claim.ledger.holder is not None
    expired = claim.ledger.holder.model_copy(update={"lease_seconds": 0})
    claim.change(lambda ledger: ledger.changed(holder=expired))  # as long after the last renewal
    kill(claim)
    taken = copies_of(other)
    for act in (copies.confirm, copies.require_kept, lambda: copies.catch_up(silent)):
        with pytest.raises(errors.RunOwned):
            act()
    assert stored_tags(spec) == []
    copies.end()
    taken.confirm()
    taken.end()


def test_a_run_without_its_checkpoints_gets_the_newest_one_back_and_does_not_begin_at_step_0(make_spec: Make) -> None:
    spec, fresh = make_spec(), make_spec("fresh")
    store_one(spec)
    take_identity(fresh, stored_run(str(spec.checkpoints_url)))
    with pytest.raises(errors.NothingVerifies, match="step-00000100"):
        resume_tag(fresh.run_folder)
    continued = copies_of(fresh)
    continued.prepare(silent)
    assert tags.complete_tags(fresh.run_folder / CHECKPOINTS) == ["step-00000100"]
    continued.end()


def test_a_run_that_begins_again_keeps_what_is_stored_and_uses_none_of_it(
    make_spec: Make, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, look = threading.Semaphore(0), CheckpointCopies._next

    def look_and_tell(of: CheckpointCopies) -> str | None:
        looked.release()
        return look(of)

    monkeypatch.setattr(CheckpointCopies, "_next", look_and_tell)
    spec = make_spec()
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies.catch_up(silent)
    copies.stop()
    before = reader.keys(str(spec.checkpoints_url))
    ask_to_begin_again(spec.run_folder)
    copies.prepare(silent)
    small_tags.save(spec.run_folder / CHECKPOINTS, 200)  # is not copied: the old ones are there until ranks are started
    while looked.acquire(blocking=False):
        pass
    copies.start()
    for _ in range(3):
        assert looked.acquire(timeout=HANG_SECONDS)
    assert stored_tags(spec) == ["step-00000100"]
    assert resume_tag(spec.run_folder) is None
    small_tags.save(spec.run_folder / CHECKPOINTS, 50)
    await_stored(spec, "step-00000050")
    copies.end()
    assert before <= reader.keys(str(spec.checkpoints_url))
    again = copies_of(spec)
    again.prepare(silent)
    assert stored_tags(spec) == ["step-00000050"]
    again.end()


def test_a_run_that_began_again_while_nothing_was_stored_is_not_resumed_from_before_that(make_spec: Make) -> None:
    spec = make_spec()
    store_one(spec)
    begin_again(spec)
    (again := copies_of(spec)).prepare(silent)
    assert not tags.complete_tags(spec.run_folder / CHECKPOINTS)
    again.end()


def test_an_interrupted_copy_is_not_continued_after_the_run_has_begun_again(make_spec: Make) -> None:
    spec = make_spec()
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    linked(spec.run_folder, "step-00000100")
    begin_again(spec)
    copies = copies_of(spec)
    copies.prepare(silent)
    copies.catch_up(silent)
    assert stored_tags(spec) == []
    copies.end()


def test_a_root_from_before_the_run_began_again_elsewhere_is_refused(make_spec: Make) -> None:
    spec, stale = make_spec(), make_spec("b")
    copies = copies_of(spec)
    begin_again(spec)
    copies.prepare(silent)
    copies.end()
    outdated = copies_of(stale)
    for _ in range(2):  # it may begin again itself, but not use what the other has stored
        with pytest.raises(errors.RunChanged, match=r"has begun again elsewhere .* with another --root"):
            outdated.prepare(silent)
        begin_again(stale)
    outdated.end()


def test_a_damaged_checkpoint_does_not_keep_others_from_being_stored(make_spec: Make) -> None:
    spec = make_spec()
    copies = copies_of(spec)
    damaged = small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    (damaged / "part0.pt").write_bytes(b"x" * 100)
    with pytest.raises(errors.PublicationError, match=r"part0\.pt has sha256 \S+, but sha256 \S+ was recorded"):
        copies.catch_up(silent)
    small_tags.save(spec.run_folder / CHECKPOINTS, 200)
    copies.catch_up(silent)
    assert stored_tags(spec) == ["step-00000200"]
    copies.end()


def test_a_checkpoint_that_is_damaged_in_the_bucket_is_stored_again_and_no_intact_one_pruned_for_it(
    make_spec: Make, reader: Reader
) -> None:
    spec, fresh = make_spec(), make_spec("fresh")
    copies = copies_of(spec)
    for step in (100, 200):
        small_tags.save(spec.run_folder / CHECKPOINTS, step)
        copies.catch_up(silent)
    copies.end()
    url = str(spec.checkpoints_url)
    name = next(name for name in reader.keys(url) if name.startswith("step-00000200") and name.endswith("part0.pt"))
    reader.put(url, name, bytes(100))
    take_identity(fresh, stored_run(url))
    continued = copies_of(fresh)
    continued.prepare(silent)
    assert tags.complete_tags(fresh.run_folder / CHECKPOINTS) == ["step-00000100"]
    assert not list((fresh.run_folder / CHECKPOINTS).glob(".*"))
    small_tags.save(fresh.run_folder / CHECKPOINTS, 200, versions={"torch": "another"})
    continued.catch_up(silent)
    assert stored_tags(spec) == ["step-00000100", "step-00000200"]
    assert name in reader.keys(url)
    continued.end()


def test_a_run_resumes_without_its_store_only_if_it_has_a_checkpoint_itself(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(errors.StoreError):
        begin_copies(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies = copies_of(spec)
    check_bucket(spec)
    copies.prepare(silent)
    copies.require_kept()
    assert "checkpoints are not stored for now" in caplog.text
    copies.end()


def test_stopping_does_not_wait_for_a_store_that_is_silent(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    copies = copies_of(spec)
    answering, called = threading.Event(), threading.Event()

    def hanging(*_: object, **__: object) -> object:
        called.set()
        answering.wait()
        raise errors.StoreError("no answer", code="ReadTimeoutError")

    monkeypatch.setattr(BucketFolder, "call", hanging)
    monkeypatch.setattr("infra.head.storage.checkpoint_copies._STOP_SECONDS", 0.1)
    monkeypatch.setattr("t5train.files.ownership._END_SECONDS", 0.1)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies.start()
    assert called.wait(HANG_SECONDS)
    late_answer = threading.Timer(HANG_SECONDS, answering.set)
    late_answer.start()
    copies.end()
    assert not answering.is_set()
    late_answer.cancel()
    answering.set()


def test_another_head_is_refused_before_training_while_the_lease_is_valid(make_spec: Make) -> None:
    spec, other, fresh = make_spec(), make_spec("b"), make_spec("fresh")
    copies = copies_of(spec)
    with pytest.raises(errors.RunOwned, match="lease is valid for another"):
        check_bucket(other)
    with pytest.raises(errors.RunOwned, match="lease is valid for another"):
        take_identity(fresh, stored_run(str(spec.checkpoints_url)))
    assert not fresh.run_folder.exists()
    with pytest.raises(errors.PublicationError, match=r"another run with this name, .* `t5-pretrain run --from s3://"):
        check_bucket(fresh)
    copies.end()
    check_bucket(other)


def test_a_folder_of_another_run_is_not_continued(make_spec: Make) -> None:
    spec, other = make_spec(), make_spec("b")
    copies_of(spec).end()
    begun = json.loads((other.run_folder / RUN).read_text())
    (other.run_folder / RUN).write_text(json.dumps(begun | {"unique_id": "2" * 32}))
    with pytest.raises(errors.SpecError, match=r"has files of another run, .* choose another --root"):
        take_identity(other, stored_run(str(spec.checkpoints_url)))


def test_a_url_without_a_run_is_refused(make_spec: Make, destination: str, reader: Reader) -> None:
    with pytest.raises(errors.InputError, match="is not in S3"):
        stored_run("/data/wiki")
    with pytest.raises(errors.RecordError, match="holds no run"):
        stored_run(f"{destination}/wiki")
    spec = make_spec()
    copies_of(spec).end()
    reader.put(f"{destination}/moved", RUN, reader.content(str(spec.checkpoints_url), RUN))
    with pytest.raises(errors.InputError, match=r"of the run 'wiki', so the last part of the URL must be 'wiki'"):
        stored_run(f"{destination}/moved")


def test_the_best_checkpoint_is_stored_before_the_newest_and_stays_as_long(make_spec: Make) -> None:
    spec = make_spec(**{"storage.keep_last": 1})
    for step, best in ((100, 100), (200, 100)):
        small_tags.save_judged(spec.run_folder / CHECKPOINTS, step, best)
    copies = copies_of(spec)
    copies.catch_up(silent)
    assert stored_tags(spec) == ["step-00000100", "step-00000200"]
    small_tags.save_judged(spec.run_folder / CHECKPOINTS, 300, 100)
    await_stored(spec, "step-00000100", "step-00000300")  # old ones go a moment after a new one is stored
    small_tags.save_judged(spec.run_folder / CHECKPOINTS, 400, 400)
    await_stored(spec, "step-00000400")
    copies.end()


def test_the_best_checkpoint_is_restored_with_the_newest_which_is_not_resumed_from_without_it(
    make_spec: Make, reader: Reader
) -> None:
    spec, fresh = make_spec(**{"storage.keep_last": 2}), make_spec("fresh")
    copies = copies_of(spec)
    for step, best in ((100, 100), (200, 200), (300, 100), (400, 200)):
        small_tags.save_judged(spec.run_folder / CHECKPOINTS, step, best)
        copies.catch_up(silent)
    copies.end()
    url = str(spec.checkpoints_url)
    assert stored_tags(spec) == [f"step-00000{step}" for step in (100, 200, 300, 400)]
    take_identity(fresh, stored_run(url))
    continued = copies_of(fresh)
    continued.prepare(silent)
    restored = fresh.run_folder / CHECKPOINTS
    assert tags.complete_tags(restored) == ["step-00000400", "step-00000200"]
    shutil.rmtree(restored / "step-00000200")  # as if the head had been killed before it was restored
    continued.prepare(silent)
    assert tags.complete_tags(restored) == ["step-00000400", "step-00000200"]
    shutil.rmtree(restored)
    name = next(name for name in reader.keys(url) if name.startswith("step-00000200") and name.endswith("part0.pt"))
    reader.put(url, name, bytes(100))
    continued.prepare(silent)
    assert resume_tag(fresh.run_folder) == "step-00000300"
    continued.end()


def test_the_newest_checkpoint_is_not_stored_without_the_best_one(make_spec: Make) -> None:
    spec = make_spec()
    damaged = small_tags.save_judged(spec.run_folder / CHECKPOINTS, 100, 100)
    (damaged / "part0.pt").write_bytes(b"x" * 100)
    small_tags.save_judged(spec.run_folder / CHECKPOINTS, 200, 100)
    copies = copies_of(spec)
    with pytest.raises(errors.PublicationError, match=r"step-00000100/part0\.pt has sha256"):
        copies.catch_up(silent)
    assert stored_tags(spec) == []
    copies.end()
