"""The multipart upload of one file, which a later process can continue."""

import threading
from collections.abc import Callable

from t5train.errors import StoreError
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.checksums import encoded
from t5train.release.object_store.file_body import FileBody
from t5train.release.object_store.measured_file import BLOCK_BYTES, MeasuredFile
from t5train.release.object_store.store_errors import UNKNOWN_UPLOAD
from t5train.release.object_store.stored_objects import is_proven
from t5train.release.object_store.upload_journal import OpenUpload, UploadJournal

_MOST_PARTS = 10_000  # S3's limit
_REFUSED_PARTS = {"BadDigest", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"}


class PartedUpload:
    """Sends a file in parts, from several threads. The journal records each part that the server has confirmed."""

    def __init__(
        self, bucket: BucketFolder, target: str, file: MeasuredFile, journal: UploadJournal, name: str
    ) -> None:  # fmt: skip
        """``target`` is the object's name, and ``name`` the file's name in the journal."""
        self._bucket, self._target, self._file = bucket, target, file
        self._journal, self._name = journal, name
        self._counting, self._left = threading.Lock(), 0

    def missing_parts(self, part_bytes: int) -> list[int]:
        """Return the numbers of the parts to send, after continuing the file's upload, or beginning one.

        A file whose upload is to be continued must have been read.
        """
        if not self._continues():
            answer = self._bucket.call(
                "create_multipart_upload", self._target, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )
            blocks = -(-max(part_bytes, -(-self._file.size // _MOST_PARTS)) // BLOCK_BYTES)
            self._journal.begin(self._name, answer["UploadId"], blocks * BLOCK_BYTES)
        upload = self._upload
        numbers = range(1, -(-self._file.size // upload.part_bytes) + 1)
        missing = [number for number in numbers if number not in upload.parts]
        self._left = len(missing)
        return missing

    @property
    def sent_bytes(self) -> int:
        """Size of the parts that the server has."""
        return sum(map(self.size_of, self._upload.parts))

    def size_of(self, number: int) -> int:
        """Size of a part in bytes."""
        return self.end_of(number) - self._start_of(number)

    def end_of(self, number: int) -> int:
        """Where a part ends in the file."""
        return min(number * self._upload.part_bytes, self._file.size)

    def send(self, number: int, count: Callable[[int], None]) -> bool:
        """Send one part, up to whose end the file has been read. Returns whether it was the last that was missing.

        ``count`` is as in ``FileBody.opened``.
        """
        upload, start, size, crc = self._upload, self._start_of(number), self.size_of(number), self._crc_of(number)
        with FileBody.opened(self._file.path, start, size, crc, count) as body:
            answer = self._bucket.call(
                "upload_part", self._target, UploadId=upload.upload_id, PartNumber=number, Body=body,
                ChecksumCRC64NVME=encoded(crc),
            )  # fmt: skip
        self._journal.add_part(self._name, number, answer["ETag"], crc)
        with self._counting:
            self._left -= 1
            return self._left == 0

    def complete(self) -> None:
        """Make the object of the parts. The server compares the whole object with the CRC of the file."""
        upload = self._upload
        listed = [
            {"PartNumber": number, "ETag": part.etag, "ChecksumCRC64NVME": encoded(part.crc)}
            for number, part in sorted(upload.parts.items())
        ]
        try:
            self._bucket.call(
                "complete_multipart_upload", self._target, UploadId=upload.upload_id, MultipartUpload={"Parts": listed},
                ChecksumCRC64NVME=encoded(self._file.crc), ChecksumType="FULL_OBJECT", MpuObjectSize=self._file.size,
            )  # fmt: skip
        except StoreError as error:
            if error.code == UNKNOWN_UPLOAD and is_proven(self._bucket, self._target, self._file):
                return  # an earlier request completed it, and its answer was lost
            if error.code in _REFUSED_PARTS:
                self._abort()
            raise

    @property
    def _upload(self) -> OpenUpload:
        return self._journal.uploads[self._name]

    def _start_of(self, number: int) -> int:
        return (number - 1) * self._upload.part_bytes

    def _crc_of(self, number: int) -> int:
        return self._file.crc_of(self._start_of(number), self.size_of(number))

    def _continues(self) -> bool:
        """Whether the server knows the upload in the journal.

        Parts that the server does not have, or that are not the file's (it may have been damaged), are sent again.
        """
        upload = self._journal.uploads.get(self._name)
        if upload is None:
            return False
        try:
            there = self._bucket.parts(self._target, upload.upload_id)
        except StoreError as error:
            if error.code != UNKNOWN_UPLOAD:
                raise
            self._journal.forget(self._name)
            return False
        for number, part in list(upload.parts.items()):
            etag, size = there.get(number, ("", 0))  # some servers quote the ETag in only one of the two answers
            is_there = (etag.strip('"'), size) == (part.etag.strip('"'), self.size_of(number))
            if not is_there or part.crc != self._crc_of(number):
                del upload.parts[number]
        return True

    def _abort(self) -> None:
        """Abort the upload, so that the next attempt sends the file from its start."""
        self._bucket.abort(self._target, self._upload.upload_id)
        self._journal.forget(self._name)
