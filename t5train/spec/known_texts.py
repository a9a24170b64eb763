"""Well-known texts that ``corpus.source`` names by one word: where they are, what they hold, and their indexes."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from t5train.records.locations import local_folder

BUILT_IN = "pydocs"
"""Python's documentation, which is made on this machine."""


class KnownFile(BaseModel):
    """Size in bytes and sha256 of a file as stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class KnownText(BaseModel):
    """A text that has a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: str
    location: str
    """Path, pattern or fsspec URL."""
    revision: str = ""
    """The commit of a dataset of the Hub. If none is known, that of the first download is recorded and used."""
    num_files: int = 1
    files: dict[str, KnownFile] = {}
    """By name below the location. Others cannot be compared with anything on their first download."""
    columns: dict[str, str] = {}
    """The types of the columns that are read of .parquet files."""
    vectors: tuple[str, int] | None = None
    """The column with a vector of each passage, and its width."""
    rows: int
    """Passages, empty ones included."""
    has_sequential_ids: bool = False
    """Whether the ids of the rows are 1, 2, 3 ... in the order of the files' names."""
    license: str
    languages: tuple[str, ...]


_KNOWN = {
    "psgs_w100": KnownText(
        title="English Wikipedia of December 2018 in passages of 100 words (DPR's psgs_w100)",
        location="https://dl.fbaipublicfiles.com/dpr/wikipedia_split/psgs_w100.tsv.gz",
        files={
            "psgs_w100.tsv.gz": KnownFile(
                size=4_694_541_059, sha256="c39b020c855a2b5c25ffef3abe4a3b6f9b829ad7dbc14ec3d163d34d7c53ea8d"
            )
        },
        rows=21_015_324,
        has_sequential_ids=True,
        license="cc-by-nc-4.0",
        languages=("en",),
    ),
    "wiki_dpr": KnownText(
        title="English Wikipedia of December 2018 in passages of 100 words, with DPR's vectors (facebook/wiki_dpr)",
        location="hf://datasets/facebook/wiki_dpr/data/psgs_w100/nq/train-*-of-00157.parquet",
        num_files=157,
        columns={"id": "string", "text": "string", "title": "string"},
        vectors=("embeddings", 768),
        rows=21_015_300,
        has_sequential_ids=True,
        license="cc-by-nc-4.0",
        languages=("en",),
    ),
}


def known_texts() -> Mapping[str, KnownText]:
    """Return all texts by name."""
    return _KNOWN


def is_named_text(source: str) -> bool:
    """Whether a source is the name of a text, and neither a path nor a URL."""
    return source == BUILT_IN or source in known_texts()


def is_relative_path(source: str | None) -> bool:
    """Whether a source is a path that depends on the current folder."""
    if source is None or is_named_text(source) or local_folder(source) is None:
        return False
    return not source.startswith(("/", "~", "file:", "local:"))


def location_of(source: str) -> str:
    """Return the path or URL of a source."""
    known = known_texts().get(source)
    return source if known is None else known.location


def licence_of(sources: Sequence[str], stated: str | None) -> str | None:
    """Return the licence of one or several texts: what their user states, otherwise what is known."""
    known = [known_texts()[each].license for each in sources if each in known_texts()]
    if stated or not known:
        return stated
    others = [] if len(known) == len(sources) else ["others"]
    return " and ".join(dict.fromkeys([*known, *others]))


def languages_of(sources: Sequence[str], stated: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes of their languages, likewise; none if those of one text are not known."""
    if stated or not all(each in known_texts() for each in sources):
        return stated
    return tuple(dict.fromkeys(code for each in sources for code in known_texts()[each].languages))


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
_INDEXES = {
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
    return _INDEXES.get(source, {})
