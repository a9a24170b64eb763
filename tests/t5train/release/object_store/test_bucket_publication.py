"""Publish to a real S3 server: what is stored, what is refused, and who wins."""

import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import DigestMismatch, PublicationError, RecordError, StoreError
from t5train.records.stage_records import Export, Publication
from t5train.release.fetching import fetch
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.upload_journal import UploadJournal
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify
from tests.support.changed_answers import answering, killed_before_the_manifest, noted_requests, refusing
from tests.support.s3_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_small_parts")]


MakeExport = Callable[..., Export]


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


def test_publishing_again_needs_no_right_to_write_and_compares_the_servers_checksums(
    small: Export, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(small, destination)
    check_destination(destination, spec_fingerprint=small.inputs["spec"])
    refusing(monkeypatch, "put_object", "create_multipart_upload")
    requests = noted_requests(monkeypatch)
    again = publish(small, destination)
    assert (again.reused, again.folder) == (True, first.folder)
    assert sum(operation == "head_object" for operation, _ in requests) == len(small.files)


def test_any_change_of_an_object_is_detected_and_the_object_named(
    small: Export, destination: str, reader: Reader
) -> None:
    publish(small, destination)
    for name in sorted(reader.keys(destination)):
        content = reader.content(destination, name)
        other = bytes([content[0] ^ 1]) + content[1:] if "s" in name.rpartition("/")[2] else content[:-1]
        reader.put(destination, name, other)
        with pytest.raises((DigestMismatch, RecordError), match=Path(name).name):
            verify(destination)
        with pytest.raises(PublicationError, match=rf"holds (a damaged copy|no intact).*{Path(name).name}"):
            publish(small, destination)
        assert reader.content(destination, name) == other
        reader.put(destination, name, content)
    verify(destination)
    for extra in ("pytorch_model.bin", f"{reader.require_only(destination)['folder']}/pytorch_model.bin"):
        reader.put(destination, extra, b"run me")
        with pytest.raises(PublicationError, match=r"files that were not published: pytorch_model\.bin"):
            verify(destination)
        if "/" in extra:
            with pytest.raises(PublicationError, match=r"files that were not published: pytorch_model\.bin"):
                publish(small, destination)
        reader.delete(destination, extra)


def test_a_destination_with_other_files_is_refused_and_stays_as_it_is(
    small: Export, destination: str, reader: Reader
) -> None:
    reader.put(destination, "notes.txt", b"mine")
    for attempt in (check_destination, lambda url: publish(small, url)):
        with pytest.raises(PublicationError, match=r"not empty and holds no publication \(notes\.txt\)"):
            attempt(destination)
    assert reader.keys(destination) == {"notes.txt"}


def test_a_publication_of_an_earlier_version_without_a_folder_is_verified_and_reused(
    small: Export, destination: str, reader: Reader, tmp_path: Path
) -> None:
    publish(small, str(tmp_path / "published"))
    for name in [*small.files, "manifest.json"]:
        reader.put(destination, name, (tmp_path / "published" / name).read_bytes())
    assert b'"folder"' not in reader.content(destination, "manifest.json")
    assert verify(destination).files == small.files
    assert publish(small, destination).reused
    assert fetch(destination, tmp_path / "fetched").files == small.files


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
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    first, second = make_random_export("first"), make_random_export("second")

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        patch.undo()
        winner.append(publish(first, destination))
        return send()

    winner: list[Publication] = []
    with monkeypatch.context() as patch:
        answering(patch, "upload_part", overtaken)  # whose upload the winner aborts
        published = publish(second, destination)
    assert (published.reused, published.folder) == (True, winner[0].folder)
    assert f"is published from {winner[0].folder}, which was first: removing" in caplog.text
    reader.require_only(destination)


def test_a_conflict_on_the_manifest_is_tried_again(
    small: Export, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflicts = ["409", "ConditionalRequestConflict"]

    def contended(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json" and conflicts:
            raise StoreError("conflict", code=conflicts.pop())
        return send()

    answering(monkeypatch, "put_object", contended)
    publish(small, destination)
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


def test_of_several_uploads_of_a_file_the_one_with_the_most_parts_is_continued(
    make_random_export: MakeExport, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, begun, uploads = make_random_export(), list[tuple[str, str]](), BucketFolder.uploads

    def killed(_: Callable[[], Any], name: str | None) -> Any:
        assert name is not None
        for _each in range(2):
            answer = BucketFolder(destination).call("create_multipart_upload", name)
            begun.append((name, answer["UploadId"]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        answering(patch, "complete_multipart_upload", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)

    def with_the_largest_in_the_middle(self: BucketFolder, beginning: str = "") -> list[tuple[str, str]]:
        found = uploads(self, beginning)
        return [*(each for each in found if each == begun[0]), *(each for each in found if each not in begun),
                *(each for each in found if each == begun[1])]  # fmt: skip

    monkeypatch.setattr(BucketFolder, "uploads", with_the_largest_in_the_middle)
    requests = noted_requests(monkeypatch)
    publish(exported, destination)
    assert not {"create_multipart_upload", "upload_part"} & {operation for operation, _ in requests}


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


def test_the_journal_is_private_and_one_of_another_export_is_not_used_but_its_objects_are_removed(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    exported = make_random_export()
    killed_before_the_manifest(exported, destination)
    (journal,) = exported.path.parent.glob(".export.upload-*.jsonl")
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert len(reader.keys(destination)) == len(exported.files)
    exported.path.rename(exported.path.parent.parent / "old")
    other = make_random_export("other", seed=3)
    other.path.rename(exported.path)
    publish(Export.load(exported.path), destination)
    assert reader.require_only(destination)["inputs"]["export"] == other.fingerprint
    assert not journal.exists()


def test_a_second_process_with_the_same_export_and_destination_is_refused(small: Export, destination: str) -> None:
    bucket = BucketFolder(destination)
    with (
        UploadJournal.opened(small.path, f"{bucket.endpoint} {bucket.url}"),
        pytest.raises(PublicationError, match="another process is publishing this export to the same destination"),
    ):
        publish(small, destination)


def test_without_a_checksum_from_the_server_objects_are_read_back(
    small: Export, destination: str, monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    def without(send: Callable[[], Any], _: str | None) -> Any:
        return {name: value for name, value in send().items() if name != "ChecksumCRC64NVME"}

    answering(monkeypatch, "head_object", without)
    requests = noted_requests(monkeypatch)
    folder = publish(small, destination).folder
    assert {("get_object", f"{folder}/{name}") for name in small.files} <= set(requests)
    reader.put(destination, f"{folder}/config.json", b"x" * 700)
    with pytest.raises(PublicationError, match=r"damaged copy of this .*config\.json has 700 bytes and sha"):
        publish(small, destination)


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
    assert json.loads(journals[0])["files"] == sorted(exported.files)
    assert "manifest.json" in caplog.text
    stored = "".join(reader.content(destination, name).decode("latin-1") for name in reader.keys(destination))
    stored += "".join(path.read_bytes().decode("latin-1") for path in copied.rglob("*") if path.is_file())
    assert secret not in caplog.text + stored + "".join(journals)
    assert key not in stored + "".join(journals)
