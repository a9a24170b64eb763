"""Fetch publications from a real S3 server."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import DigestMismatch, InputError, PublicationError, RecordError, StorageError, StoreError
from t5train.records.stage_records import Export, Publication
from t5train.release.fetching import fetch
from t5train.release.object_store import bucket
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.publication import publish
from t5train.release.verification import verify
from tests.support.changed_answers import answering
from tests.support.faulty_proxy import CutAnswer, Fault, FaultyProxy, Refuse, Request
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

SMALL = {"config.json": 700, "model.safetensors": 3 << 20, "tokenizer/spiece.model": 3_000}


@pytest.fixture(autouse=True)
def published(make_random_export: Callable[..., Export], destination: str) -> Export:
    exported = make_random_export(sizes=SMALL)
    publish(exported, destination)
    return exported


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    return tmp_path / "fetched"


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
    destination: str, tmp_path: Path, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupting(patch, "AccessDenied", after=1 << 20)
        with pytest.raises(StoreError, match="connection lost"):
            fetch(destination, fetched)
    assert not fetched.exists()
    starts = interrupting(monkeypatch, "AccessDenied", after=100 << 20)
    fetch(destination, fetched)
    assert starts == [1 << 20]
    verify(fetched)
    assert not (tmp_path / ".fetched.partial").exists()


def test_a_stream_that_breaks_is_continued_where_it_broke_also_many_times(
    destination: str, fetched: Path, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    starts, chunks = list[int](), BucketFolder.chunks

    def noted(self: BucketFolder, name: str, start: int = 0) -> Iterator[bytes]:
        if name.endswith("model.safetensors"):
            starts.append(start)
        return chunks(self, name, start)

    monkeypatch.setattr(BucketFolder, "chunks", noted)
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_SECONDS", 0.05)
    proxy.disturb = lambda request: CutAnswer(400_000) if "model.safetensors" in request.target else None
    for operation in (verify, lambda url: fetch(url, fetched)):
        starts.clear()
        operation(destination)
        assert len(starts) > 5
        assert starts == sorted({*starts}), "each continues after the one before"
        assert re.search(rf"retrying from byte {starts[1]:,} for up to \d+ s: {destination}/", caplog.text)
    verify(fetched)


def test_a_stream_that_stays_broken_ends_the_fetch_which_continues_later(
    destination: str, fetched: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "INSIST_SECONDS", 3.0)
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(bucket, "_TRIES", 1)
    reads = list[str]()

    def disturb(request: Request) -> Fault | None:
        if "model.safetensors" not in request.target:
            return None
        reads.append(request.target)
        return CutAnswer(400_000) if len(reads) == 1 else Refuse()

    proxy.disturb = disturb
    with pytest.raises(StoreError, match=r"model\.safetensors cannot be read: the server is busy"):
        fetch(destination, fetched)
    assert len(reads) > 1, "it is continued, as often as there is time"
    assert fetched.with_name(".fetched.partial").joinpath("model.safetensors").stat().st_size > 300_000
    proxy.disturb = lambda _: None
    fetch(destination, fetched)
    verify(fetched)


def test_after_an_error_no_other_file_waits_for_its_stream(
    destination: str, fetched: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_SECONDS", bucket.INSIST_SECONDS)
    refused = Refuse("AccessDenied", "403 Forbidden")
    waits = threading.Event()
    monkeypatch.setattr(bucket._log, "warning", lambda *_: waits.set())

    def disturb(request: Request) -> Fault | None:
        if "model.safetensors" in request.target:
            return CutAnswer(400_000)
        if "spiece.model" in request.target:
            waits.wait()
            return refused
        return None

    proxy.disturb = disturb
    started = time.monotonic()
    with pytest.raises(StoreError, match="access denied"):
        fetch(destination, fetched)
    assert time.monotonic() - started < bucket.INSIST_SECONDS / 2, "the pause is at least that long"


def asking_for(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    """Have the server asked for these bytes wherever the client asks for some; None: for all."""
    call = BucketFolder.call

    def changed(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        if arguments.pop("Range", None) and asked is not None:
            arguments["Range"] = asked
        return call(self, operation, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", changed)


@pytest.fixture
def half(published: Export, fetched: Path) -> Path:
    """The first 1,500,000 bytes of the weights, as an interrupted fetch leaves them."""
    left = partial(fetched) / "model.safetensors"
    left.write_bytes((published.path / left.name).read_bytes()[:1_500_000])
    return left


@pytest.mark.parametrize("asked", [None, "bytes=1000000-"])
def test_of_a_server_that_sends_more_than_was_asked_for_only_that_is_used(
    half: Path, destination: str, fetched: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    asked: str | None,
) -> None:  # fmt: skip
    inode = half.stat().st_ino
    asking_for(monkeypatch, asked)
    fetch(destination, fetched)
    assert (fetched / "model.safetensors").stat().st_ino == inode, "continued, and not fetched again"
    assert "ignores Range headers" in caplog.text
    verify(fetched)


def without_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server not say which bytes it sends."""

    def silent(send: Callable[[], Any], _: str | None) -> Any:
        return {key: value for key, value in send().items() if key != "ContentRange"}

    answering(monkeypatch, "get_object", silent)


@pytest.mark.parametrize(
    ("disturb", "sent"),
    [(lambda patch: asking_for(patch, "bytes=2000000-"), "bytes 2000000-"), (without_a_range, "no Content-Range'")],
)
def test_a_server_that_sends_other_bytes_than_were_asked_for_is_refused_and_nothing_lost(
    half: Path, destination: str, fetched: Path, monkeypatch: pytest.MonkeyPatch,
    disturb: Callable[[pytest.MonkeyPatch], None], sent: str,
) -> None:  # fmt: skip
    content = half.read_bytes()
    disturb(monkeypatch)
    with pytest.raises(StoreError, match=rf"asked for the bytes from 1,500,000 on, .* '{sent}"):
        fetch(destination, fetched)
    assert half.read_bytes() == content


def test_an_object_that_has_become_shorter_than_its_copy_is_damaged(
    half: Path, destination: str, fetched: Path, reader: Reader
) -> None:
    (name,) = [name for name in reader.keys(destination) if name.endswith("model.safetensors")]
    reader.put(destination, name, half.read_bytes()[:1_000_000])
    with pytest.raises(DigestMismatch, match=r"model\.safetensors has 1,000,000 bytes"):
        fetch(destination, fetched)


def test_what_is_left_of_another_fetch_is_not_used(destination: str, fetched: Path) -> None:
    left = partial(fetched)
    (left / "model.safetensors").write_bytes(b"of another model")
    (left / "config.json").write_bytes(b"longer than the file" * 100)
    (left / "pytorch_model.bin").write_bytes(b"run me")
    (left / "config.json.old/empty").mkdir(parents=True)
    fetch(destination, fetched)
    verify(fetched)
    assert not (fetched / "config.json.old").exists()


def partial(fetched: Path) -> Path:
    """Make the folder in which files are until all are there."""
    folder = fetched.with_name(".fetched.partial")
    folder.mkdir()
    return folder


def test_a_damaged_object_is_named_and_no_folder_appears(destination: str, fetched: Path, reader: Reader) -> None:
    (name,) = [name for name in reader.keys(destination) if name.endswith("config.json")]
    content = reader.content(destination, name)
    for other in (content[:-1], content + b"x", content[:-1] + b"\x00"):
        reader.put(destination, name, other)
        with pytest.raises(DigestMismatch, match=r"config\.json has"):
            fetch(destination, fetched)
    reader.delete(destination, name)
    with pytest.raises(DigestMismatch, match=r"config\.json is missing"):
        fetch(destination, fetched)
    assert not fetched.exists()


def test_a_manifest_that_names_files_elsewhere_is_refused(destination: str, tmp_path: Path, reader: Reader) -> None:
    manifest = json.loads(reader.content(destination, "manifest.json"))
    manifest["files"]["../escaped"] = manifest["files"]["config.json"]
    reader.put(destination, "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(RecordError, match="escaped"):
        fetch(destination, tmp_path / "a/b/fetched")
    assert not list(tmp_path.rglob("escaped"))


def test_a_folder_in_use_and_a_url_of_another_store_are_refused(
    destination: str, tmp_path: Path, fetched: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(PublicationError, match="not empty and holds no publication"):
        fetch(destination, tmp_path)
    with pytest.raises(InputError, match="memory://bucket/t5 is not in S3"):
        fetch("memory://bucket/t5", fetched)


def test_links_that_were_left_are_not_followed_and_files_with_a_second_name_not_appended_to(
    published: Export, destination: str, fetched: Path, tmp_path: Path
) -> None:
    victim, mine, left = tmp_path / "victim", tmp_path / "mine", partial(fetched)
    victim.write_bytes(b"mine")
    (left / "config.json").symlink_to(victim)
    (left / "certificate.json").symlink_to(tmp_path / "created")
    mine.write_bytes(content := (published.path / "model.safetensors").read_bytes()[:1000])
    (left / "model.safetensors").hardlink_to(mine)
    fetch(destination, fetched)
    assert (victim.read_bytes(), mine.read_bytes()) == (b"mine", content)
    assert not (tmp_path / "created").exists()
    files = [path for path in fetched.rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in files)


def test_a_partial_folder_that_is_a_link_is_refused_and_not_followed(
    destination: str, fetched: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / ".fetched.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match=r"partial is a symbolic link, which would be followed: remove it"):
        fetch(destination, fetched)
    assert not list((tmp_path / "mine").iterdir())


def test_a_partial_folder_of_another_user_is_refused_and_left_alone(
    published: Export, destination: str, tmp_path: Path, fetched: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")  # chown needs it, and there is no second user to ask
    left = tmp_path / ".fetched.partial"
    left.mkdir()
    (left / "thesis.txt").write_text("theirs")
    os.chown(left, 12345, -1)
    with pytest.raises(StorageError, match=r"\.fetched\.partial belongs to another user \(12345\)"):
        fetch(destination, fetched)
    assert (left / "thesis.txt").read_text() == "theirs"
    os.chown(left, 0, -1)
    (left / "config.json").write_bytes((published.path / "config.json").read_bytes())
    os.chown(left / "config.json", 12345, -1)
    fetch(destination, fetched)
    assert (fetched / "config.json").stat().st_uid == 0


def test_nothing_is_fetched_of_a_publication_without_a_valid_certificate_or_onto_a_file(
    destination: str, tmp_path: Path, fetched: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PublicationError, match="file is a file: fetch to another folder"):
        fetch(destination, tmp_path / "file")
    starts = interrupting(monkeypatch, "AccessDenied", after=100 << 20)
    (name,) = [name for name in reader.keys(destination) if name.endswith("certificate.json")]
    reader.put(destination, name, b"{}")
    with pytest.raises(PublicationError, match="is not a certificate"):
        fetch(destination, fetched)
    assert not starts
