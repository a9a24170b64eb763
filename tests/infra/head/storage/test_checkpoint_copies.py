"""The head copies checkpoints to a real S3 server while ranks run, and continues runs from there."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.head.storage.checkpoint_copies import CheckpointCopies, begin_copies, check_bucket
from infra.head.storage.continued_run import stored_run, take_identity
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.errors import InputError, PublicationError, RecordError, RunOwned, SpecError, StoreError
from t5train.files.run_folder import CHECKPOINTS, RUN, STORING
from t5train.progress import silent
from t5train.release.object_store.bucket import BucketFolder
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.checkpoints import small_tags
from tests.support.checkpoints.stored_runs import claim, ledger_at
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

SECONDS = 30


@pytest.fixture
def make_spec(tmp_path: Path, destination: str) -> Callable[[str], RunSpec]:
    """Makes the spec of the run ``wiki`` under a root of this name, begun there unless it is called ``fresh``."""

    def make(root: str = "a", **settings: Any) -> RunSpec:
        changes = {
            "storage.root": json.dumps(str(tmp_path / root)),
            "name": "wiki",
            "storage.publish_checkpoints_under": destination,
            "cluster.lease_seconds": 5,
            **settings,
        }
        spec = recipe("smoke").with_settings(changes)
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


def stored_tags(spec: RunSpec) -> list[str]:
    return [one.tag for one in ledger_at(str(spec.checkpoints_url)).checkpoints]


def await_stored(spec: RunSpec, *expected: str) -> None:
    deadline = time.monotonic() + SECONDS
    while stored_tags(spec) != [*expected]:
        assert time.monotonic() < deadline, stored_tags(spec)
        time.sleep(0.2)


def test_complete_checkpoints_are_copied_while_ranks_run_and_the_newest_ones_kept(
    make_spec: Callable[..., RunSpec],
) -> None:
    spec = make_spec()
    copies = copies_of(spec)
    copies.start()
    for step in (100, 200, 300):
        unfinished = small_tags.save(spec.run_folder / CHECKPOINTS, step + 50)
        (unfinished / "rank-00001.json").unlink()
        small_tags.save(spec.run_folder / CHECKPOINTS, step)
        await_stored(spec, *[f"step-{one:08d}" for one in (100, 200, 300) if step - 200 < one <= step])
    copies.end()
    assert not list((spec.run_folder / STORING).iterdir())
    assert ledger_at(str(spec.checkpoints_url)).holder is None


def test_a_store_that_does_not_answer_is_logged_once_and_nothing_else_ends_until_training_has(
    make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec()
    copies = copies_of(spec)

    def failing(*_: object, **__: object) -> object:
        raise StoreError("s3 cannot be written: the server is busy", code="SlowDown")

    with monkeypatch.context() as patched:
        patched.setattr(BucketFolder, "call", failing)
        patched.setattr("infra.head.storage.checkpoint_copies._RETRY_SECONDS", 0.1)
        small_tags.save(spec.run_folder / CHECKPOINTS, 100)
        copies.start()
        time.sleep(2)
        copies.require_kept()
        assert caplog.text.count("cannot store the newest checkpoint, will retry") == 1
        with pytest.raises(PublicationError, match=r"training is done, but .* no step is trained again"):
            copies.catch_up(silent)
    copies.catch_up(silent)
    assert stored_tags(spec) == ["step-00000100"]
    copies.end()


def test_a_head_that_was_superseded_stops(make_spec: Callable[..., RunSpec]) -> None:
    spec, other = make_spec(), make_spec("b")
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    claim(str(spec.checkpoints_url), str(spec.storage.root.resolve())).end()  # as if by a copy of this machine
    taken = copies_of(other)
    for act in (copies.confirm, copies.require_kept, lambda: copies.catch_up(silent)):
        with pytest.raises(RunOwned):
            act()
    assert stored_tags(spec) == []
    copies.end()
    taken.confirm()
    taken.end()


def test_a_run_that_has_lost_its_checkpoints_gets_the_newest_one_back(make_spec: Callable[..., RunSpec]) -> None:
    spec, fresh = make_spec(), make_spec("fresh")
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies.catch_up(silent)
    copies.end()
    take_identity(fresh, stored_run(str(spec.checkpoints_url)))
    continued = copies_of(fresh)
    continued.prepare(silent)
    assert tags.complete_tags(fresh.run_folder / CHECKPOINTS) == ["step-00000100"]
    assert (fresh.run_folder / RUN).read_text() != ""
    continued.end()


def test_a_run_that_begins_again_keeps_what_is_stored_and_restores_nothing(
    make_spec: Callable[..., RunSpec], reader: Reader
) -> None:
    spec = make_spec()
    copies = copies_of(spec)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100).rename(spec.run_folder / "step-00000100")
    (spec.run_folder / CHECKPOINTS).joinpath("step-00000100").symlink_to(spec.run_folder / "step-00000100")
    copies.catch_up(silent)
    before = reader.keys(str(spec.checkpoints_url))
    (spec.run_folder / CHECKPOINTS / "step-00000100").unlink()
    ask_to_begin_again(spec.run_folder)
    copies.prepare(silent)
    assert not tags.complete_tags(spec.run_folder / CHECKPOINTS)
    small_tags.save(spec.run_folder / CHECKPOINTS, 100)
    copies.catch_up(silent)
    (again,) = ledger_at(str(spec.checkpoints_url)).checkpoints
    assert (again.tag, again.folder) == ("step-00000100", "again-1-step-00000100")
    assert before <= reader.keys(str(spec.checkpoints_url))
    copies.end()


def test_another_head_is_refused_before_training_while_the_lease_is_valid(make_spec: Callable[..., RunSpec]) -> None:
    spec, other, fresh = make_spec(), make_spec("b"), make_spec("fresh")
    copies = copies_of(spec)
    with pytest.raises(RunOwned, match="lease is valid for another"):
        check_bucket(other)
    with pytest.raises(RunOwned, match="lease is valid for another"):
        take_identity(fresh, stored_run(str(spec.checkpoints_url)))
    assert not fresh.run_folder.exists()
    with pytest.raises(PublicationError, match=r"another run with this name .* `t5-pretrain run --from s3://"):
        check_bucket(fresh)
    copies.end()
    check_bucket(other)


def test_a_folder_of_another_run_is_not_continued(make_spec: Callable[..., RunSpec]) -> None:
    spec, other = make_spec(), make_spec("b")
    copies_of(spec).end()
    begun = json.loads((other.run_folder / RUN).read_text())
    (other.run_folder / RUN).write_text(json.dumps(begun | {"unique_id": "2" * 32}))
    with pytest.raises(SpecError, match=r"is that of another run, .* choose another --root"):
        take_identity(other, stored_run(str(spec.checkpoints_url)))


def test_a_url_without_a_run_is_refused(make_spec: Callable[..., RunSpec], destination: str, reader: Reader) -> None:
    with pytest.raises(InputError, match="is not in S3"):
        stored_run("/data/wiki")
    with pytest.raises(RecordError, match="holds no run"):
        stored_run(f"{destination}/wiki")
    spec = make_spec()
    copies_of(spec).end()
    reader.put(f"{destination}/moved", RUN, reader.content(str(spec.checkpoints_url), RUN))
    with pytest.raises(InputError, match=r"of the run 'wiki', so the last part of the URL must be 'wiki'"):
        stored_run(f"{destination}/moved")
