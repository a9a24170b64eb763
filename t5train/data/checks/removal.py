"""Removes passages from the training split: the others are stored once more, and are the text from then on."""

from pathlib import Path

import numpy as np

from t5train.data.checks.repetitions import Repetitions
from t5train.data.formats.passage_frames import FRAMES
from t5train.data.passages import SourceFile
from t5train.data.segments import FileSegments, Segment, passages_in, stretches_of, write_frames
from t5train.data.worker_processes import Advance, Json, in_processes
from t5train.files.atomic import replacing
from t5train.host_resources import require_free_space
from t5train.progress import Progress, adding

_STORED_SHARE, _STORED_BYTES_A_PASSAGE = 0.6, 60
"""Largest size of stored passages, relative to their text (measured: 0.4 to 0.5), and of their ids and titles."""


def write_without(found: Repetitions, folder: Path, workers: int, progress: Progress) -> list[FileSegments]:
    """Store the passages that stay in ``folder``, one file for each chunk of the text, and return these files.

    Their names are ``kept-NNNNN`` with the suffix of frames. Passages keep their ids, so they stay in their splits.
    """
    text_bytes = sum(stretch.segment.text_bytes for stretches, _ in found.chunks for stretch in stretches)
    passages = sum(len(is_removed) - int(np.count_nonzero(is_removed)) for _, is_removed in found.chunks)
    needed = int(text_bytes * _STORED_SHARE) + _STORED_BYTES_A_PASSAGE * passages
    require_free_space(folder, needed, "the passages that stay")
    jobs = list[Json]()
    for number, (stretches, is_removed) in enumerate(found.chunks):
        removed = folder / f".removed.{number:08x}.tmp"
        np.packbits(is_removed).tofile(removed)
        out = folder / f"kept-{number:05d}{FRAMES}"
        job: Json = {"number": number, "out": str(out), "removed": str(removed), "passages": len(is_removed)}
        jobs.append(job | {"stretches": stretches})
    advance = adding(progress, "bytes of text stored without removed passages", text_bytes)
    results = {
        result["number"]: result
        for result in in_processes("t5train.data.checks.removal:write_kept", jobs, workers, advance)
    }
    for job in jobs:
        Path(job["removed"]).unlink()
    parts = [stretches[0].part for stretches, _ in found.chunks]
    return [
        _file_segments(SourceFile(out := Path(job["out"]), out.name, part), results[number])
        for number, (job, part) in enumerate(zip(jobs, parts, strict=True))
    ]


def write_kept(job: Json, advance: Advance) -> Json:
    """Store the passages of a chunk that are not removed. ``write_without`` makes the job."""
    stretches = stretches_of(job)
    passages = passages_in(stretches)
    is_removed = np.unpackbits(np.fromfile(job["removed"], np.uint8), count=job["passages"]).tolist()
    kept = (each for each, removed in zip(passages, is_removed, strict=True) if not removed)
    with replacing(Path(job["out"])) as file:
        segments = write_frames(file, kept)
    advance(sum(segment.text_bytes for _, segment in stretches))
    return {"number": job["number"], "segments": segments}


def _file_segments(source: SourceFile, result: Json) -> FileSegments:
    segments = [Segment(*each) for each in result["segments"]]
    return FileSegments(source, sum(each.rows for each in segments), 0, segments)
