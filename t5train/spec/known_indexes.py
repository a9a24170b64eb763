"""FAISS indexes of well-known texts: where they are, and what is known of them."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Metric = Literal["inner product", "L2"]


class KnownIndex(BaseModel):
    """A FAISS index of the embeddings of a text that has a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    location: str
    """Path or fsspec URL of the file."""
    size_bytes: int = Field(gt=0)
    vectors: int = Field(gt=0)
    dimension: int = Field(gt=0)
    metric: Metric
    recall: dict[int, float] = Field(default_factory=dict)
    """For a number k: the share of the exact k nearest neighbours that the index finds. Where it is unknown, the first
    check on a root measures and records it, and later ones compare."""


_WIKI_DPR = "hf://datasets/facebook/wiki_dpr/index"
# Rows, dimension and metric are those of the dataset and of its former loading script. The sizes agree with them: 1808
# bytes a vector are 768 of SQ8, 1028 for the 256 and more links of HNSW128, and 12 of bookkeeping; 136 bytes a vector
# are 128 of PQ128 and an id of 8. So neither has the additional dimension that DPR's own HNSW indexes have.
_KNOWN = {
    "wiki_dpr": {
        "exact": KnownIndex(
            location=f"{_WIKI_DPR}/psgs_w100.nq.HNSW128_SQ8-IP-train.faiss",
            size_bytes=37_996_397_866,
            vectors=21_015_300,
            dimension=768,
            metric="inner product",
        ),
        "compressed": KnownIndex(
            location=f"{_WIKI_DPR}/psgs_w100.nq.IVF4096_HNSW128_PQ128-IP-train.faiss",
            size_bytes=2_872_598_409,
            vectors=21_015_300,
            dimension=768,
            metric="inner product",
        ),
    }
}


def known_indexes(source: str) -> Mapping[str, KnownIndex]:
    """Return the indexes of a text that has a name, by their names; none for any other source."""
    return _KNOWN.get(source, {})
