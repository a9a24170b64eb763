"""Compare the ids of the segmenter in C++ with those of ``Encoder`` on many words.

::

    python -m tests.acceptance.segmenter_ids --spiece spiece.model                  10^8 words, two processes
    python -m tests.acceptance.segmenter_ids --spiece spiece.model --words 1e6

The texts are sentences from the docstrings of installed packages, in random order and in passages of 100 words. The
command fails at the first passage with other ids, and prints it.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.tokenise import docstrings
from t5train.data.vocabulary.document_encoder import DocumentEncoder
from t5train.data.vocabulary.sentencepiece_model import Encoder

PASSAGE_WORDS, BATCH_PASSAGES = 100, 400


def differing(spiece: Path, texts: list[str]) -> str | None:
    """Return the first text whose ids differ; None if there is none."""
    segmenter, reference = _encoders(spiece)
    found = segmenter.encode(texts)
    expected = reference.encode(texts, add_eos=True)
    for text, ids, others in zip(texts, np.split(found.ids, np.cumsum(found.lengths)[:-1]), expected, strict=True):
        if ids.tolist() != others.tolist():
            return text
    return None


@cache
def _encoders(spiece: Path) -> tuple[DocumentEncoder, Encoder]:
    encoder = DocumentEncoder(spiece)
    assert encoder.segmenter is not None, "run make setup"
    return encoder, Encoder(spiece)


def batches(words: int) -> Iterator[list[str]]:
    """Yield batches of passages with so many words in all."""
    sentences = [each for text in docstrings() for each in re.split(r"(?<=[.!?])\s+|\n\n", text) if each.strip()]
    generator = random.Random(0)
    for _ in range(-(-words // (PASSAGE_WORDS * BATCH_PASSAGES))):
        yield [passage(generator, sentences) for _ in range(BATCH_PASSAGES)]


def passage(generator: random.Random, sentences: list[str]) -> str:
    """Return random sentences with 100 words or more; white space within a sentence stays as it is."""
    chosen, words = list[str](), 0
    while words < PASSAGE_WORDS:
        chosen.append(generator.choice(sentences))
        words += len(chosen[-1].split())
    return " ".join(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spiece", type=Path, required=True)
    parser.add_argument("--words", type=float, default=1e8)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    began, compared, text_bytes = time.monotonic(), 0, 0
    to_compare = batches(int(given.words))
    with ProcessPoolExecutor(given.processes) as pool:
        while window := list(islice(to_compare, 8 * given.processes)):
            for batch, found in zip(window, pool.map(partial(differing, given.spiece), window), strict=True):
                if found is not None:
                    sys.exit(f"other ids: {found!r}")
                compared += sum(len(text.split()) for text in batch)
                text_bytes += sum(len(text.encode()) for text in batch)
    print(f"{compared:,} words, {text_bytes / 1e6:,.0f} MB: the same ids, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
