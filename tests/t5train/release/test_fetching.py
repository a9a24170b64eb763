"""Fetch publications from a real S3 server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import DigestMismatch, InputError, PublicationError, RecordError, StoreError
from t5train.records.stage_records import Export, Publication
from t5train.release.fetching import fetch
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish
from t5train.release.verification import verify
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

SMALL = {"config.json": 700, "model.safetensors": 3 << 20, "tokenizer/spiece.model": 3_000}


@pytest.fixture
def published(make_random_export: Callable[..., Export], destination: str) -> Export:
    """An export that is published at the destination."""
    exported = make_random_export(sizes=SMALL)
    publish(exported, destination)
    return exported


def interrupting(monkeypatch: pytest.MonkeyPatch, code: str, after: int) -> list[int]:
    """Have every read of the weights fail after some bytes; returns where each read begins."""
    chunks, starts = BucketFolder.chunks, []

    def interrupted(self: BucketFolder, name: str, start: int = 0) -> Any:
        if not name.endswith("model.safetensors"):
            yield from chunks(self, name, start)
            return
        starts.append(start)
        sent = 0
        for chunk in chunks(self, name, start):
            if (sent := sent + len(chunk)) > after:
                raise StoreError("connection lost", code=code)
            yield chunk

    monkeypatch.setattr(BucketFolder, "chunks", interrupted)
    return starts


def test_a_fetched_folder_is_a_verified_publication_and_fetching_again_verifies_it(
    published: Export, destination: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models/fetched"
    assert fetch(destination, folder).path == folder
    found = verify(folder)
    assert isinstance(found, Publication)
    assert found.files == published.files
    assert all((folder / name).read_bytes() == (published.path / name).read_bytes() for name in published.files)
    assert fetch(destination, folder).reused
    (folder / "config.json").write_bytes(b"x")
    with pytest.raises(DigestMismatch, match=r"config\.json"):
        fetch(destination, folder)


def test_an_interrupted_fetch_leaves_no_folder_and_continues_where_it_ended(
    published: Export, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupting(patch, "AccessDenied", after=1 << 20)
        with pytest.raises(StoreError, match="connection lost"):
            fetch(destination, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    starts = interrupting(monkeypatch, "AccessDenied", after=100 << 20)
    fetch(destination, tmp_path / "fetched")
    assert starts == [1 << 20]
    verify(tmp_path / "fetched")
    assert not (tmp_path / ".fetched.partial").exists()


def test_a_lost_connection_is_continued_at_once(
    published: Export, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = interrupting(monkeypatch, "ResponseStreamingError", after=1 << 20)
    fetch(destination, tmp_path / "fetched")
    assert starts == [0, 1 << 20, 2 << 20]
    verify(tmp_path / "fetched")


def test_what_is_left_of_another_fetch_is_not_used(published: Export, destination: str, tmp_path: Path) -> None:
    left = tmp_path / ".fetched.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"of another model")
    (left / "config.json").write_bytes(b"longer than the file" * 100)
    (left / "pytorch_model.bin").write_bytes(b"run me")
    fetch(destination, tmp_path / "fetched")
    verify(tmp_path / "fetched")


def test_a_damaged_object_is_named_and_no_folder_appears(
    published: Export, destination: str, tmp_path: Path, reader: Reader
) -> None:
    (name,) = [name for name in reader.keys(destination) if name.endswith("config.json")]
    content = reader.content(destination, name)
    for other in (content[:-1], content + b"x", content[:-1] + b"\x00"):
        reader.put(destination, name, other)
        with pytest.raises(DigestMismatch, match=r"config\.json has"):
            fetch(destination, tmp_path / "fetched")
    reader.delete(destination, name)
    with pytest.raises(DigestMismatch, match=r"config\.json is missing"):
        fetch(destination, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped"])
def test_a_manifest_that_names_files_elsewhere_is_refused(
    published: Export, destination: str, tmp_path: Path, reader: Reader, name: str
) -> None:
    manifest = json.loads(reader.content(destination, "manifest.json"))
    manifest["files"][name] = manifest["files"]["config.json"]
    reader.put(destination, "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(RecordError, match="escaped"):
        fetch(destination, tmp_path / "a/b/fetched")
    assert not list(tmp_path.rglob("escaped"))


def test_a_folder_in_use_and_a_url_of_another_store_are_refused(
    published: Export, destination: str, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(PublicationError, match="not empty and holds no publication"):
        fetch(destination, tmp_path)
    with pytest.raises(InputError, match="memory://bucket/t5 is not in S3"):
        fetch("memory://bucket/t5", tmp_path / "fetched")


def test_links_and_folders_that_were_left_are_not_followed_or_kept(
    published: Export, destination: str, tmp_path: Path
) -> None:
    victim, left = tmp_path / "victim", tmp_path / ".fetched.partial"
    victim.write_bytes(b"mine")
    (left / "config.json.old/empty").mkdir(parents=True)
    (left / "config.json").symlink_to(victim)
    (left / "model.safetensors").symlink_to(tmp_path / "created")
    fetch(destination, tmp_path / "fetched")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "created").exists()
    assert not any(path.is_symlink() for path in (tmp_path / "fetched").rglob("*"))
    assert not (tmp_path / "fetched/config.json.old").exists()


def test_nothing_is_fetched_of_a_publication_without_a_valid_certificate_or_onto_a_file(
    published: Export, destination: str, tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PublicationError, match="file is a file: fetch to another folder"):
        fetch(destination, tmp_path / "file")
    starts = interrupting(monkeypatch, "AccessDenied", after=100 << 20)
    (name,) = [name for name in reader.keys(destination) if name.endswith("certificate.json")]
    reader.put(destination, name, b"{}")
    with pytest.raises(PublicationError, match="is not a certificate"):
        fetch(destination, tmp_path / "fetched")
    assert not starts
