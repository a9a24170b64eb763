"""An index is accepted only if it has the vectors of the text, and finds as many of their neighbours as is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from t5train.data.vectors.embeddings import embeddings_of, rows_at, spread_rows
from t5train.data.vectors.faiss_indexes import open_index, searched
from t5train.data.vectors.index_check import IndexReport, Sample, check_index, recall_by_rank, recall_record
from t5train.errors import InputError
from t5train.spec.known_texts import KnownIndex, known_indexes
from tests.support.embedded_passages import DIMENSION, embedded_passages, embeddings_in, write_index, write_parquet

pytestmark = pytest.mark.usefixtures("one_faiss_thread")
PASSAGES, OTHERS = embedded_passages(), embedded_passages(seed=1)
ROWS = len(PASSAGES.vectors)
KINDS = ["Flat", "HNSW32_SQ8", "IVF8_HNSW16,PQ16x4np"]
"""``np``: codes are not reordered for searches by Hamming distance, which takes seconds and changes nothing here."""
SAMPLE = Sample(queries=50, neighbours=10)
Checked = Callable[..., IndexReport]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("embeddings") / "text", PASSAGES)


@pytest.fixture
def checked(folder: Path, tmp_path: Path) -> Checked:
    def check(path: Path, known: KnownIndex | None = None, sample: Sample = SAMPLE, **more: Any) -> IndexReport:
        record = recall_record(tmp_path / "root", str(folder), "", str(path), sample)
        return check_index(path, known, embeddings_in(folder), sample, record, **more)

    return check


def known_as(path: Path, **more: Any) -> KnownIndex:
    facts = {"location": str(path), "size_bytes": path.stat().st_size, "vectors": ROWS, "dimension": DIMENSION}
    return KnownIndex(**{**facts, "metric": "inner product", **more})


def failed(report: IndexReport) -> list[str]:
    return [each.what for each in report.checks if not each.passed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", ["inner product", "L2"])
def test_an_index_of_the_vectors_passes_and_its_recall_is_recorded(
    tmp_path: Path, checked: Checked, kind: str, metric: Any
) -> None:
    number = faiss.METRIC_L2 if metric == "L2" else faiss.METRIC_INNER_PRODUCT
    path = write_index(tmp_path / "x.faiss", PASSAGES.vectors, kind, number, trained_with=PASSAGES)
    report = checked(path, known_as(path, metric=metric))
    assert not failed(report)
    assert report.facts is not None
    assert (report.facts.vectors, report.facts.dimension, report.facts.metric) == (ROWS, DIMENSION, metric)
    assert len(report.recall) == 10
    assert (min(report.recall) == 1) if kind == "Flat" else (0.1 < report.recall[-1] <= 1)
    assert report.recorded is not None
    assert report.recorded.is_file()
    again = checked(path, known_as(path, metric=metric))
    assert (again.recorded, again.recall, again.passed) == (None, report.recall, True)
    assert str(report.recorded) in again.checks[-1].expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_known", [True, False])
def test_an_index_of_other_vectors_is_refused(tmp_path: Path, checked: Checked, kind: str, is_known: bool) -> None:
    others = {
        "other passages": (OTHERS, OTHERS.vectors),
        "another order": (PASSAGES, PASSAGES.vectors[::-1]),
        "one row on": (PASSAGES, np.roll(PASSAGES.vectors, 1, axis=0)),
    }
    for name, (passages, vectors) in others.items():
        path = write_index(tmp_path / f"{name}.faiss", vectors, kind, trained_with=passages)
        report = checked(path, known_as(path) if is_known else None)
        assert failed(report) == ["vectors of their own rows", "recall@10"], name
        assert report.recorded is None


WRONG = ROWS // 20
SCATTERED = np.random.default_rng(0).choice(ROWS, WRONG, replace=False)
CONTIGUOUS, TAIL = np.arange(300, 300 + WRONG), np.arange(ROWS - WRONG, ROWS)
WRONG_ROWS = {
    "others, scattered": (SCATTERED, OTHERS.vectors[SCATTERED]),
    "others, contiguous": (CONTIGUOUS, OTHERS.vectors[CONTIGUOUS]),
    "zeros": (CONTIGUOUS, np.zeros((WRONG, DIMENSION))),
    "mean": (SCATTERED, PASSAGES.vectors.mean(axis=0)),
    "exchanged": (SCATTERED, PASSAGES.vectors[np.roll(SCATTERED, 1)]),
    "reversed tail": (TAIL, PASSAGES.vectors[TAIL[::-1]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG_ROWS)
def test_an_index_of_which_5_percent_are_wrong_is_refused(
    tmp_path: Path, checked: Checked, kind: str, name: str
) -> None:
    vectors, (rows, values) = PASSAGES.vectors.copy(), WRONG_ROWS[name]
    vectors[rows] = values
    report = checked(write_index(tmp_path / "x.faiss", vectors, kind, trained_with=PASSAGES))
    assert "vectors of their own rows" in failed(report)
    assert report.recorded is None


@pytest.mark.parametrize(
    "kind", ["SQ4", "HNSW16", "PQ4x4np", "PQ16x4fs", "IVF8,PQ4x4np", "PCA64,Flat", "PQ4x4np,RFlat"]
)
def test_an_index_with_coarse_codes_stores_the_vectors_of_its_rows(tmp_path: Path, checked: Checked, kind: str) -> None:
    report = checked(write_index(tmp_path / "x.faiss", PASSAGES.vectors, kind))
    assert [each.passed for each in report.checks if each.what == "vectors of their own rows"] == [True]


def test_an_index_trained_with_zeros_stores_none_of_the_vectors(tmp_path: Path, checked: Checked) -> None:
    path = write_index(tmp_path / "x.faiss", np.zeros_like(PASSAGES.vectors), "SQ8")
    assert failed(checked(path)) == ["vectors of their own rows", "recall@10"]


def test_rows_that_an_index_does_not_have_count_as_wrong(tmp_path: Path, checked: Checked) -> None:
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(DIMENSION))
    index.add_with_ids(PASSAGES.vectors, np.array([*range(ROWS - 30), *range(2 * ROWS - 30, 2 * ROWS)]))
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    (share,) = [each for each in checked(tmp_path / "x.faiss").checks if each.what == "vectors of their own rows"]
    assert (share.found, share.passed) == ("95.00%", False)


def test_a_graph_that_finds_few_neighbours_is_not_recorded(tmp_path: Path, checked: Checked) -> None:
    index = faiss.IndexHNSWFlat(DIMENSION, 2, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = index.hnsw.efSearch = 1
    index.add(PASSAGES.vectors)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    report = checked(tmp_path / "x.faiss")
    assert failed(report) == ["recall@10"]
    assert "at least 0.5000 (not known yet, of IndexHNSWFlat)" in report.checks[-1].expected
    assert report.recorded is None


def test_an_index_that_differs_from_the_catalogue_or_the_embeddings_is_refused(
    tmp_path: Path, checked: Checked
) -> None:
    good = write_index(tmp_path / "good.faiss", PASSAGES.vectors)
    assert failed(checked(good, known_as(good, size_bytes=good.stat().st_size + 1))) == ["size in bytes"]
    assert failed(checked(good, known_as(good, vectors=ROWS + 1))) == ["embeddings, by the catalogue"]
    l2 = write_index(tmp_path / "l2.faiss", PASSAGES.vectors, metric=faiss.METRIC_L2)
    assert failed(checked(l2, known_as(l2))) == ["metric", "recall@10"]
    l1 = write_index(tmp_path / "l1.faiss", PASSAGES.vectors, metric=faiss.METRIC_L1)
    assert "metric" in failed(checked(l1))
    narrow = write_index(tmp_path / "narrow.faiss", PASSAGES.vectors[:, :767])
    assert failed(checked(narrow)) == failed(checked(narrow, known_as(narrow))) == ["dimension"]
    assert failed(checked(write_index(tmp_path / "short.faiss", PASSAGES.vectors[:-1]))) == ["vectors"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path, checked: Checked, kind: str) -> None:
    content = write_index(tmp_path / "good.faiss", PASSAGES.vectors, kind, trained_with=PASSAGES).read_bytes()
    cut = [0, 3, 40, len(content) // 2, len(content) - 8]
    for number, bad in enumerate([b"PAR1" * 1000, *(content[:size] for size in cut)]):
        path = tmp_path / f"{number}.faiss"
        path.write_bytes(bad)
        report = checked(path)
        assert failed(report) == ["opened by faiss"], number
        assert "cannot be opened as a FAISS index" in report.checks[-1].found


def test_a_recall_that_falls_below_the_recorded_one_is_refused(tmp_path: Path, checked: Checked) -> None:
    kind = "IVF64,Flat"
    path = write_index(tmp_path / "x.faiss", PASSAGES.vectors, kind, lists_searched=64)
    first = checked(path)
    assert first.recall[-1] > 0.99
    write_index(path, PASSAGES.vectors, kind, lists_searched=1)
    second = checked(path)
    assert 0.1 < second.recall[-1] < 0.9
    assert failed(second) == ["recall@10"]
    assert first.recorded is not None
    remedy = "Fetch or build the index again; if you changed it on purpose, remove this file"
    assert f"in {first.recorded}. {remedy}" in second.checks[-1].expected
    first.recorded.write_text("{}")
    with pytest.raises(InputError, match=r"is damaged .* the next check records it again"):
        checked(path)
    first.recorded.unlink()
    assert checked(path).recorded == first.recorded


def test_another_index_at_the_same_path_has_a_record_of_its_own(tmp_path: Path, checked: Checked) -> None:
    path = tmp_path / "x.faiss"
    first = checked(write_index(path, PASSAGES.vectors))
    coarse = checked(write_index(path, PASSAGES.vectors, "PQ16x4np"))
    assert coarse.recall[-1] < first.recall[-1] - 0.1
    assert coarse.passed
    assert None is not coarse.recorded != first.recorded
    assert checked(write_index(path, PASSAGES.vectors)).recorded is None, "the first record is still there"


def test_a_recall_in_the_catalogue_is_required_of_any_sample(tmp_path: Path, checked: Checked) -> None:
    path = write_index(tmp_path / "x.faiss", PASSAGES.vectors, "IVF64,Flat", lists_searched=2)
    (recall,) = {round(checked(path).recall[-1], 6)}
    for seed in range(3):
        sample = SAMPLE._replace(seed=seed)
        assert checked(path, known_as(path, recall={10: recall}), sample).passed
        assert failed(checked(path, known_as(path, recall={10: 0.999}), sample)) == ["recall@10"]
    report = checked(path, known_as(path, recall={10: recall}))
    assert report.recorded is None, "a recall that is known is not recorded"


@pytest.mark.parametrize("metric", ["inner product", "L2"])
def test_recall_does_not_depend_on_the_chunks_and_is_that_of_an_exact_search(folder: Path, metric: str) -> None:
    embeddings = embeddings_in(folder)
    queries = rows_at(embeddings, spread_rows(ROWS, 40, 1))
    flat = (faiss.IndexFlatL2 if metric == "L2" else faiss.IndexFlatIP)(DIMENSION)
    flat.add(PASSAGES.vectors)
    _, exact = flat.search(queries, 10)
    rng = np.random.default_rng(0)
    found = np.where(rng.random(exact.shape) < 0.3, rng.integers(ROWS, size=exact.shape), exact)
    found[0] = -1
    share = np.mean([len(set(ours) & set(theirs)) / 10 for ours, theirs in zip(found, exact, strict=True)])
    recalls = {tuple(recall_by_rank(embeddings, queries, found, metric, chunk_rows=rows)) for rows in (1, 64, 9999)}
    assert len(recalls) == 1
    assert recalls.pop()[-1] == pytest.approx(share)


def test_of_equal_vectors_any_is_a_neighbour(tmp_path: Path) -> None:
    vectors = np.repeat(PASSAGES.vectors[:10], 30, axis=0)
    folder = write_parquet(tmp_path / "text", PASSAGES._replace(texts=PASSAGES.texts[:300], vectors=vectors))
    embeddings, path = embeddings_in(folder), write_index(tmp_path / "x.faiss", vectors)
    sample = Sample(queries=20, neighbours=5)
    record = recall_record(tmp_path, "text", "", "x", sample)
    report = check_index(path, None, embeddings, sample, record)
    assert report.passed
    assert min(report.recall) == 1


def test_the_catalogue_has_no_recall_that_nobody_measured_and_sizes_that_agree_with_their_kinds() -> None:
    exact, compressed = (known_indexes("wiki_dpr")[name] for name in ("exact", "compressed"))
    assert not exact.recall
    assert not compressed.recall
    # A vector takes 768 bytes in SQ8, 256 links and more in HNSW128, 12 of bookkeeping; or 128 in PQ128 and an id.
    assert exact.size_bytes / exact.vectors == pytest.approx(768 + 4 * (256 + 128 / 127) + 12, abs=0.01)
    assert compressed.size_bytes - compressed.vectors * (128 + 8) == pytest.approx(4096 * 768 * 4 + 768 * 1024, rel=0.1)
    assert not known_indexes("/data/text")


def test_an_index_that_cannot_be_opened_or_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened"):
        open_index(tmp_path / "missing.faiss")
    with pytest.raises(InputError, match=r"the index cannot be searched \(.*is_trained"):
        searched(faiss.index_factory(DIMENSION, "IVF8,SQ8"), PASSAGES.vectors[:5], 1)


def test_embeddings_that_are_malformed_are_refused_before_a_recall_is_recorded(tmp_path: Path) -> None:
    vectors = PASSAGES.vectors.copy()
    vectors[577, 5] = np.nan
    folder = write_parquet(tmp_path / "text", PASSAGES._replace(vectors=vectors))
    record = recall_record(tmp_path, "text", "", "x", SAMPLE)
    path = write_index(tmp_path / "x.faiss", PASSAGES.vectors)
    with pytest.raises(InputError, match=r"train-00002-of-00003\.parquet row 177 has an embedding with a number"):
        check_index(path, None, embeddings_in(folder), SAMPLE, record)
    assert not record.folder.exists()
    assert embeddings_of(embeddings_in(folder).files[0][:1]).rows == 200
