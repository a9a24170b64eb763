"""Files are read and compared with their digests while they are sent to a real S3 server."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import PublicationError
from t5train.records.stage_records import Export
from t5train.release.object_store import transfers
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.measured_file import FileBody, MeasuredFile
from t5train.release.object_store.transfers import ByteCount, Stopped
from t5train.release.publication import publish
from tests.support.certified_exports import PART_BYTES
from tests.support.changed_answers import answering
from tests.support.s3_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_small_parts")]

MakeExport = Callable[..., Export]


@pytest.mark.parametrize(
    ("name", "operation", "problem"),
    [
        ("config.json", "list_objects_v2", "has sha256"),
        ("model.safetensors", "list_objects_v2", "has sha256"),
        ("model.safetensors", "upload_part", "was changed while it was sent"),
    ],
)
def test_a_file_that_is_changed_after_its_certificate_was_checked_is_not_published(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch,
    name: str, operation: str, problem: str,
) -> None:  # fmt: skip
    exported = make_random_export()

    def changed(send: Callable[[], Any], _: str | None) -> Any:
        _damage(exported.path / name, 3)
        return send()

    with monkeypatch.context() as patch:
        answering(patch, operation, changed)
        with pytest.raises(PublicationError, match=f"export cannot be published: .*{name} {problem}"):
            publish(exported, destination)
    assert reader.require_all_or_nothing(destination) is None


def _damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"damaged")


def test_a_damaged_file_that_is_restored_is_published_although_the_server_has_damaged_parts(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, call, confirmed = make_random_export(), BucketFolder.call, list[int]()
    weights = exported.path / "model.safetensors"
    intact, damaged = weights.read_bytes(), 2

    def noting(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        answer = call(self, operation, name, **arguments)
        if operation == "upload_part":
            confirmed.append(arguments["PartNumber"])
        return answer

    def read_after_the_damaged_part_was_sent(self: MeasuredFile, end: int, count: Callable[[int], None]) -> None:
        while end == weights.stat().st_size and damaged not in confirmed:
            time.sleep(0.01)
        read(self, end, count)

    monkeypatch.setattr(BucketFolder, "call", noting)
    _damage(weights, (damaged - 1) * PART_BYTES + 7)
    read = MeasuredFile.read_to
    with monkeypatch.context() as patch:
        patch.setattr(MeasuredFile, "read_to", read_after_the_damaged_part_was_sent)
        with pytest.raises(PublicationError, match=r"model\.safetensors has sha256 .*, but .* was recorded"):
            publish(exported, destination)
    assert reader.require_all_or_nothing(destination) is None
    last = -(-len(intact) // PART_BYTES)
    assert damaged in confirmed
    assert last not in confirmed, "the last part is only sent of an intact file"
    weights.write_bytes(intact)
    publish(exported, destination)
    reader.require_only(destination)


def test_parts_are_sent_while_the_rest_of_the_file_is_still_unread(
    make_random_export: MakeExport, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, sent, ahead, read = 2, list[str | None](), list[int](), MeasuredFile.read_to

    def reading(self: MeasuredFile, end: int, count: Callable[[int], None]) -> None:
        if self.size > PART_BYTES:
            ahead.append(end // PART_BYTES - len(sent))
        read(self, end, count)

    monkeypatch.setattr(transfers, "_THREADS", threads)

    def sending(send: Callable[[], Any], name: str | None) -> Any:
        sent.append(name)
        return send()

    monkeypatch.setattr(MeasuredFile, "read_to", reading)
    answering(monkeypatch, "upload_part", sending)
    publish(make_random_export(sizes={"model.safetensors": 8 * PART_BYTES}), destination)
    assert len(ahead) == len(sent) == 8
    assert max(ahead) <= threads


def test_an_interruption_ends_requests_in_the_middle_of_their_bodies(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, ended, read, call = list[int](), list[BaseException](), FileBody.read, BucketFolder.call

    def noting(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        try:
            return call(self, operation, name, **arguments)
        except BaseException as error:
            ended.extend([error] if operation == "upload_part" else [])
            raise

    def reading(self: FileBody, size: int = -1) -> memoryview:
        piece = read(self, size)
        pieces.append(len(piece))
        time.sleep(0.2)
        return piece

    def interrupt(_: ByteCount) -> None:
        if pieces:
            raise KeyboardInterrupt

    exported = make_random_export(sizes={"model.safetensors": 8 * PART_BYTES})
    with monkeypatch.context() as patch:
        patch.setattr(FileBody, "read", reading)
        patch.setattr(BucketFolder, "call", noting)
        patch.setattr(ByteCount, "report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)
    assert sum(pieces) < PART_BYTES, "nobody has waited for a whole part"
    assert {type(error) for error in ended} == {Stopped}, "botocore has not taken it for a failure, and tried again"
    publish(exported, destination)
    reader.require_only(destination)


def test_nothing_is_sent_of_an_export_with_a_missing_or_truncated_file(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    for number, damage in enumerate((Path.unlink, lambda path: os.truncate(path, 100))):
        exported = make_random_export(f"run-{number}")
        damage(exported.path / "model.safetensors")
        with pytest.raises(PublicationError, match=r"model\.safetensors (is missing|has 100 bytes)"):
            publish(exported, destination)
        assert not reader.keys(destination)
        assert list(exported.path.parent.iterdir()) == [exported.path], "there is a journal"
