"""Publications that are there already and are not what they seem, and a server that fails after the decision."""

from collections.abc import Callable
from typing import Any

import pytest

from t5train.errors import PublicationError, StoreError
from t5train.records.stage_records import Export, Publication, parse_manifest
from t5train.release.object_store import insistent_bucket
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.publication import publish
from t5train.release.verification import verify
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

MakeExport = Callable[..., Export]
SMALL = {"config.json": 700, "model.safetensors": 40_000, "tokenizer/spiece.model": 3_000}


def refusing(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Have the server deny one operation."""
    call = BucketFolder.call

    def refused(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent == operation:
            raise StoreError(f"{sent}: access denied", code="AccessDenied")
        return call(self, sent, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", refused)


def test_a_manifest_that_names_fewer_files_than_the_certificate_is_not_reused(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    exported = make_random_export(sizes=SMALL)
    publish(exported, destination)
    record = parse_manifest(reader.content(destination, "manifest.json"), "manifest")
    assert isinstance(record, Publication)
    fewer = {name: digest for name, digest in record.files.items() if name != "model.safetensors"}
    changed = record.model_copy(update={"files": fewer}).sealed()
    reader.put(destination, "manifest.json", changed.manifest_text().encode())
    with pytest.raises(PublicationError, match=r"does not certify the present model\.safetensors"):
        publish(exported, destination)
    assert exported.files.keys() <= {name.partition("/")[2] for name in reader.keys(destination)}


def test_what_cannot_be_removed_after_the_decision_is_named_and_removed_by_the_next_call(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    exported = make_random_export(sizes=SMALL)
    with monkeypatch.context() as patch:
        refusing(patch, "list_multipart_uploads")
        assert not publish(exported, destination).reused
    assert "what other uploads left there could not be removed: list_multipart_uploads: access denied" in caplog.text
    assert len(list(exported.path.parent.iterdir())) == 2, "the journal is gone"
    assert publish(exported, destination).reused
    assert [path.name for path in exported.path.parent.iterdir()] == ["export"]


def test_uploads_that_the_server_does_not_list_are_aborted_by_their_ids(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, began = make_random_export(sizes=SMALL), []
    uploads = BucketFolder.uploads
    monkeypatch.setattr(BucketFolder, "uploads", lambda *_: [])
    bucket = BucketFolder(destination)
    with UploadJournal.opened(exported.path, f"{bucket.endpoint} {bucket.url}") as journal:
        for content in ({}, exported.files):
            attempt = journal.continue_attempt(exported.fingerprint, content)
            began.append(bucket.call("create_multipart_upload", f"{attempt}/a.bin")["UploadId"])
            journal.begin("a.bin", began[-1], 5 << 20)
    assert len(uploads(bucket)) == 2
    publish(exported, destination)
    assert not uploads(bucket)


def test_a_server_that_does_not_answer_is_no_fault_of_the_data(
    make_random_export: MakeExport, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make_random_export(sizes=SMALL), destination)
    chunks = BucketFolder.chunks

    def lost(self: BucketFolder, name: str, start: int = 0) -> Any:
        if name.endswith("config.json"):
            raise StoreError("the server cannot be reached", code="EndpointConnectionError")
        return chunks(self, name, start)

    monkeypatch.setattr(BucketFolder, "chunks", lost)
    monkeypatch.setattr(insistent_bucket, "INSIST_SECONDS", 1)
    with pytest.raises(StoreError, match=r"^the server cannot be reached$"):
        verify(destination)
