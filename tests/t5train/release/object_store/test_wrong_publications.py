"""Publications that are there already and are not what they seem, and a server that fails after the decision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import PublicationError, StoreError
from t5train.records.stage_records import Export, Publication, parse_manifest
from t5train.release.object_store import bucket, bucket_publication
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.publication import publish
from t5train.release.verification import verify
from tests.support.certified_exports import make_forged
from tests.support.changed_answers import answering, refusing
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow


def test_a_manifest_that_names_fewer_files_than_the_certificate_is_not_reused(
    small: Export, destination: str, reader: Reader
) -> None:
    publish(small, destination)
    record = parse_manifest(reader.content(destination, "manifest.json"), "manifest")
    assert isinstance(record, Publication)
    fewer = {name: digest for name, digest in record.files.items() if name != "model.safetensors"}
    changed = record.model_copy(update={"files": fewer}).sealed()
    reader.put(destination, "manifest.json", changed.manifest_text().encode())
    with pytest.raises(PublicationError, match=r"its model\.safetensors is missing"):
        publish(small, destination)
    assert small.files.keys() <= {name.partition("/")[2] for name in reader.keys(destination)}


def test_of_two_models_with_one_fingerprint_the_second_is_refused_after_the_race(
    small: Export, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    forged = make_forged(tmp_path / "forged", small, lambda folder: (folder / "config.json").write_bytes(bytes(700)))

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            patch.undo()
            publish(forged, destination)
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "put_object", overtaken)
        with pytest.raises(PublicationError, match=r"other content: its config\.json has sha256"):
            publish(small, destination)
    assert reader.require_only(destination)["files"] == forged.model_dump(mode="json")["files"]


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_publishing_succeeds_although_the_list_of_objects_is_stale(
    small: Export, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch, is_answer_lost: bool
) -> None:
    def lost(send: Callable[[], Any], name: str | None) -> Any:
        answer = send()
        if name == "manifest.json" and is_answer_lost:
            raise StoreError("no answer", code="ReadTimeoutError")
        return answer

    def stale(self: BucketFolder, folder: str = "", *, below: bool = True) -> list[str]:
        return [name for name in names(self, folder, below=below) if name != "manifest.json"]

    names = BucketFolder.names
    monkeypatch.setattr(BucketFolder, "names", stale)
    answering(monkeypatch, "put_object", lost)
    monkeypatch.setattr(bucket_publication, "_FIRST_PAUSE_SECONDS", 0)
    published = publish(small, destination)
    assert reader.require_only(destination)["folder"] == published.folder
    assert not published.reused
    assert publish(small, destination).reused, "the list is still stale, and the server refuses to replace the manifest"
    reader.require_only(destination)


def test_what_cannot_be_removed_after_the_decision_is_named_and_removed_by_the_next_call(
    small: Export, destination: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        refusing(patch, "list_multipart_uploads")
        assert not publish(small, destination).reused
    assert "what other uploads left there could not be removed: list_multipart_uploads: access denied" in caplog.text
    assert len(list(small.path.parent.iterdir())) == 2, "the journal is gone"
    assert publish(small, destination).reused
    assert [path.name for path in small.path.parent.iterdir()] == ["export"]


def test_uploads_of_all_attempts_are_aborted_on_servers_that_list_those_of_one_object_only(
    small: Export, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one_object(self: BucketFolder, beginning: str = "") -> list[tuple[str, str]]:
        return [(name, upload_id) for name, upload_id in uploads(self, beginning) if name == beginning]

    uploads, bucket = BucketFolder.uploads, BucketFolder(destination)
    monkeypatch.setattr(BucketFolder, "uploads", of_one_object)
    earlier = {"config.json": small.files["config.json"]}
    with UploadJournal.opened(small.path, f"{bucket.endpoint} {bucket.url}") as journal:
        attempts = [journal.continue_attempt(small.fingerprint, files) for files in (earlier, small.files)]
    for attempt in attempts:
        bucket.call("create_multipart_upload", f"{attempt}/config.json")
    assert len(uploads(bucket)) == 2
    assert publish(small, destination).folder == attempts[1]
    assert not uploads(bucket)


def test_a_server_that_does_not_answer_is_no_fault_of_the_data(
    small: Export, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: BucketFolder, name: str, start: int = 0) -> Any:
        if name.endswith("config.json"):
            raise StoreError("the server cannot be reached", code="EndpointConnectionError")
        return chunks(self, name, start)

    publish(small, destination)
    chunks = BucketFolder.chunks
    monkeypatch.setattr(BucketFolder, "chunks", lost)
    monkeypatch.setattr(bucket, "INSIST_SECONDS", 1)
    with pytest.raises(StoreError, match=r"^the server cannot be reached$"):
        verify(destination)
