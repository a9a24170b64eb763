"""Writes planned tensors into safetensors files: several at once, in bounded memory, hashed and checked as they pass.

A thread does all there is to do with a piece of a tensor, while it is in the cache of its core.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from t5train.atomic import write_json
from t5train.consolidate.copying import Copier
from t5train.consolidate.plan import TensorPlan
from t5train.consolidate.reading import Reader
from t5train.consolidate.record_checksums import PassedBytes, require_intact
from t5train.consolidate.safetensors_format import index, index_name, shards
from t5train.consolidate.shard_file import ShardFile
from t5train.host_resources import num_cores
from t5train.progress import Progress
from t5train.records import FileDigest, digest_file
from t5train.safetensors_digest import SafetensorsDigest

_THREADS_PER_CORE = 2  # one computes while another waits for the disk
_MOST_THREADS = 32
_TELL_SECONDS = 0.5


def write_tensors(
    tensors: Sequence[TensorPlan],
    folder: Path,
    stem: str,
    shard_bytes: int | None,
    *,
    has_digests: bool,
    progress: Progress,
) -> dict[str, FileDigest | SafetensorsDigest]:
    """Write ``stem``.safetensors into ``folder`` (or shards and their index), and ``stem``.tensors.json with the
    sha256 of each tensor; the digests of these files, all of which are on disk then.

    With ``has_digests`` the checkpoint's files were verified already; else the CRC-32 of each record is checked.
    Raises IncompleteCheckpoint when a master contradicts the engine's own copy of it, or a file is damaged.
    """
    parts = shards(tensors, stem, shard_bytes)
    files = {name: ShardFile(folder / name, part) for name, part in parts.items()}
    jobs = [_Job(tensor, files[name]) for name, part in parts.items() for tensor in part]
    stream = _Stream(jobs, None if has_digests else [], progress)
    stream.run()
    for file in files.values():
        file.sync()
    digests: dict[str, FileDigest | SafetensorsDigest] = {
        name: file.digest(stream.digests) for name, file in files.items()
    }
    documents: dict[str, object] = {f"{stem}.tensors.json": _described(tensors, stream.digests)}
    if len(parts) > 1:
        documents[index_name(stem)] = index(parts)
    for name, document in documents.items():
        write_json(folder / name, document)
        digests[name] = digest_file(folder / name)
    return digests


def _described(tensors: Sequence[TensorPlan], digests: dict[str, bytes]) -> dict[str, object]:
    return {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name].hex()}
        for tensor in tensors
    }


@dataclass(frozen=True)
class _Job:
    tensor: TensorPlan
    file: ShardFile


class _Stream:
    """Threads that take one tensor after the other, the largest first so that none is left with a long one at the end.

    ``digests`` fills with the sha256 of each tensor by name.
    """

    def __init__(self, jobs: Sequence[_Job], passed: list[PassedBytes] | None, progress: Progress) -> None:
        self.digests: dict[str, bytes] = {}
        self._jobs = deque(sorted(jobs, key=lambda job: -job.tensor.size))
        self._passed, self._progress = passed, progress
        self._total, self._done, self._lock = sum(job.tensor.size for job in jobs), 0, Lock()

    def run(self) -> None:
        """Copy everything; what a thread raises is raised here, when all others have stopped too."""
        num_threads = min(_THREADS_PER_CORE * num_cores(), _MOST_THREADS)
        with ThreadPoolExecutor(num_threads) as threads:
            running = {threads.submit(self._work) for _ in range(num_threads)}
            try:
                while running:
                    done, running = wait(running, timeout=_TELL_SECONDS, return_when=FIRST_EXCEPTION)
                    for thread in done:
                        thread.result()
                    self._progress("weight bytes written", self._done, self._total)
            finally:
                with self._lock:  # else a thread may find a job, and then none
                    self._jobs.clear()
        if self._passed is not None:
            require_intact(self._passed)

    def _work(self) -> None:
        with Reader() as reader:
            copier = Copier(reader, self._advance)
            while job := self._next():
                passed = None if self._passed is None else PassedBytes()
                with job.file.place(job.tensor) as place:
                    self.digests[job.tensor.name] = copier.copy(job.tensor, place, passed)
                if self._passed is not None and passed is not None:
                    self._passed.append(passed)

    def _next(self) -> _Job | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs else None

    def _advance(self, size: int) -> None:
        with self._lock:
            self._done += size
