"""Checksums of a real S3 server: it compares them, or what was stored is read back."""

from typing import Any

import pytest

from t5train.errors import PublicationError, StoreError
from t5train.records.stage_records import Export
from t5train.release.object_store.bucket import BucketFolder, crc_of, encoded
from t5train.release.object_store.write_check import compares_checksums
from t5train.release.publication import check_destination, publish
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_intact", [True, False])
def test_what_a_server_stores_without_comparing_checksums_is_read_back(
    small: Export, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, is_intact: bool,
) -> None:  # fmt: skip
    call, claimed, read = BucketFolder.call, dict[str | None, str](), set[str | None]()

    def believing(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent == "put_object":
            claimed[name] = arguments.pop("ChecksumCRC64NVME")
            if str(name).endswith("config.json") and not is_intact:
                arguments["Body"] = arguments["Body"][:-1] + b"!"
        read.update({name} if sent == "get_object" else ())
        answer = call(self, sent, name, **arguments)
        return answer | {"ChecksumCRC64NVME": claimed.get(name)} if sent == "head_object" else answer

    with monkeypatch.context() as patch:
        patch.setattr(BucketFolder, "call", believing)
        check_destination(destination)
        assert f"wrong checksum (CRC64NVME), so what is published to {destination} is read back" in caplog.text
        assert not reader.keys(destination)
        if not is_intact:
            with pytest.raises(PublicationError, match=r"config\.json has 700 bytes and sha256"):
                publish(small, destination)
            return
        folder = publish(small, destination).folder
    assert {f"{folder}/{name}" for name in small.files} <= read
    reader.require_only(destination)


def test_a_server_that_refuses_a_wrong_checksum_with_a_code_of_its_own_compares_it(
    destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, code = BucketFolder.call, "XMinioInvalidChecksum"

    def refusing(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        if sent == "put_object" and arguments["ChecksumCRC64NVME"] != encoded(crc_of(arguments["Body"])):
            raise StoreError("refused", code=code)
        return call(self, sent, name, **arguments)

    monkeypatch.setattr(BucketFolder, "call", refusing)
    assert compares_checksums(BucketFolder(destination))
    assert not reader.keys(destination)
    code = "InternalError"  # usually transient, so it proves nothing
    assert not compares_checksums(BucketFolder(destination))
    assert not reader.keys(destination)


def test_the_server_rejects_bytes_with_a_wrong_checksum(destination: str, reader: Reader) -> None:
    bucket, wrong = BucketFolder(destination), encoded(crc_of(b"other"))
    with pytest.raises(StoreError, match=r"a/x cannot be written: the server received other bytes") as caught:
        bucket.call("put_object", "a/x", Body=b"bytes", ChecksumCRC64NVME=wrong)
    assert caught.value.code == "BadDigest"
    begun = bucket.call("create_multipart_upload", "a/y", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
    with pytest.raises(StoreError, match="the server received other bytes"):
        bucket.call("upload_part", "a/y", UploadId=begun["UploadId"], PartNumber=1, Body=b"b", ChecksumCRC64NVME=wrong)
    bucket.abort("a/y", begun["UploadId"])
    assert not reader.keys(destination)
