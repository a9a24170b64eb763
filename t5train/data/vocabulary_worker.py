"""The worker process of the tokenizer stage, which trains a vocabulary.

SentencePiece cannot be interrupted, and training takes minutes. A process can be killed at any time.
"""

from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread

from t5train.data.passages import SourceFile, split_of
from t5train.data.segments import Segment, passages_of
from t5train.data.sentencepiece_model import train
from t5train.data.worker_processes import Advance, Json
from t5train.spec import CorpusSpec, TokenizerSpec


def train_vocabulary(job: Json, advance: Advance) -> Json:
    """Train a model on the train split of stretches of text. ``build_tokenizer`` makes the job.

    Every second, ``advance`` is called with the number of stretches read since the last time.
    """
    texts = _Texts(job)
    training: Future[bytes] = Future()
    # A daemon, so that the process can end before the training when the one that started it is killed.
    Thread(target=_train, args=(training, TokenizerSpec.model_validate(job["spec"]), texts), daemon=True).start()
    while not wait([training], timeout=1).done:
        advance(texts.newly_read())
    proto = training.result()
    advance(texts.newly_read())
    return {"proto": b64encode(proto).decode()}


def _train(training: Future[bytes], spec: TokenizerSpec, texts: Iterator[str]) -> None:
    try:
        training.set_result(train(spec, texts))
    except BaseException as error:
        training.set_exception(error)  # for the main thread


class _Texts(Iterator[str]):
    """The texts to train on. ``newly_read`` may be called by another thread."""

    def __init__(self, job: Json) -> None:
        self._rule = CorpusSpec.model_validate({name: job[name] for name in ("split", "split_seed")})
        self._stretches = [
            (SourceFile(Path(path), name), Segment(*segment)) for path, name, segment in job["stretches"]
        ]
        self._read = self._reported = 0
        self._texts = self._all()

    def __next__(self) -> str:
        return next(self._texts)

    def newly_read(self) -> int:
        """Return how many stretches were read to their end since the last call."""
        read, before = self._read, self._reported
        self._reported = read
        return read - before

    def _all(self) -> Iterator[str]:
        for stretch in self._stretches:
            for passage in passages_of(*stretch):
                if split_of(self._rule, passage.id) == "train":
                    yield passage.text
            self._read += 1
