"""Passages with embeddings in the layout of wiki_dpr, and FAISS indexes of them."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import pyarrow
import pyarrow.parquet

from t5train.data.passages import SourceFile
from t5train.data.vectors.embeddings import Embeddings, embeddings_of
from tests.support.generated_text import WORDS

DIMENSION = 768
ROW_GROUP = 150


class EmbeddedPassages(NamedTuple):
    """Texts, and one vector for each."""

    texts: list[str]
    vectors: np.ndarray


def embedded_passages(count: int = 600, seed: int = 0) -> EmbeddedPassages:
    """Passages of 100 words. The vectors are in clusters, and of unequal lengths, as those of DPR."""
    generator, rng = random.Random(seed), np.random.Generator(np.random.PCG64(seed))
    centres = rng.standard_normal((max(count // 30, 1), DIMENSION))
    vectors = centres[rng.integers(len(centres), size=count)] + 0.6 * rng.standard_normal((count, DIMENSION))
    vectors *= rng.uniform(0.8, 1.2, (count, 1))
    texts = [" ".join(generator.choices(WORDS, k=100)) for _ in range(count)]
    return EmbeddedPassages(texts, vectors.astype(np.float32))


def write_parquet(folder: Path, passages: EmbeddedPassages, files: int = 3) -> Path:
    """Write the passages to files of a new folder, and return the folder."""
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(passages.texts)), files)):
        columns = {
            "id": [str(row + 1) for row in rows],
            "text": [passages.texts[row] for row in rows],
            "title": ["a title"] * len(rows),
            "embeddings": pyarrow.array(list(passages.vectors[rows])),
        }
        path = folder / f"train-{number:05d}-of-{files:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=ROW_GROUP)
    return folder


def embeddings_in(folder: Path) -> Embeddings:
    """The embeddings in a folder."""
    return embeddings_of([SourceFile(path, path.name) for path in sorted(folder.iterdir())])


@cache
def _trained(vectors: bytes, dimension: int, kind: str, metric: int) -> np.ndarray:
    """An empty index that was trained with vectors, as bytes."""
    index = faiss.index_factory(dimension, kind, metric)
    index.train(np.frombuffer(vectors, np.float32).reshape(-1, dimension))
    return faiss.serialize_index(index)


def write_index(
    path: Path,
    vectors: np.ndarray | Sequence[np.ndarray],
    kind: str = "Flat",
    metric: int = faiss.METRIC_INNER_PRODUCT,
    lists_searched: int = 4,
    trained_with: EmbeddedPassages | None = None,
) -> Path:
    """Write an index of vectors, and return its path. It is trained with them, or quicker with those of passages.

    Training with those of passages is done once.
    """
    content = np.ascontiguousarray(vectors, np.float32)
    if trained_with is None:
        index = faiss.index_factory(content.shape[1], kind, metric)
        index.train(content)
    else:
        index = faiss.deserialize_index(_trained(trained_with.vectors.tobytes(), content.shape[1], kind, metric))
    index.add(content)
    if kind.startswith("IVF"):
        index.nprobe = lists_searched
    faiss.write_index(index, str(path))
    return path
