"""Publications to start from, in a real S3 server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.errors import DigestMismatch, InputError, RecordError, StorageError, T5TrainError
from t5train.records.stage_records import Export, StartingModelFiles
from t5train.records.start_copy import is_awaited
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish
from t5train.release.remote_start import begin, complete
from tests.support.object_server import ObjectServer

pytestmark = pytest.mark.slow

SIZES = {"config.json": 700, "spiece.model": 3_000, "model.safetensors": 3 << 20, "README.md": 100}


@pytest.fixture(autouse=True)
def published(make_random_export: Callable[..., Export], destination: str) -> Export:
    exported = make_random_export(sizes=SIZES)
    publish(exported, destination)
    return exported


def test_the_files_of_a_model_are_copied_and_used_without_the_store(
    published: Export, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(destination, tmp_path)
    assert (
        folder == tmp_path / "starts" / f"t5@{json.loads((folder / 'remote-start.json').read_text())['revision'][:12]}"
    )
    assert not (folder / "model.safetensors").exists()
    reported = []
    complete(folder, lambda *said: reported.append(said))
    assert reported[-1] == ("bytes fetched", reported[-1][2], reported[-1][2])
    record = StartingModelFiles.load(folder)
    record.verify()
    assert dict(record.files) == {name: published.files[name] for name in SIZES if name != "README.md"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert begin(destination, tmp_path) == folder
    complete(folder)


def test_another_publication_in_its_place_is_refused_where_a_run_began_with_the_first(
    s3: ObjectServer, destination: str, make_random_export: Callable[..., Export], tmp_path: Path
) -> None:
    folder = begin(destination, tmp_path)
    bucket = BucketFolder(destination)
    for name in [*bucket.names()]:
        bucket.call("delete_object", name)
    publish(make_random_export("another", seed=1, sizes=SIZES), destination)
    with pytest.raises(InputError, match=r"which now holds the publication [0-9a-f]{12}, but runs under this root"):
        complete(folder)
    assert begin(destination, tmp_path / "other") != folder
    with pytest.raises(RecordError, match="nothing is published there"):
        begin(f"{s3.url}/nothing/here", tmp_path)


def test_a_damaged_object_is_refused(destination: str, tmp_path: Path) -> None:
    folder = begin(destination, tmp_path)
    bucket = BucketFolder(destination)
    (name,) = [each for each in bucket.names() if each.endswith("model.safetensors")]
    bucket.put(name, bytes(SIZES["model.safetensors"]))
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        complete(folder)
    assert not (folder / "manifest.json").exists()


@pytest.mark.parametrize("left", [None, bytes(1000)])
def test_a_publication_of_which_an_object_is_missing_or_shorter_is_refused(
    destination: str, tmp_path: Path, left: bytes | None
) -> None:
    folder = begin(destination, tmp_path)
    bucket = BucketFolder(destination)
    (name,) = [each for each in bucket.names() if each.endswith("model.safetensors")]
    bucket.call("delete_object", name)
    if left is not None:
        bucket.put(name, left)
    with pytest.raises((DigestMismatch, InputError), match=r"model\.safetensors"):
        complete(folder)
    assert is_awaited(folder)


@pytest.mark.parametrize("length", [300, 1100])
def test_a_url_that_is_too_long_is_refused_in_one_line(s3: ObjectServer, tmp_path: Path, length: int) -> None:
    with pytest.raises(T5TrainError) as refused:
        begin(f"{s3.url}/{'é' * length}", tmp_path)
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_written_is_named(destination: str, tmp_path: Path) -> None:
    folder = begin(destination, tmp_path)
    (folder / "model.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"t5@[0-9a-f]{12} cannot be written: .*model\.safetensors"):
        complete(folder)
