"""Sends files to a bucket: several at a time, large ones in parts, each with a checksum that the server compares.

Objects and parts that the server has from an earlier process are not sent again.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial

from t5train.errors import DigestMismatch, StoreError
from t5train.files.os_errors import naming
from t5train.progress import Progress
from t5train.release.object_store.bucket import BucketFolder, crc_of, encoded
from t5train.release.object_store.measured_file import BLOCK_BYTES, FileBody, MeasuredFile
from t5train.release.object_store.store_errors import UNKNOWN_UPLOAD
from t5train.release.object_store.stored_objects import is_proven, prove
from t5train.release.object_store.transfers import ByteCount, run_jobs

_SMALL_BYTES = 1 << 20
_MOST_PARTS = 10_000  # S3's limit
_REFUSED_PARTS = {"BadDigest", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"}


class _PartedUpload:
    """The multipart upload of one file, from several threads. It continues that of an earlier process, if there is one.

    Some servers list no checksums of the parts that they have, so only sizes are compared. In the end, the server
    compares the CRC of the whole object.
    """

    def __init__(self, bucket: BucketFolder, name: str, file: MeasuredFile, part_bytes: int) -> None:
        self._bucket, self._name, self._file = bucket, name, file
        blocks = -(-max(part_bytes, -(-file.size // _MOST_PARTS)) // BLOCK_BYTES)
        self._part_bytes = blocks * BLOCK_BYTES
        self._numbers = range(1, -(-file.size // self._part_bytes) + 1)
        self._upload_id, self._etags = self._continued() or (self._begun(), {})
        self.missing = [number for number in self._numbers if number not in self._etags]
        """Numbers of the parts to send."""
        self._counting, self._left = threading.Lock(), len(self.missing)

    @property
    def sent_bytes(self) -> int:
        """Size of the parts that the server has."""
        return sum(map(self._size_of, self._etags))

    def send(self, number: int, count: Callable[[int], None]) -> bool:
        """Send one part. Returns whether it was the last that was missing.

        ``count`` is as in ``FileBody.opened``.
        """
        start, size, crc = self._start_of(number), self._size_of(number), self._crc_of(number)
        with FileBody.opened(self._file.path, start, size, crc, count) as body:
            answer = self._bucket.call(
                "upload_part", self._name, UploadId=self._upload_id, PartNumber=number, Body=body,
                ChecksumCRC64NVME=encoded(crc),
            )  # fmt: skip
        with self._counting:
            self._etags[number] = answer["ETag"]
            self._left -= 1
            return self._left == 0

    def complete(self) -> None:
        """Make the object of the parts, and prove it. The server compares the whole object with the CRC of the file."""
        parts = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC64NVME": encoded(self._crc_of(number))}
            for number, etag in sorted(self._etags.items())
        ]
        try:
            self._bucket.call(
                "complete_multipart_upload", self._name, UploadId=self._upload_id, MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=encoded(self._file.crc), ChecksumType="FULL_OBJECT", MpuObjectSize=self._file.size,
            )  # fmt: skip
        except StoreError as error:
            if error.code in _REFUSED_PARTS:
                self._bucket.abort(self._name, self._upload_id)  # the next process sends the file from its start
            # An earlier request may have completed it, and its answer was lost.
            if error.code != UNKNOWN_UPLOAD or not is_proven(self._bucket, self._name, self._file):
                raise
        prove(self._bucket, self._name, self._file)

    def _continued(self) -> tuple[str, dict[int, str]] | None:
        """Of the uploads of this object that the server has, the one with the most bytes: its id, and its parts' ETags.

        A server may have several, if answers were lost. The others are aborted after the publication.
        """
        found = list[tuple[str, dict[int, str]]]()
        for name, upload_id in self._bucket.uploads(self._name):
            if name != self._name:
                continue
            try:
                parts = self._bucket.parts(name, upload_id).items()
            except StoreError as error:
                if error.code != UNKNOWN_UPLOAD:
                    raise
                continue  # some servers list it although it was completed or aborted
            known = {
                number: etag
                for number, (etag, size) in parts
                if number in self._numbers and size == self._size_of(number)
            }
            found.append((upload_id, known))
        return max(found, key=lambda upload: sum(map(self._size_of, upload[1])), default=None)

    def _begun(self) -> str:
        answer = self._bucket.call(
            "create_multipart_upload", self._name, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )
        return str(answer["UploadId"])

    def _start_of(self, number: int) -> int:
        return (number - 1) * self._part_bytes

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._file.size - self._start_of(number))

    def _crc_of(self, number: int) -> int:
        return self._file.crc_of(self._start_of(number), self._size_of(number))


class FileUploads:
    """The uploads of an attempt's files."""

    def __init__(
        self, bucket: BucketFolder, attempt: str, files: Mapping[str, MeasuredFile], part_bytes: int, progress: Progress
    ) -> None:  # fmt: skip
        """Files that are larger than ``part_bytes`` are sent in parts of at least this size."""
        self._bucket, self._part_bytes, self._progress = bucket, part_bytes, progress
        self._files = {f"{attempt}/{name}": file for name, file in files.items()}
        self._folder = f"{attempt}/"

    def send(self) -> None:
        """Send all files, and prove each object.

        Raises DigestMismatch if a file is changed meanwhile, or its object is something else. Raises StoreError, which
        has the code NoSuchUpload if another process aborted an upload.
        """
        self._send(perhaps_stored=self._stored())

    def send_missing(self) -> None:
        """Send again what another process removed when something else was published here. Raises as ``send`` does."""
        if self._stored() != self._files.keys():  # or the list of objects is stale
            self._send(perhaps_stored={*self._files})

    def _send(self, perhaps_stored: set[str]) -> None:
        self._bucket.stopping.clear()  # an earlier call may have failed; all of its threads have ended
        total = sum(file.size for file in self._files.values())
        self._sent = ByteCount("bytes sent", total, self._progress, self._bucket.stopping)
        parts = list[Callable[[], None]]()
        run_jobs((partial(self._send_file, name, name in perhaps_stored, parts) for name in self._files), self._sent)
        run_jobs(parts, self._sent)

    def _stored(self) -> set[str]:
        """Names of the objects that the server lists with the right size."""
        there = self._bucket.sizes(self._folder)
        return {name for name, file in self._files.items() if there.get(name) == file.size}

    def _send_file(self, name: str, may_be_stored: bool, parts: list[Callable[[], None]]) -> None:
        """Send a file, or begin to send a large one. Jobs that send its parts are added to ``parts``."""
        file = self._files[name]
        if may_be_stored and is_proven(self._bucket, name, file):
            self._sent.add(file.size)
        elif file.size > self._part_bytes:
            upload = _PartedUpload(self._bucket, name, file, self._part_bytes)
            self._sent.add(upload.sent_bytes)
            parts += [partial(self._send_part, upload, number) for number in upload.missing]
            if not upload.missing:
                upload.complete()
        else:
            self._send_whole(name, file)
            prove(self._bucket, name, file)

    def _send_part(self, upload: _PartedUpload, number: int) -> None:
        if upload.send(number, self._sent.add):
            upload.complete()

    def _send_whole(self, name: str, file: MeasuredFile) -> None:
        if file.size <= _SMALL_BYTES:
            with naming(file.path):
                content = file.path.read_bytes()
            if crc_of(content) != file.crc:
                raise DigestMismatch(f"{file.path} was changed while it was sent: restore it, then publish again")
            self._bucket.put(name, content)  # for other bodies, botocore first asks the server (Expect)
            self._sent.add(file.size)
        else:
            with FileBody.opened(file.path, 0, file.size, file.crc, self._sent.add) as body:
                self._bucket.call("put_object", name, Body=body, ChecksumCRC64NVME=encoded(file.crc))
