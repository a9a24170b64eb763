"""Text to evaluate a model on, as windows of tokens: cut as training cuts it, but held in memory."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from t5train.data.loader import drawn_held_out
from t5train.data.passages import Passage, SourceFile, Split, SplitRule, split_of
from t5train.data.readers import rows
from t5train.data.segments import passages_of, scan
from t5train.data.shards import Stretch, plan_shards
from t5train.errors import InputError
from t5train.progress import Progress
from t5train.release.inference.vocabulary import Vocabulary

_PASSAGES_A_BATCH = 256


class EvaluationText(NamedTuple):
    """Windows of a text, and how often each id occurs in it.

    ``windows`` uint16 or, for a large vocabulary, int32 [n, window_tokens]; ``numbers`` int64 [n]: their places in the
    text, in windows; ``counts`` int64 [vocabulary].
    """

    windows: np.ndarray
    numbers: np.ndarray
    counts: np.ndarray
    passages: int


def whole_text(files: Iterable[SourceFile]) -> Iterator[Iterator[Passage]]:
    """Yield all passages that have text, as one sequence."""
    yield (row.passage for file in files for row in rows(file) if row.passage.text.strip())


def split_text(
    files: list[SourceFile], rule: SplitRule, split: Split, shard_tokens: int, progress: Progress
) -> Iterator[Iterator[Passage]]:
    """Yield the passages of a split, one sequence for each token shard that training would make of the text.

    Raises InputError if the files hold no text.
    """
    scanned = []
    for done, file in enumerate(files, start=1):
        scanned.append(scan(file))
        progress("files divided as training divides them", done, len(files))
    if not any(each.segments for each in scanned):
        raise InputError(f"{files[0].path}{' and the other files' * (len(files) > 1)}: there is no text. Add some")
    for stretches in plan_shards(scanned, shard_tokens):
        yield (passage for passage in _passages(stretches) if split_of(rule, passage.id) == split)


def _passages(stretches: list[Stretch]) -> Iterator[Passage]:
    for stretch in stretches:
        yield from passages_of(SourceFile(Path(stretch.path), stretch.name), stretch.segment)


def read_windows(
    sequences: Iterable[Iterator[Passage]],
    vocabulary: Vocabulary,
    window_tokens: int,
    most_windows: int | None,
    progress: Progress,
) -> EvaluationText:
    """Encode passages, and cut each sequence of them into whole windows; the rest of its tokens is not used.

    Reads no further than ``most_windows`` require. Raises InputError if there is no whole window.
    """
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.int32
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    cut: list[np.ndarray] = []
    passages = windows = 0
    for sequence in sequences:
        tokens: list[np.ndarray] = []
        held = 0
        while batch := list(islice(sequence, _PASSAGES_A_BATCH)):
            ids = np.concatenate(vocabulary.encode([passage.text for passage in batch]))
            counts += np.bincount(ids, minlength=len(counts))
            tokens.append(ids.astype(dtype))
            held += len(ids)
            passages += len(batch)
            progress("passages tokenised", passages, None)
            if most_windows is not None and windows + held // window_tokens >= most_windows:
                break
        if whole := held // window_tokens:
            cut.append(np.concatenate(tokens)[: whole * window_tokens].reshape(whole, window_tokens))
            windows += whole
        if most_windows is not None and windows >= most_windows:
            break
    if not cut:
        raise InputError(
            f"the text is too short to evaluate: a sequence takes {window_tokens} consecutive tokens, but there are "
            f"{counts.sum():,} tokens in {passages:,} passages. Give more text, or set a lower --input-tokens"
        )
    found = np.concatenate(cut)[:most_windows]
    return EvaluationText(found, np.arange(len(found)), counts, passages)


def drawn_as_in_validation(text: EvaluationText, most_windows: int | None) -> EvaluationText:
    """Return the windows of a whole split that validation in training uses if it takes ``most_windows``."""
    if most_windows is None or most_windows >= len(text.windows):
        return text
    numbers = drawn_held_out(most_windows, len(text.windows))
    return text._replace(windows=text.windows[numbers], numbers=numbers)
