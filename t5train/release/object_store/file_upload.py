"""Sends files to a bucket: several at a time, large ones in parts, each with a checksum that the server compares.

A large file is sent while its sha256 is computed: each part as soon as it has been read. Only a file that is what was
recorded is completed, so its last part is sent after its sha256 was compared. To continue an upload, the file is read
to its end first.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from t5train.progress import Progress
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.checksums import encoded, read_exactly
from t5train.release.object_store.file_body import FileBody
from t5train.release.object_store.measured_file import MeasuredFile, measure
from t5train.release.object_store.parted_upload import PartedUpload
from t5train.release.object_store.stored_objects import is_proven, prove
from t5train.release.object_store.transfers import ByteCount, Job, run_jobs
from t5train.release.object_store.upload_journal import UploadJournal

_SMALL_BYTES = 1 << 20


class FileUploads:
    """The uploads of an attempt's files. Objects that are stored, and parts that were sent, are not sent again."""

    def __init__(
        self, bucket: BucketFolder, attempt: str, files: Mapping[str, MeasuredFile], journal: UploadJournal,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._bucket, self._attempt, self._files = bucket, attempt, files
        self._journal = journal
        self._progress = progress

    def send(self, part_bytes: int) -> None:
        """Send all files, and prove each object.

        Raises DigestMismatch if a file is not what was recorded, is changed meanwhile, or its object is something else.
        Raises StoreError, which has the code NoSuchUpload if another process aborted an upload.
        """
        self._bucket.stopping.clear()  # an earlier call may have failed; all of its threads have ended
        begun = {*self._journal.stored, *self._journal.uploads} & self._files.keys()
        measure([self._files[name] for name in begun], self._progress)
        total = sum(file.size for file in self._files.values())
        self._sent = ByteCount("bytes sent", total, self._progress, self._bucket.stopping)
        run_jobs((partial(self._begin, name, part_bytes) for name in self._files), self._sent)

    def send_missing(self, part_bytes: int) -> None:
        """Send again what another process removed when something else was published here. Raises as ``send`` does."""
        there = self._bucket.sizes(f"{self._attempt}/")
        if any(there.get(self._target(name)) != file.size for name, file in self._files.items()):
            self.send(part_bytes)

    def _begin(self, name: str, part_bytes: int) -> list[Job]:
        file, target = self._files[name], self._target(name)
        if name in self._journal.stored or name in self._journal.uploads:
            if is_proven(self._bucket, target, file):  # perhaps completed by a process that was killed right after
                self._journal.add_stored(name)
                self._sent.add(file.size)
                return []
            if name in self._journal.stored:
                self._journal.forget(name)
        if file.size <= part_bytes:
            return [partial(self._send_whole, name)]
        upload = PartedUpload(self._bucket, target, file, self._journal, name)
        missing = upload.missing_parts(part_bytes)
        self._sent.add(upload.sent_bytes)
        if not missing:
            return [partial(self._complete, name, upload)]
        return self._read_part(name, upload, iter(missing))

    def _read_to(self, end: int, file: MeasuredFile) -> None:
        file.read_to(end, lambda _: self._sent.add(0))  # to end if another thread has failed

    def _send_whole(self, name: str) -> list[Job]:
        file = self._files[name]
        if file.size <= _SMALL_BYTES:
            self._send_small(name)
        else:
            self._read_to(file.size, file)
            with FileBody.opened(file.path, 0, file.size, file.crc, self._sent.add) as body:
                self._put(name, body)
        return self._prove(name)

    def _send_small(self, name: str) -> None:
        """Send a file from memory. For other bodies, botocore first asks the server whether it may send (Expect)."""
        file = self._files[name]
        content = read_exactly(file.path, 0, file.size + 1)
        file.take(content)
        self._put(name, content)
        self._sent.add(file.size)

    def _put(self, name: str, body: bytes | FileBody) -> None:
        self._bucket.call("put_object", self._target(name), Body=body, ChecksumCRC64NVME=encoded(self._files[name].crc))

    def _read_part(self, name: str, upload: PartedUpload, missing: Iterator[int]) -> list[Job]:
        """Read up to the end of the next part. It is sent before more is read, so that its bytes are still cached."""
        if (number := next(missing, None)) is None:
            return []
        self._read_to(upload.end_of(number), self._files[name])
        return [partial(self._send_part, name, upload, number), partial(self._read_part, name, upload, missing)]

    def _send_part(self, name: str, upload: PartedUpload, number: int) -> list[Job]:
        was_last = upload.send(number, self._sent.add)
        return [partial(self._complete, name, upload)] if was_last else []

    def _complete(self, name: str, upload: PartedUpload) -> list[Job]:
        upload.complete()
        return self._prove(name)

    def _prove(self, name: str) -> list[Job]:
        prove(self._bucket, self._target(name), self._files[name])
        self._journal.add_stored(name)
        return []

    def _target(self, name: str) -> str:
        return f"{self._attempt}/{name}"
