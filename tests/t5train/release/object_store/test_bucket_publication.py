"""Publish to a real S3 server: what is stored, what is refused, and who wins."""

import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from t5train.errors import DigestMismatch, PublicationError, RecordError, StoreError
from t5train.records.stage_records import Export, Publication
from t5train.release.fetching import fetch
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify
from tests.support.changed_answers import answering
from tests.support.s3_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_small_parts")]


MakeExport = Callable[..., Export]
SMALL = {"config.json": 700, "model.safetensors": 40_000, "tokenizer/spiece.model": 3_000}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Every request that is sent: operation and name."""
    sent: list[tuple[str, str | None]] = []
    call = BucketFolder.call

    def recorded(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        sent.append((operation, name))
        return call(self, operation, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", recorded)
    return sent


def test_a_publication_is_one_folder_and_a_manifest_that_names_it(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    exported = make_random_export()
    check_destination(destination)
    assert not reader.keys(destination)
    published = publish(exported, destination)
    manifest = reader.require_only(destination)
    assert (published.url, published.folder, published.reused) == (destination, manifest["folder"], False)
    assert manifest["files"]["certificate.json"]["sha256"] == exported.files["certificate.json"].sha256
    assert manifest["inputs"] == {**exported.inputs, "export": exported.fingerprint}
    verified = verify(destination)
    assert isinstance(verified, Publication)
    assert verified.files == exported.files
    assert list(exported.path.parent.iterdir()) == [exported.path], "the journal is left"


def test_publishing_again_sends_nothing_and_compares_the_servers_checksums(
    make_random_export: MakeExport, destination: str, requests: list[tuple[str, str | None]]
) -> None:
    exported = make_random_export(sizes=SMALL)
    first = publish(exported, destination)
    requests.clear()
    check_destination(destination, spec_fingerprint=exported.inputs["spec"])
    again = publish(exported, destination)
    assert again.reused
    assert again.folder == first.folder
    sent = [name for operation, name in requests if operation in {"put_object", "create_multipart_upload"}]
    assert not [name for name in sent if "/probe.txt" not in str(name)]
    assert sum(operation == "head_object" for operation, _ in requests) == len(exported.files)


def test_any_change_of_an_object_is_detected_and_the_object_named(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    exported = make_random_export(sizes=SMALL)
    publish(exported, destination)
    for name in sorted(reader.keys(destination)):
        content = reader.content(destination, name)
        other = bytes([content[0] ^ 1]) + content[1:] if "s" in name.rpartition("/")[2] else content[:-1]
        reader.put(destination, name, other)
        with pytest.raises((DigestMismatch, RecordError), match=Path(name).name):
            verify(destination)
        with pytest.raises(PublicationError, match=rf"holds (a damaged copy|no intact).*{Path(name).name}"):
            publish(exported, destination)
        assert reader.content(destination, name) == other
        reader.put(destination, name, content)
    verify(destination)
    for extra in ("pytorch_model.bin", f"{reader.require_only(destination)['folder']}/pytorch_model.bin"):
        reader.put(destination, extra, b"run me")
        with pytest.raises(PublicationError, match=r"files that were not published: pytorch_model\.bin"):
            verify(destination)
        reader.delete(destination, extra)


def test_a_destination_with_other_files_is_refused_and_stays_as_it_is(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    reader.put(destination, "notes.txt", b"mine")
    for attempt in (check_destination, lambda url: publish(make_random_export(sizes=SMALL), url)):
        with pytest.raises(PublicationError, match=r"not empty and holds no publication \(notes\.txt\)"):
            attempt(destination)
    assert reader.keys(destination) == {"notes.txt"}


def test_a_publication_of_an_earlier_version_without_a_folder_is_verified_and_reused(
    make_random_export: MakeExport, destination: str, reader: Reader, tmp_path: Path
) -> None:
    exported = make_random_export(sizes=SMALL)
    publish(exported, str(tmp_path / "published"))
    for name in [*exported.files, "manifest.json"]:
        reader.put(destination, name, (tmp_path / "published" / name).read_bytes())
    assert b'"folder"' not in reader.content(destination, "manifest.json")
    assert verify(destination).files == exported.files
    assert publish(exported, destination).reused
    assert fetch(destination, tmp_path / "fetched").files == exported.files


def test_of_two_exports_the_first_to_write_the_manifest_wins_and_the_other_removes_its_objects(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_random_export("first", seed=1), make_random_export("second", seed=2)

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            patch.undo()
            publish(first, destination)
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "put_object", overtaken)
        with pytest.raises(PublicationError, match=r"holds another publication \(.*publish to another destination"):
            publish(second, destination)
    assert reader.require_only(destination)["inputs"]["export"] == first.fingerprint
    assert [path.name for path in second.path.parent.iterdir()] == ["export"], "the journal is left"


def test_of_two_uploads_of_the_same_export_the_second_uses_the_publication_of_the_first(
    make_random_export: MakeExport,
    destination: str,
    reader: Reader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make_random_export("first"), make_random_export("second")

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        patch.undo()
        winner.append(publish(first, destination))
        return send()

    winner: list[Publication] = []
    with monkeypatch.context() as patch:
        answering(patch, "upload_part", overtaken)  # whose upload the winner aborts
        published = publish(second, destination)
    assert published.reused
    assert published.folder == winner[0].folder
    assert f"is published from {winner[0].folder}, which was first: removing" in caplog.text
    reader.require_only(destination)


def test_after_a_lost_answer_the_server_is_asked_who_wrote_the_manifest(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(send: Callable[[], Any], name: str | None) -> Any:
        answer = send()
        if name == "manifest.json":
            raise StoreError("no answer", code="ReadTimeoutError")
        return answer

    answering(monkeypatch, "put_object", lost)
    assert not publish(make_random_export(sizes=SMALL), destination).reused
    reader.require_only(destination)


def test_a_conflict_on_the_manifest_is_tried_again(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflicts = ["409", "ConditionalRequestConflict"]

    def contended(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json" and conflicts:
            raise StoreError("conflict", code=conflicts.pop())
        return send()

    answering(monkeypatch, "put_object", contended)
    publish(make_random_export(sizes=SMALL), destination)
    assert not conflicts
    reader.require_only(destination)


def test_an_upload_that_the_server_no_longer_knows_is_begun_again(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = make_random_export()

    def aborted(send: Callable[[], Any], name: str | None) -> Any:
        for upload in reader.client.list_multipart_uploads(Bucket=reader.bucket).get("Uploads", []):
            reader.client.abort_multipart_upload(Bucket=reader.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "complete_multipart_upload", aborted)
        with pytest.raises(StoreError, match="another process aborted the upload"):
            publish(exported, destination)
    assert not publish(exported, destination).reused
    reader.require_only(destination)


def test_unfinished_uploads_of_any_attempt_are_aborted_once_the_publication_is_decided_and_no_others(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0123456789ab-0123456789abcdef/model.safetensors", "mine/notes.txt"):
        BucketFolder(destination).call("create_multipart_upload", name)
    exported = make_random_export()

    def killed(send: Callable[[], Any], name: str | None) -> Any:
        send()
        raise KeyboardInterrupt  # before the journal has the upload's id

    with monkeypatch.context() as patch:
        answering(patch, "create_multipart_upload", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)
    assert len(reader.uploads(destination)) == 3
    publish(exported, destination)
    assert [name.rpartition("/t5/")[2] for name in reader.uploads(destination)] == ["mine/notes.txt"]


def test_a_copy_that_other_tools_made_is_verified(
    make_random_export: MakeExport, destination: str, reader: Reader, tmp_path: Path
) -> None:
    publish(make_random_export(sizes=SMALL), destination)
    store = fsspec.filesystem("memory")
    for name in reader.keys(destination):
        content = reader.content(destination, name)
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
        store.pipe_file(f"/copies/t5/{name}", content)
    for copy in (str(tmp_path / "copy"), "memory://copies/t5"):
        verify(copy)
    (weights,) = (tmp_path / "copy").rglob("model.safetensors")
    weights.write_bytes(b"changed")
    store.pipe_file(f"/copies/t5/{weights.parent.name}/model.safetensors", b"changed")
    for copy in (str(tmp_path / "copy"), "memory://copies/t5"):
        with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
            verify(copy)
    store.rm("/copies", recursive=True)


def test_the_journal_is_private_and_one_of_another_export_is_not_used_but_its_objects_are_removed(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = make_random_export()

    def killed(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            raise KeyboardInterrupt
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "put_object", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)
    (journal,) = exported.path.parent.glob(".export.upload-*.jsonl")
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert len(reader.keys(destination)) == len(exported.files)
    exported.path.rename(exported.path.parent.parent / "old")
    other = make_random_export("other", seed=3)
    other.path.rename(exported.path)
    publish(Export.load(exported.path), destination)
    assert reader.require_only(destination)["inputs"]["export"] == other.fingerprint
    assert not journal.exists()


def test_what_is_published_already_is_proven_without_the_right_to_write(
    make_random_export: MakeExport, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = make_random_export(sizes=SMALL)
    published, call = publish(exported, destination), BucketFolder.call

    def read_only(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent == "put_object":
            raise StoreError("access denied", code="AccessDenied")
        return call(self, sent, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", read_only)
    again = publish(exported, destination)
    assert (again.reused, again.folder) == (True, published.folder)


def test_a_second_process_with_the_same_export_and_destination_is_refused(
    make_random_export: MakeExport, destination: str
) -> None:
    exported = make_random_export(sizes=SMALL)
    bucket = BucketFolder(destination)
    with (
        UploadJournal.opened(exported.path, f"{bucket.endpoint} {bucket.url}"),
        pytest.raises(PublicationError, match="another process is publishing this export to the same destination"),
    ):
        publish(exported, destination)


def test_without_a_checksum_from_the_server_objects_are_read_back(
    make_random_export: MakeExport,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[str, str | None]],
    reader: Reader,
) -> None:
    def without(send: Callable[[], Any], _: str | None) -> Any:
        return {name: value for name, value in send().items() if name != "ChecksumCRC64NVME"}

    answering(monkeypatch, "head_object", without)
    exported = make_random_export(sizes=SMALL)
    folder = publish(exported, destination).folder
    assert {name for operation, name in requests if operation == "get_object"} >= {
        f"{folder}/{name}" for name in exported.files
    }
    reader.put(destination, f"{folder}/config.json", b"x" * 700)
    with pytest.raises(
        PublicationError, match=r"damaged copy of this publication: .*config\.json has 700 bytes and sha"
    ):
        publish(exported, destination)


@pytest.mark.parametrize("are_in_a_profile", [False, True])
def test_no_credentials_are_in_any_log_object_journal_or_copy(
    s3: Any, make_random_export: MakeExport, destination: str, reader: Reader, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, are_in_a_profile: bool,
) -> None:  # fmt: skip
    exported, journals = make_random_export(), []
    key, secret = s3.environment["AWS_ACCESS_KEY_ID"], s3.environment["AWS_SECRET_ACCESS_KEY"]
    if are_in_a_profile:
        profile = exported.path.parent / "credentials"
        profile.write_text(f"[publisher]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
        monkeypatch.setenv("AWS_PROFILE", "publisher")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)

    def read_journal(send: Callable[[], Any], _: str | None) -> Any:
        journals.extend(path.read_text() for path in exported.path.parent.glob(".export.upload-*.jsonl"))
        return send()

    answering(monkeypatch, "complete_multipart_upload", read_journal)
    with caplog.at_level(logging.DEBUG):
        publish(exported, destination)
        verify(destination)
        copied = fetch(destination, exported.path.with_name("copy")).path
    assert json.loads(journals[0].splitlines()[0])["files"] == sorted(exported.files)
    assert "manifest.json" in caplog.text
    stored = "".join(reader.content(destination, name).decode("latin-1") for name in reader.keys(destination))
    stored += "".join(path.read_bytes().decode("latin-1") for path in copied.rglob("*") if path.is_file())
    assert secret not in caplog.text + stored + "".join(journals)
    assert key not in stored + "".join(journals)
