"""Text to evaluate a model on, as windows of tokens: cut as training cuts it, and kept in a temporary file."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import NamedTuple

import numpy as np

from t5train.data.passages import Passage, SourceFile, Split, SplitRule, split_of
from t5train.data.readers import rows
from t5train.data.samples.loader import drawn_held_out
from t5train.data.segments import FileSegments, Stretch, passages_in, scan
from t5train.data.shards import plan_shards
from t5train.errors import InputError
from t5train.files.os_errors import naming
from t5train.inference.model_folder import Vocabulary
from t5train.progress import Progress, silent

_PASSAGES_A_BATCH = 256


class EvaluationText(NamedTuple):
    """Windows of a text, and how often each id occurs in it.

    ``windows`` uint16 or, for a large vocabulary, int32 [n, window_tokens], mapped from a file unless they are drawn;
    ``numbers`` int64 [n]: their places in the text, in windows; ``counts`` int64 [vocabulary].
    """

    windows: np.ndarray
    numbers: np.ndarray
    counts: np.ndarray
    passages: int


class _Reading:
    """Reports how many of a known number of passages have been read, by all iterators together."""

    def __init__(self, num_passages: int, progress: Progress) -> None:
        self._num_passages, self._progress = num_passages, progress
        self._done = 0

    def of(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        """Yield the passages. The time until the next one is taken counts, too."""
        for passage in passages:
            yield passage
            self._done += 1
            if self._done % _PASSAGES_A_BATCH == 0 or self._done == self._num_passages:
                self._progress("passages tokenised", self._done, self._num_passages)


def start_of_text(files: Iterable[SourceFile]) -> Iterator[Iterator[Passage]]:
    """Yield all passages that have text, as one sequence."""
    yield (row.passage for file in files for row in rows(file) if row.passage.text.strip())


def whole_text(files: Sequence[SourceFile], progress: Progress) -> Iterator[Iterator[Passage]]:
    """As ``start_of_text``, but count the passages first, so that ``progress`` can tell how long the rest takes."""
    reading = _Reading(sum(each.passages for each in _scanned(files, progress)), progress)
    yield from map(reading.of, start_of_text(files))


def split_text(
    files: Sequence[SourceFile],
    rule: SplitRule,
    split: Split,
    shard_tokens: int,
    progress: Progress,
    reading: Progress = silent,
) -> Iterator[Iterator[Passage]]:
    """Yield the passages of a split, one sequence for each token shard that training would make of the text.

    ``progress`` is called with the files looked through, and ``reading`` with the passages read of all splits. Raises
    InputError if the files hold no text.
    """
    scanned = _scanned(files, progress)
    if not any(each.segments for each in scanned):
        raise InputError(f"{files[0].path}{' and the other files' * (len(files) > 1)}: there is no text. Add some")
    every = _Reading(sum(each.passages for each in scanned), reading)
    for stretches in plan_shards(scanned, shard_tokens):
        yield (passage for passage in every.of(_passages(stretches)) if split_of(rule, passage.id) == split)


def _scanned(files: Sequence[SourceFile], progress: Progress) -> list[FileSegments]:
    scanned = []
    for done, file in enumerate(files, start=1):
        scanned.append(scan(file))
        progress("files looked through", done, len(files))
    return scanned


def _passages(stretches: list[Stretch]) -> Iterator[Passage]:
    return passages_in((SourceFile(Path(each.path), each.name), each.segment) for each in stretches)


def read_windows(
    sequences: Iterable[Iterator[Passage]],
    vocabulary: Vocabulary,
    window_tokens: int,
    most_windows: int | None = None,
    progress: Progress = silent,
) -> EvaluationText:
    """Encode passages, and cut each sequence of them into whole windows; the rest of its tokens is not used.

    Reads no further than ``most_windows`` require. The tokens go to a temporary file, because a text may be larger than
    memory. Raises InputError if there is no whole window.
    """
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.int32
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    rest = np.empty(0, np.int32)
    passages = windows = 0
    with TemporaryFile() as file, naming(Path(gettempdir())):
        for batch, begins in _batches(sequences):
            ids = np.concatenate(vocabulary.encode([passage.text for passage in batch]))
            counts += np.bincount(ids, minlength=len(counts))
            passages += len(batch)
            held = ids if begins else np.concatenate([rest, ids])
            whole = len(held) // window_tokens
            rest = held[whole * window_tokens :]
            file.write(held[: whole * window_tokens].astype(dtype).tobytes())
            windows = windows + whole if most_windows is None else min(windows + whole, most_windows)
            progress("sequences tokenised", windows, most_windows)
            if windows == most_windows:
                break
        if not windows:
            raise InputError(
                f"the text is too short to evaluate: a sequence takes {window_tokens} consecutive tokens, but there "
                f"are {counts.sum():,} tokens in {passages:,} passages. Give more text, or set a lower --input-tokens"
            )
        file.flush()
        found = np.memmap(file, dtype, "r", shape=(windows, window_tokens))  # stays valid when the file is closed
    return EvaluationText(found, np.arange(windows), counts, passages)


def _batches(sequences: Iterable[Iterator[Passage]]) -> Iterator[tuple[list[Passage], bool]]:
    """Yield batches of passages, and whether a sequence begins with that batch."""
    for sequence in sequences:
        begins = True
        while batch := list(islice(sequence, _PASSAGES_A_BATCH)):
            yield batch, begins
            begins = False


def drawn_as_in_validation(text: EvaluationText, most_windows: int | None) -> EvaluationText:
    """Return the windows of a whole split that validation in training uses if it takes ``most_windows``."""
    if most_windows is None or most_windows >= len(text.windows):
        return text
    numbers = drawn_held_out(most_windows, len(text.windows))
    return text._replace(windows=text.windows[numbers], numbers=numbers)
