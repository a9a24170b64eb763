"""Files that are damaged, or change while they are sent to a real S3 server."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import PublicationError
from t5train.records.stage_records import Export
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.measured_file import FileBody
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
        ("config.json", "put_object", "was changed while it was sent"),
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


def test_an_interruption_ends_requests_in_the_middle_of_their_bodies(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, ended, read, call = Counter[FileBody](), list[BaseException](), FileBody.read, BucketFolder.call

    def noting(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        try:
            return call(self, operation, name, **arguments)
        except BaseException as error:
            ended.extend([error] if operation == "upload_part" else [])
            raise

    def reading(self: FileBody, size: int = -1) -> memoryview:
        piece = read(self, size)
        sent[self] += len(piece)
        time.sleep(0.2)
        return piece

    def interrupt(_: ByteCount) -> None:
        if sent:
            raise KeyboardInterrupt

    exported = make_random_export(sizes={"model.safetensors": 8 * PART_BYTES})
    with monkeypatch.context() as patch:
        patch.setattr(FileBody, "read", reading)
        patch.setattr(BucketFolder, "call", noting)
        patch.setattr(ByteCount, "report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)
    assert max(sent.values()) < PART_BYTES, "nobody has waited for a whole part"
    assert {type(error) for error in ended} == {Stopped}, "botocore has not taken it for a failure, and tried again"
    publish(exported, destination)
    reader.require_only(destination)


def test_nothing_is_sent_of_an_export_with_a_missing_truncated_or_damaged_file(
    make_random_export: MakeExport, destination: str, reader: Reader
) -> None:
    for number, damage in enumerate((Path.unlink, lambda path: os.truncate(path, 100), lambda path: _damage(path, 3))):
        exported = make_random_export(f"run-{number}")
        damage(exported.path / "model.safetensors")
        with pytest.raises(PublicationError, match=r"model\.safetensors (is missing|has 100 bytes|has sha256 )"):
            publish(exported, destination)
        assert not reader.keys(destination)
        assert list(exported.path.parent.iterdir()) == [exported.path], "there is a journal"
