"""The worker process that computes the keys that passages are compared by: digests, MinHash, and runs of 13 words.

Its result for a chunk of a text is one .npz file. Passages without text are left out everywhere.
"""

from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from t5train.data.checks.word_grams import BUCKETS, NEAR_DUPLICATE_WORDS, WordHashes, bucket_keys, grams
from t5train.data.passages import SPLITS, Passage, SplitSettings, in_batches, split_of, text_bytes
from t5train.data.segments import passages_in, stretches_of
from t5train.data.worker_processes import Advance, Json
from t5train.files.atomic import replacing

TRAIN, TEST_SET = 0, len(SPLITS)
"""Numbers of splits in the results: those of ``SPLITS``, and one for test sets."""
SHARED_WORDS = 13
"""Brown et al. 2020 (GPT-3, appendix C) and many since then call text that shares so many words contaminated."""
_Arrays = dict[str, np.ndarray]


def write_keys(job: Json, advance: Advance) -> Json:
    """Compute the keys of a chunk of a text. ``find_repetitions`` makes the job.

    The arrays are ``splits`` (uint8), and the halves ``first`` and ``second`` (uint64) of a digest, and on request
    ``bucket_NN`` (uint64) and, of held-out text, ``runs`` (uint64) with the passage (uint32) of each, and ``short``
    (uint32), passages without such a run.
    """
    rule = SplitSettings(tuple(job["split"]), job["split_seed"])
    batches, seen = list[_Arrays](), 0
    for batch in in_batches(passages_in(stretches_of(job))):
        arrays = _digests(batch)
        if job["is_test_set"]:
            arrays["splits"] = np.full(len(batch), TEST_SET, np.uint8)
        else:
            arrays["splits"] = np.array([SPLITS.index(split_of(rule, each.id)) for each in batch], np.uint8)
        if job["near"]:
            arrays |= _buckets(batch)
        if job["shared"]:
            arrays |= _held_out_runs(batch, arrays["splits"], seen)
        seen += len(batch)
        batches.append(arrays)
        advance(sum(text_bytes(each.text) for each in batch))
    with replacing(Path(job["out"])) as file:
        arrays = {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
        np.savez(file, **cast(Any, arrays))  # mypy would take one for allow_pickle
    return {}


def write_shared(job: Json, advance: Advance) -> Json:
    """Find the training passages that share a run of 13 words with held-out text. ``find_repetitions`` makes the job.

    The arrays are ``is_shared`` (bool, one for each passage) and ``runs`` (uint64), the runs that were found.
    """
    with np.load(job["keys"]) as keys:
        splits = keys["splits"]
    known = KnownRuns(Path(job["runs"]), Path(job["bits"]))
    is_shared, runs, seen = np.zeros(len(splits), bool), [np.empty(0, np.uint64)], 0
    for batch in in_batches(passages_in(stretches_of(job))):
        found = grams(_words().of([each.text for each in batch]), SHARED_WORDS)
        of_passage = np.repeat(np.arange(seen, seen + len(batch)), found.counts)
        hits = np.flatnonzero((splits[of_passage] == TRAIN) & known.maybe_includes(found.hashes))
        hits = hits[known.includes(found.hashes[hits])]
        is_shared[of_passage[hits]] = True
        runs.append(np.unique(found.hashes[hits]))
        seen += len(batch)
        advance(sum(text_bytes(each.text) for each in batch))
    with replacing(Path(job["out"])) as file:
        np.savez(file, is_shared=is_shared, runs=np.unique(np.concatenate(runs)))
    return {}


class KnownRuns:
    """A set of 64-bit hashes in two files: sorted, and as a table of bits, which answers most questions faster."""

    def __init__(self, runs: Path, bits: Path) -> None:
        self._runs, self._bits = np.load(runs, mmap_mode="r"), np.load(bits, mmap_mode="r")
        self._shift = np.uint64(64 - (8 * len(self._bits)).bit_length() + 1)

    def maybe_includes(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each hash may be in the set. At most one in 16 others gets the answer True."""
        places = hashes >> self._shift
        bits = self._bits[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8)
        return np.asarray(bits & 1 == 1)

    def includes(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each hash is in the set."""
        places = np.minimum(np.searchsorted(self._runs, hashes), len(self._runs) - 1)
        return np.asarray(self._runs[places] == hashes)

    @staticmethod
    def write(hashes: np.ndarray, runs: Path, bits: Path) -> None:
        """Write a set of at least one hash, sorted."""
        size = max(3, (16 * len(hashes) - 1).bit_length())
        places = hashes >> np.uint64(64 - size)
        table = np.zeros(1 << (size - 3), np.uint8)
        np.bitwise_or.at(table, places >> np.uint64(3), np.uint8(1) << (places & np.uint64(7)).astype(np.uint8))
        for path, array in ((runs, hashes), (bits, table)):
            with replacing(path) as file:
                np.save(file, array)


@cache
def _words() -> WordHashes:
    """Keep the hashes of words for all chunks that a process works on."""
    return WordHashes()


def _digests(batch: list[Passage]) -> _Arrays:
    """Return the digests of texts, without white space at their ends."""
    digests = b"".join(blake2b(each.text.strip().encode(), digest_size=16).digest() for each in batch)
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    return {"first": halves[:, 0], "second": halves[:, 1]}


def _buckets(batch: list[Passage]) -> _Arrays:
    keys = bucket_keys(grams(_words().of([each.text for each in batch]), NEAR_DUPLICATE_WORDS))
    return {f"bucket_{number:02d}": keys[number] for number in range(BUCKETS)}


def _held_out_runs(batch: list[Passage], splits: np.ndarray, before: int) -> _Arrays:
    held_out = np.flatnonzero(splits != TRAIN)
    found = grams(_words().of([batch[each].text for each in held_out]), SHARED_WORDS)
    passages = (held_out + before).astype(np.uint32)
    return {
        "runs": found.hashes,
        "run_passages": np.repeat(passages, found.counts),
        "short": passages[found.counts == 0],
    }
