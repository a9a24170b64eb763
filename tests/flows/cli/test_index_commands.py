"""``data index``: users check an index and find near-duplicates, with files of their own or of the Hub."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5train.data.download.parquet_columns import needed_columns
from t5train.spec import known_texts
from t5train.spec.known_texts import KnownIndex
from tests.support.documented_json import require_documented
from tests.support.embedded_passages import DIMENSION, EmbeddedPassages, embedded_passages, write_index, write_parquet
from tests.support.hub_server import REPOSITORY, Hub, serving_hub
from tests.support.web_server import Web, serving

pytestmark = pytest.mark.usefixtures("one_faiss_thread")
MADE = embedded_passages(300)
TEXTS, VECTORS = [*MADE.texts[:299], MADE.texts[7]], np.concatenate([MADE.vectors[:299], MADE.vectors[7:8]])
Printed = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``text`` beside a good and a bad index."""
    top = tmp_path_factory.mktemp("vectors")
    write_index(top / "good.faiss", VECTORS, "HNSW32_SQ8")
    write_index(top / "bad.faiss", VECTORS[::-1], "HNSW32_SQ8")
    return write_parquet(top / "text", EmbeddedPassages(TEXTS, VECTORS))


def test_a_good_index_passes_and_one_of_other_vectors_ends_with_exit_code_1(
    printed: Printed, folder: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "recall.png"
    good, bad = (("--index", str(folder.parent / f"{name}.faiss"), "--queries", "64") for name in ("good", "bad"))
    rows = printed("data", "index", "check", str(folder), *good, "--plot", str(plot)).splitlines()
    assert rows[0].split("\t") == ["check", "expected", "found", "result"]
    checks = {row.split("\t")[0]: row.split("\t")[-1] for row in rows if row.count("\t") == 3}
    del checks["check"]
    assert set(checks) == {"vectors", "dimension", "metric", "vectors of their own rows", "recall@10"}
    assert set(checks.values()) == {"passed"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert rows[-1] == f"recall recorded for later checks: {next(tmp_path.glob('work/index-checks/*.json'))}"
    out = printed("data", "index", "check", str(folder), *bad, code=1)
    assert "vectors of their own rows\t" in out
    assert out.count("FAILED") == 2


def test_check_prints_documented_json(printed: Printed, folder: Path) -> None:
    command = ("data", "index", "check", str(folder), "--json", "--neighbours", "3", "--index")
    value = json.loads(printed(*command, str(folder.parent / "good.faiss")))
    require_documented("data index check", value)
    assert (value["passed"], value["vectors"], value["dimension"], value["metric"]) == (True, 300, 768, "inner product")
    assert len(value["recall"]) == 3
    assert json.loads(printed(*command, str(folder.parent / "bad.faiss"), code=1))["passed"] is False


@pytest.mark.parametrize("index", [None, "good.faiss"])
def test_near_duplicates_are_written_and_counted(
    printed: Printed, folder: Path, tmp_path: Path, index: str | None
) -> None:
    options = [] if index is None else ["--index", str(folder.parent / index)]
    command = ("data", "index", "duplicates", str(folder), "--out", "pairs.jsonl", *options)
    assert printed(*command, "--plot", "similarity.png").splitlines()[2:] == [
        "pairs with similar texts\t1",
        "groups\t1",
        "passages that are not the first of their group\t1",
        "pairs: pairs.jsonl",
    ]
    assert Path("similarity.png").read_bytes().startswith(b"\x89PNG")
    header, pair = map(json.loads, Path("pairs.jsonl").read_text("utf-8").splitlines())
    assert (header["source"], header["index"]) == (str(folder), index and str(folder.parent / index))
    assert (pair["first"]["id"], pair["second"]["id"], pair["text_similarity"]) == ("8", "300", 1.0)
    value = json.loads(printed(*command, "--json"))
    require_documented("data index duplicates", value)
    assert (value["pairs"], value["out"]) == (1, str(tmp_path / "pairs.jsonl"))


def test_what_was_found_is_removed_from_training(printed: Printed, folder: Path, tmp_path: Path) -> None:
    printed("data", "index", "duplicates", str(folder), "--out", "pairs.jsonl")
    removal = ("--set", "corpus.remove_listed=pairs.jsonl", "--set", "corpus.split=[998,1,1]")
    printed("corpus", "smoke", "--corpus", str(folder), *removal)
    (findings,) = tmp_path.glob("work/corpus/*/text-findings.json")
    assert json.loads(findings.read_bytes())["repetitions"]["removed_passages"] == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("check {text} --index exact", 4, "--index is 'exact', which is neither a file nor the name of an index"),
        ("check {text} --index good.faiss --plot x.jpg", 2, "--plot is x.jpg, but its name must end in .png"),
        ("duplicates {text} --out x.json", 2, "--out is x.json, but its name must end in .jsonl"),
        ("duplicates {text} --out no/x.jsonl", 4, "the folder"),
        ("duplicates pydocs --out x.jsonl", 4, "pydocs has no embeddings"),
        ("duplicates no/where --out x.jsonl", 4, "'no/where' does not exist"),
        ("duplicates . --out x.jsonl", 4, "1 file in other formats than .parquet, which have no embeddings: a.txt"),
        ("duplicates plain.parquet --out x.jsonl", 4, "needs one column named 'embeddings'"),
        ("duplicates textless.parquet --out x.jsonl", 4, "needs one string column named 'text'"),
        ("duplicates {text} --out x.jsonl --neighbours 0", 2, "--neighbours"),
        ("duplicates {text} --out x.jsonl --index a.txt", 4, "cannot be opened as a FAISS index"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    refused: Callable[..., str], folder: Path, words: str, code: int, said: str
) -> None:
    from pyarrow import table
    from pyarrow.parquet import write_table

    Path("a.txt").write_text("some text\n")
    write_table(table({"text": ["one"]}), "plain.parquet")
    write_table(table({"embeddings": [[1.0, 2.0]]}), "textless.parquet")
    assert said in refused(code, "data", "index", *(word.format(text=folder) for word in words.split()))
    assert not Path("x.jsonl").exists()


def test_without_faiss_the_error_says_what_to_install(run_without: Callable[..., Any], folder: Path) -> None:
    for words in (("check", str(folder), "--index", "x"), ("duplicates", str(folder), "--out", "x.jsonl")):
        result = run_without("faiss", "data", "index", *words)
        assert result.returncode == 4
        assert "pip install 'faiss-cpu" in result.stderr


def of_the_hub(hub: Hub, root: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, because the Hub's client reads its settings on import."""
    command = [sys.executable, "-m", "flows.cli", "data", "index", *words, "--root", str(root)]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_files_and_index_of_the_hub_are_downloaded_whole_and_used_offline(folder: Path, tmp_path: Path) -> None:
    files = {f"data/{path.name}": path.read_bytes() for path in folder.iterdir()}
    content = next(iter(files.values()))
    read = io.BytesIO(content)

    def part(start: int, end: int) -> bytes:
        read.seek(start)
        return read.read(end - start)

    assert needed_columns(part, len(content), ["id", "text", "title"]), "only columns are fetched for training"
    source = f"hf://datasets/{REPOSITORY}@main/data/train-*.parquet"
    index = f"hf://datasets/{REPOSITORY}@main/index/good.faiss"
    with serving_hub(Hub({**files, "index/good.faiss": (folder.parent / "good.faiss").read_bytes()})) as hub:
        missing = of_the_hub(hub, tmp_path, "check", source, "--index", f"{index}.gone")
        assert (missing.returncode, "cannot be read (--index)" in missing.stderr) == (4, True)
        assert not hub.downloads
        checked = of_the_hub(hub, tmp_path, "check", source, "--index", index, "--json")
        assert checked.returncode == 0, checked.stderr
        assert json.loads(checked.stdout)["vectors"] == 300
        assert set(hub.downloads) == set(hub.files)
        hub.downloads.clear()
        again = of_the_hub(hub, tmp_path, "check", source, "--index", index, "--json", HF_HUB_OFFLINE="1")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["recorded"] is None, "the recall is known now"
        offline = of_the_hub(hub, tmp_path / "other", "check", source, "--index", index, HF_HUB_OFFLINE="1")
        assert (offline.returncode, "does not allow downloading it" in offline.stderr) == (4, True)
        assert not hub.downloads


def test_an_index_of_the_catalogue_with_another_size_is_refused_before_it_is_downloaded(
    printed: Printed, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    content = (folder.parent / "good.faiss").read_bytes()
    with serving(Web({"/good.faiss": content})) as web:
        facts: dict[str, Any] = {"vectors": 300, "dimension": DIMENSION, "metric": "inner product"}
        known = KnownIndex(location=f"{web.url}/good.faiss", size_bytes=len(content), **facts)
        larger = known.model_copy(update={"size_bytes": len(content) + 1})
        indexes = {"exact": known, "larger": larger}
        monkeypatch.setitem(known_texts._INDEXES, str(folder), indexes)
        command = ("data", "index", "check", str(folder), "--index")
        assert f"should have {len(content) + 1:,}" in refused(4, *command, "larger")
        assert not [request for request in web.requests if (request.end or 0) - request.start > 1]
        assert "embeddings, by the catalogue\t300 of 768\t300 of 768\tpassed" in printed(*command, "exact")
        assert "has indexes named exact and larger" in refused(4, *command, "none")
