"""The worker process of the shards stage, which makes the files of one shard from text.

One worker starts per core. To start fast, it does not import pydantic or anything that needs it: its job contains all
settings.
"""

from contextlib import ExitStack
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np

from t5train.data.passages import ID_RULE, SPLITS, Passage, Split, SplitSettings, in_batches, split_of, text_bytes
from t5train.data.segments import passages_in, stretches_of
from t5train.data.vocabulary.document_encoder import DocumentEncoder, Documents
from t5train.data.vocabulary.sentencepiece_model import UNK_ID
from t5train.data.worker_processes import Advance, Json
from t5train.files.atomic import replacing, write_json


class _HashedFile:
    """A file that computes the digest of the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sha256, self._size = file, sha256(), 0

    def write(self, values: np.ndarray) -> None:
        self._file.write(values.data)
        self._sha256.update(values.data)
        self._size += values.nbytes

    def digest(self) -> Json:
        return {"size": self._size, "sha256": self._sha256.hexdigest()}


class _SplitWriter:
    """Writes the two files of one split in one shard: token ids, and lengths of documents."""

    def __init__(self, folder: Path, names: tuple[str, str], bytes_per_token: int, stack: ExitStack) -> None:
        self._tokens, self._lengths = (_HashedFile(stack.enter_context(replacing(folder / name))) for name in names)
        self._dtype = np.dtype(f"<u{bytes_per_token}")
        self._documents = self._num_tokens = 0

    def write(self, documents: Documents) -> None:
        self._tokens.write(documents.ids.astype(self._dtype, copy=False))
        self._lengths.write(documents.lengths.astype("<u4", copy=False))
        self._documents += len(documents.lengths)
        self._num_tokens += len(documents.ids)

    def counts(self) -> dict[str, int]:
        return {"documents": self._documents, "tokens": self._num_tokens}

    def digests(self) -> tuple[Json, Json]:
        return self._tokens.digest(), self._lengths.digest()


class _UnigramWriter:
    """Counts how often each id occurs in the train split of one shard, and writes the counts to a file."""

    def __init__(self, path: Path, vocab_size: int, dtype: str, stack: ExitStack) -> None:
        self._file = _HashedFile(stack.enter_context(replacing(path)))
        self._counts = np.zeros(vocab_size, dtype=dtype)

    def count(self, documents: Documents) -> None:
        self._counts += np.bincount(documents.ids, minlength=len(self._counts))

    def of(self, token_id: int) -> int:
        """Return how often an id was counted."""
        return int(self._counts[token_id])

    def finish(self) -> Json:
        """Write the counts, and return the digest of the file."""
        self._file.write(self._counts)
        return self._file.digest()


def write_shard(job: Json, advance: Advance) -> Json:
    """Write the files of one shard. ``build_shards`` makes the job; the shard's description is written last.

    Returns the shard's number, and the tokens and unknown pieces of its train split.
    """
    folder, names = Path(job["folder"]), job["files"]
    stretches = stretches_of(job)
    rule = SplitSettings(tuple(job["split"]), job["split_seed"])
    with ExitStack() as stack:
        writers = {split: _SplitWriter(folder, names[split], job["bytes_per_token"], stack) for split in SPLITS}
        unigram = _UnigramWriter(folder / job["unigram"], job["vocab_size"], job["unigram_dtype"], stack)
        for batch in in_batches(passages_in(stretches, partial(advance, 0))):
            documents = _encoded(batch, _encoder(Path(job["spiece"])), rule)
            for split, writer in writers.items():
                writer.write(documents[split])
            unigram.count(documents["train"])
            advance(sum(text_bytes(passage.text) for passage in batch))
        counted = unigram.finish()
    description = {
        "fingerprint": job["fingerprint"],
        "id_rule": ID_RULE,
        **({"part": part} if (part := stretches[0][0].part) else {}),  # without mixtures, as earlier versions wrote it
        "source": [(source.name, segment.first_row, segment.rows) for source, segment in stretches],
        "splits": {split: writer.counts() for split, writer in writers.items()},
        "files": {
            name: digest
            for split, writer in writers.items()
            for name, digest in zip(names[split], writer.digests(), strict=True)
        }
        | {job["unigram"]: counted},
    }
    write_json(folder / job["description"], description)
    return {
        "number": job["number"],
        "tokens": writers["train"].counts()["tokens"],
        "unknown": unigram.of(UNK_ID),
    }


@cache
def _encoder(spiece: Path) -> DocumentEncoder:
    """Load the encoder once per process, for all its shards."""
    return DocumentEncoder(spiece)


def _encoded(batch: list[Passage], encoder: DocumentEncoder, rule: SplitSettings) -> dict[Split, Documents]:
    """Return the ids of the passages of each split."""
    texts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for passage in batch:
        texts[split_of(rule, passage.id)].append(passage.text)
    return {split: encoder.encode(some) for split, some in texts.items()}
