"""Publications that are there already and are not what they seem, and a server that fails after the decision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import PublicationError, StoreError
from t5train.records.stage_records import Export, Publication, parse_manifest
from t5train.release.object_store import bucket_publication, insistent_bucket
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.publication import publish
from t5train.release.verification import verify
from tests.support.certified_exports import make_forged
from tests.support.changed_answers import answering
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
    with pytest.raises(PublicationError, match=r"its model\.safetensors is missing"):
        publish(exported, destination)
    assert exported.files.keys() <= {name.partition("/")[2] for name in reader.keys(destination)}


def test_another_model_under_the_same_fingerprint_is_not_reused_and_stays(
    make_random_export: MakeExport, destination: str, tmp_path: Path
) -> None:
    exported = make_random_export(sizes=SMALL)
    forged = make_forged(tmp_path / "forged", exported, lambda folder: _overwrite(folder / "model.safetensors"))
    publish(forged, destination)
    with pytest.raises(PublicationError, match=r"other content: its model\.safetensors has sha256"):
        publish(exported, destination)
    assert verify(destination).files == forged.files


def _overwrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def test_of_two_models_with_one_fingerprint_the_second_is_refused_after_the_race(
    make_random_export: MakeExport, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    exported = make_random_export(sizes=SMALL)
    forged = make_forged(tmp_path / "forged", exported, lambda folder: _overwrite(folder / "config.json"))

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            patch.undo()
            publish(forged, destination)
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "put_object", overtaken)
        with pytest.raises(PublicationError, match=r"other content: its config\.json has sha256"):
            publish(exported, destination)
    assert reader.require_only(destination)["files"] == forged.model_dump(mode="json")["files"]


def test_another_file_in_the_folder_of_a_publication_is_not_reused_with_it(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    exported = make_random_export(sizes=SMALL)
    folder = publish(exported, destination).folder
    reader.put(destination, f"{folder}/adapter_config.json", b"{}")
    with pytest.raises(PublicationError, match=r"files that were not published: adapter_config\.json"):
        publish(exported, destination)


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_publishing_succeeds_although_the_list_of_objects_is_stale(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch,
    is_answer_lost: bool,
) -> None:  # fmt: skip
    exported, names = make_random_export(sizes=SMALL), BucketFolder.names

    def lost(send: Callable[[], Any], name: str | None) -> Any:
        answer = send()
        if name == "manifest.json" and is_answer_lost:
            raise StoreError("no answer", code="ReadTimeoutError")
        return answer

    def stale(self: BucketFolder, folder: str = "", *, below: bool = True) -> list[str]:
        return [name for name in names(self, folder, below=below) if name != "manifest.json"]

    monkeypatch.setattr(BucketFolder, "names", stale)
    answering(monkeypatch, "put_object", lost)
    monkeypatch.setattr(bucket_publication, "_FIRST_PAUSE_SECONDS", 0)
    published = publish(exported, destination)
    assert reader.require_only(destination)["folder"] == published.folder
    assert not published.reused
    assert publish(exported, destination).reused, (
        "the list is still stale, and the server refuses to replace the manifest"
    )
    reader.require_only(destination)


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
