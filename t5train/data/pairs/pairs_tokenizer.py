"""The tokenizer stage of a run on pairs: a vocabulary of both sides, or the one that is given."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from t5train.data.pairs.pairs import read_pairs, tasks_of
from t5train.data.vocabulary.tokenizer import (
    SAMPLE_BYTES,
    finished,
    given_tokenizer,
    train_reporting,
    trained_by,
    trained_identity,
)
from t5train.data.worker_processes import Advance, Json
from t5train.files.output_folder import making, stage_folder
from t5train.progress import Progress, silent
from t5train.records.stage_records import Pairs, TokenizerFiles, reusable
from t5train.spec import TokenizerSpec


def build_pairs_tokenizer(
    spec: TokenizerSpec, pairs: Pairs, root: Path, progress: Progress = silent, *, out: Path | None = None
) -> TokenizerFiles:
    """Train a vocabulary on sources and targets of the train split, or use the one at ``spec.path``.

    A finished tokenizer is reused.

    Args:
        spec: The size of the vocabulary, or the path of an existing one.
        pairs: The pairs.
        root: The root folder.
        progress: Called with the number of pairs read so far.
        out: Folder of the result; ``{root}/tokenizer/{name}-{first 12 digits of the fingerprint}`` if left out.

    Returns:
        The record of the tokenizer.

    Raises:
        DigestMismatch: A file of pairs is not as recorded.
        InputError: The vocabulary at ``spec.path`` is missing or damaged.
        SpecError: It is not in T5's form, or ``spec.vocab_size`` does not fit the pairs.
        StorageError: The folder cannot be written, or holds something else.
        WorkerLost: The process that trains the vocabulary was killed.

    """
    if spec.path is not None:
        return given_tokenizer(Path(spec.path), root, progress, out=out)
    inputs = {"pairs": pairs.fingerprint}
    identity = trained_identity(spec.identity(), inputs)
    folder = out or stage_folder(root, "tokenizer", f"unigram{spec.vocab_size}", identity)
    with making(folder, identity):
        if found := reusable(TokenizerFiles, folder, identity, progress):
            return found
        pairs.verify(progress)
        return finished(folder, _trained(spec, pairs, progress), identity, inputs)


def _trained(spec: TokenizerSpec, pairs: Pairs, progress: Progress) -> bytes:
    total_bytes = sum(digest.size for name, digest in pairs.files.items() if name.startswith("train-"))
    stride = max(1, -(-total_bytes // SAMPLE_BYTES))
    job = {"spec": spec.model_dump(mode="json"), "pairs": str(pairs.path), "stride": stride}
    function = "t5train.data.pairs.pairs_tokenizer:train_vocabulary"
    total = int(pairs.counts["train_pairs"])
    return trained_by(function, job, "pairs read for the vocabulary", total, progress)


def train_vocabulary(job: Json, advance: Advance) -> Json:
    """Train a model on every ``stride``-th pair of each task. ``build_pairs_tokenizer`` makes the job.

    Every second, ``advance`` is called with the number of pairs read since the last time.
    """
    texts = _Texts(Pairs.load(Path(job["pairs"])), int(job["stride"]))
    return train_reporting(TokenizerSpec.model_validate(job["spec"]), texts, texts.newly_read, advance)


class _Texts(Iterator[str]):
    """The texts to train on. ``newly_read`` may be called by another thread."""

    def __init__(self, pairs: Pairs, stride: int) -> None:
        self._read = self._reported = 0
        self._texts = self._all(pairs, stride)

    def __next__(self) -> str:
        return next(self._texts)

    def newly_read(self) -> int:
        """Return how many pairs were read since the last call."""
        read, before = self._read, self._reported
        self._reported = read
        return read - before

    def _all(self, pairs: Pairs, stride: int) -> Iterator[str]:
        for task in range(len(tasks_of(pairs))):
            for pair in islice(read_pairs(pairs, "train", task), 0, None, stride):
                self._read += stride
                yield pair.source
                yield pair.target
