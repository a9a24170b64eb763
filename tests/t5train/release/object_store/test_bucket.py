"""Requests to a folder of a bucket on a real S3 server."""

from typing import Any

import pytest

from t5train.release.object_store.bucket import BucketFolder
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

ONE_ENTRY = {"list_objects_v2": "MaxKeys", "list_parts": "MaxParts"}


def test_lists_are_complete_and_those_of_objects_and_parts_also_over_several_pages(
    destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, call = BucketFolder(destination), BucketFolder.call
    names = ["a/x", "a/y z", "b", "c%41", "d/"]
    for name in names:
        reader.put(destination, name, b"content")
    ids = [bucket.call("create_multipart_upload", f"a/{number}")["UploadId"] for number in range(3)]
    for number in (1, 2, 3):
        bucket.call("upload_part", "a/0", UploadId=ids[0], PartNumber=number, Body=b"part")

    def paged(self: BucketFolder, operation: str, name: str | None = None, **arguments: Any) -> Any:
        one = {ONE_ENTRY[operation]: 1} if operation in ONE_ENTRY else {}
        return call(self, operation, name, **arguments, **one)

    monkeypatch.setattr(BucketFolder, "call", paged)
    assert sorted(bucket.names()) == ["a/x", "a/y z", "b", "c%41"], "what stands for a folder is no file"
    assert sorted(bucket.names("a")) == ["x", "y z"]
    assert sorted(bucket.names(below=False)) == ["b", "c%41"]
    assert sorted(bucket.uploads("a")) == sorted((f"a/{number}", upload_id) for number, upload_id in enumerate(ids))
    assert {number: size for number, (_, size) in bucket.parts("a/0", ids[0]).items()} == {1: 4, 2: 4, 3: 4}
    for number, upload_id in enumerate(ids):
        bucket.abort(f"a/{number}", upload_id)
        bucket.abort(f"a/{number}", upload_id)  # the server does not know it any more
    assert not bucket.uploads()


def test_a_read_can_begin_anywhere(destination: str, reader: Reader) -> None:
    reader.put(destination, "a", b"0123456789")
    bucket = BucketFolder(destination)
    assert b"".join(bucket.chunks("a", 7)) == b"789"
    assert bucket.read("a") == b"0123456789"
    assert bucket.read("b") is None
