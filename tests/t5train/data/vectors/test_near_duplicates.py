"""Planted near-duplicates are found through embeddings, and only texts decide which pairs these are."""

import json
import resource
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.vectors.faiss_indexes import built_index
from t5train.data.vectors.index_check import given_index
from t5train.data.vectors.near_duplicates import (
    CHUNK_ROWS,
    NEAR_DUPLICATE,
    NearDuplicates,
    Thresholds,
    find_near_duplicates,
    similarity,
    word_grams,
)
from t5train.errors import InputError, StorageError
from tests.support.embedded_passages import (
    EmbeddedPassages,
    embedded_passages,
    embeddings_in,
    write_index,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("one_faiss_thread")
COPIES = {590: 3, 411: 200, 5: 210, 7: 5, 333: 332}
"""Rows with the text of another row and about its vector. 5, 7 and 210 are one group."""
PAIRS = {(3, 590), (200, 411), (5, 210), (5, 7), (7, 210), (332, 333)}
UNLIKE = {100: 400, 150: 450}
"""Rows with exactly the vector of another row, and a text of their own."""
FAR = {50: 20}
"""Rows with the text of another row, and a vector of their own: embeddings do not propose them."""

DEFAULT = Thresholds()


class Result(NamedTuple):
    counts: NearDuplicates
    header: dict[str, Any]
    pairs: list[dict[str, Any]]

    def rows(self) -> list[tuple[int, int]]:
        """The pairs, by the ids that ``write_parquet`` gives: one more than the row."""
        return [(int(each["first"]["id"]) - 1, int(each["second"]["id"]) - 1) for each in self.pairs]


def planted() -> EmbeddedPassages:
    made = embedded_passages()
    texts, vectors = list(made.texts), made.vectors.copy()
    rng = np.random.default_rng(0)
    for number, (row, other) in enumerate(COPIES.items()):
        words = texts[other].split()
        words[40 + number] = "changed"
        texts[row] = " ".join(words)
        vectors[row] = vectors[other] * 0.9 + 0.02 * rng.standard_normal(vectors.shape[1])
    for row, other in UNLIKE.items():
        vectors[row] = vectors[other]
    for row, other in FAR.items():
        texts[row] = texts[other]
    return EmbeddedPassages(texts, vectors)


PLANTED = planted()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("near-duplicates") / "text", PLANTED)


def found(
    folder: Path, index: Any, out: Path, thresholds: Thresholds = DEFAULT, chunk_rows: int = CHUNK_ROWS
) -> Result:
    counts = find_near_duplicates(
        embeddings_in(folder),
        index,
        thresholds,
        out,
        about={"source": "text", "index": "x.faiss"},
        chunk_rows=chunk_rows,
    )
    assert [each.name for each in out.parent.iterdir() if each.name.startswith(f".{out.name}")] == []
    header, *pairs = map(json.loads, out.read_text("utf-8").splitlines())
    return Result(counts, header, pairs)


def test_planted_near_duplicates_are_found_and_unlike_texts_with_equal_vectors_are_not(
    folder: Path, tmp_path: Path
) -> None:
    result = found(folder, built_index(embeddings_in(folder), 0), tmp_path / "pairs.jsonl")
    assert result.rows() == sorted(PAIRS)
    assert result.counts._replace(histogram=[]) == NearDuplicates(600, len(PAIRS | UNLIKE.keys()), 6, 4, 5, [])
    assert sum(result.counts.histogram) == result.counts.candidates
    assert result.counts.histogram[0] == len(UNLIKE)
    assert result.header == {
        "kind": "near-duplicates",
        "schema_version": 2,
        "source": "text",
        "index": "x.faiss",
        **Thresholds()._asdict(),
        **result.counts._asdict(),
    }
    (last,) = [each for each in result.pairs if each["second"]["id"] == "591"]
    assert last["first"] == {"file": "train-00000-of-00003.parquet", "row": 3, "id": "4"}
    assert last["second"] == {"file": "train-00002-of-00003.parquet", "row": 190, "id": "591"}
    assert last["text_similarity"] == pytest.approx(91 / 101, abs=1e-6)
    assert 0.99 < last["cosine"] <= 1


def test_the_result_does_not_depend_on_how_much_is_in_memory(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    index = built_index(embeddings_in(folder), 0)
    thresholds = Thresholds(cosine=0.75, text=0.0)
    whole = found(folder, index, out, thresholds)
    assert whole.counts.pairs == whole.counts.candidates > 100
    expected = out.read_bytes()
    for chunk_rows in (1, 37, 1000):
        found(folder, index, out, thresholds, chunk_rows)
        assert out.read_bytes() == expected, chunk_rows


@pytest.mark.parametrize("kind", ["Flat", "HNSW32_SQ8", "IVF8,SQ8", "IVF8,PQ16x4np"])
@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_a_given_index_proposes_by_the_cosine_whatever_its_metric(
    folder: Path, tmp_path: Path, kind: str, metric: int
) -> None:
    path = write_index(tmp_path / "x.faiss", PLANTED.vectors, kind, metric, lists_searched=1, trained_with=PLANTED)
    index = given_index(path, embeddings_in(folder))
    thresholds = Thresholds(neighbours=100 if "PQ" in kind else 10)  # coarse codes do not rank within a cluster
    assert found(folder, index, tmp_path / "pairs.jsonl", thresholds).rows() == sorted(PAIRS)


def test_an_index_built_of_lists_finds_the_same(folder: Path, tmp_path: Path) -> None:
    embeddings = embeddings_in(folder)
    index = built_index(embeddings, 0, exact_rows=100)
    assert type(index).__name__ == "IndexIVFScalarQuantizer"
    assert found(folder, index, tmp_path / "pairs.jsonl").rows() == sorted(PAIRS)
    again = built_index(embeddings, 0, exact_rows=100)
    assert (faiss.serialize_index(index) == faiss.serialize_index(again)).all()


def test_embeddings_propose_and_do_not_decide(tmp_path: Path) -> None:
    rows = 60  # fewer, because all pairs are compared
    some = EmbeddedPassages(PLANTED.texts[:rows], PLANTED.vectors[:rows])
    folder = write_parquet(tmp_path / "text", some)
    index, out = built_index(embeddings_in(folder), 0), tmp_path / "pairs.jsonl"
    (far,) = FAR.items()
    assert far[::-1] not in found(folder, index, out).rows()
    lenient = found(folder, index, out, Thresholds(neighbours=rows, cosine=-1.0))
    assert lenient.rows() == sorted({*(pair for pair in PAIRS if max(pair) < rows), far[::-1]})
    assert lenient.counts.candidates == rows * (rows - 1) / 2
    strict = found(folder, index, out, Thresholds(text=0.95))
    assert (strict.pairs, strict.counts.groups, strict.counts.copies) == ([], 0, 0)


def test_no_more_neighbours_are_compared_than_asked_for(tmp_path: Path) -> None:
    made = embedded_passages(60)
    same = EmbeddedPassages(made.texts, np.repeat(made.vectors[:1], 60, axis=0))
    folder = write_parquet(tmp_path / "text", same)
    index = built_index(embeddings_in(folder), 0)
    assert found(folder, index, tmp_path / "pairs.jsonl", Thresholds(neighbours=2)).counts.candidates <= 60 * 2


def test_an_index_of_other_embeddings_or_of_another_metric_is_refused(folder: Path, tmp_path: Path) -> None:
    short = write_index(tmp_path / "short.faiss", PLANTED.vectors[1:])
    with pytest.raises(InputError, match=r"is not an index of this source\. Its vectors: 599; expected: 600"):
        given_index(short, embeddings_in(folder))
    tail = PLANTED.vectors.copy()
    tail[-30:] = tail[-30:][::-1]
    for vectors, share in ((PLANTED.vectors[::-1], r"0\.\d\d"), (tail, r"95\.00")):
        other = write_index(tmp_path / "other.faiss", vectors)
        with pytest.raises(
            InputError, match=rf"vectors of their own rows: {share}%; expected: in at least 99% of rows"
        ):
            given_index(other, embeddings_in(folder))
    l1 = write_index(tmp_path / "l1.faiss", PLANTED.vectors, metric=faiss.METRIC_L1)
    with pytest.raises(InputError, match=r"Its metric: number \d+; expected: inner product or L2"):
        given_index(l1, embeddings_in(folder))


@pytest.mark.parametrize("bad", [600, -7])
def test_an_index_whose_ids_are_not_rows_is_refused(folder: Path, tmp_path: Path, bad: int) -> None:
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(PLANTED.vectors.shape[1]))
    index.add_with_ids(PLANTED.vectors, np.array([*range(599), bad]))
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    index = given_index(tmp_path / "x.faiss", embeddings_in(folder))
    with pytest.raises(InputError, match=rf"^x\.faiss returns the row {bad}, but the source has the rows 0 to 599\."):
        found(folder, index, tmp_path / "pairs.jsonl")


def test_cosines_do_not_come_from_the_codes_of_an_index(folder: Path, tmp_path: Path) -> None:
    exact = found(folder, built_index(embeddings_in(folder), 0), tmp_path / "exact.jsonl")
    path = write_index(tmp_path / "x.faiss", PLANTED.vectors, "PQ16x4np")
    index, thresholds = given_index(path, embeddings_in(folder)), Thresholds(neighbours=100)
    coarse = found(folder, index, tmp_path / "coarse.jsonl", thresholds, 37)
    cosines = [[each["cosine"] for each in result.pairs] for result in (exact, coarse)]
    assert coarse.rows() == exact.rows()
    assert cosines[0] == pytest.approx(cosines[1], abs=0.001)


def test_an_index_that_memory_cannot_hold_is_not_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t5train.data.vectors.faiss_indexes.host_memory_bytes", lambda: 3_000_000)
    with pytest.raises(InputError, match=r"needs 1\.8 MB of memory, .* 1\.5 MB\. Give an index that is on disk"):
        built_index(embeddings_in(folder), 0)
    with pytest.raises(InputError, match=r"needs 4\.2 MB of memory"):
        built_index(embeddings_in(folder), 0, exact_rows=100)


def test_embeddings_that_do_not_fit_on_the_disk_end_the_search_with_an_error_that_names_their_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, out = built_index(embeddings_in(folder), 0), tmp_path / "pairs.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("t5train.host_resources.free_space_bytes", lambda _: 900_000)
        with pytest.raises(StorageError, match=r"disk space for the embeddings: .* 0\.9 MB are needed"):
            found(folder, index, out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*directions'"):
            found(folder, index, out, chunk_rows=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == []


def test_more_candidates_than_memory_can_hold_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = built_index(embeddings_in(folder), 0)
    monkeypatch.setattr("t5train.data.vectors.near_duplicates.host_memory_bytes", lambda: 60_000)
    assert found(folder, index, tmp_path / "few.jsonl").rows() == sorted(PAIRS)
    with pytest.raises(InputError, match=r"candidates of \d+ of 600 passages need .* half .* \(--neighbours"):
        found(folder, index, tmp_path / "pairs.jsonl", Thresholds(cosine=0.1), chunk_rows=100)


def test_a_vector_of_zeros_is_similar_to_nothing(tmp_path: Path) -> None:
    made = embedded_passages(30)
    vectors = made.vectors.copy()
    vectors[:2] = 0
    folder = write_parquet(tmp_path / "text", EmbeddedPassages([made.texts[0]] * 30, vectors), files=1)
    given = given_index(write_index(tmp_path / "x.faiss", vectors), embeddings_in(folder))
    for index in (built_index(embeddings_in(folder), 0), given):
        result = found(folder, index, tmp_path / "pairs.jsonl", Thresholds(cosine=0.1))
        assert not {0, 1} & {row for pair in result.rows() for row in pair}


NUMBERED = [f"word{number}" for number in range(110)]
PASSAGE = " ".join(NUMBERED[:100])


def of_texts(text: str, other: str) -> float:
    return similarity(word_grams(text), word_grams(other))


def changed(*places: int) -> str:
    return " ".join("other" if place in places else word for place, word in enumerate(NUMBERED[:100]))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (PASSAGE, 1.0),
        (PASSAGE.upper().replace(" ", ",\n "), 1.0),
        (changed(50), 91 / 101),
        (changed(30, 60), 86 / 106),
        (changed(20, 50, 80), 81 / 111),
        (" ".join(NUMBERED[10:110]), 86 / 106),
        (" ".join(reversed(NUMBERED[:100])), 0.0),
        ("", 0.0),
    ],
)
def test_similarities_are_those_of_the_documentation(other: str, expected: float) -> None:
    assert of_texts(PASSAGE, other) == pytest.approx(expected)


def test_two_changed_words_in_a_hundred_are_a_near_duplicate_and_three_are_not() -> None:
    assert 81 / 111 < NEAR_DUPLICATE <= 86 / 106


def test_short_texts_are_compared_as_a_whole_and_texts_without_words_are_similar_to_nothing() -> None:
    assert of_texts("One, two three", "one two THREE") == 1
    assert of_texts("one two three", "one two four") == 0
    assert of_texts("...", "...") == 0
    assert word_grams("a b c d e f") == {("a", "b", "c", "d", "e"), ("b", "c", "d", "e", "f")}


@given(st.text("ab \n.", max_size=60), st.text("ab \n.", max_size=60))
def test_similarity_is_symmetric_and_between_0_and_1(one: str, other: str) -> None:
    value = of_texts(one, other)
    assert value == of_texts(other, one)
    assert 0 <= value <= 1
    assert of_texts(one, one) == (1 if word_grams(one) else 0)
