"""The built-in corpus."""

import json
from pathlib import Path

import pytest

from t5train.data import sources

pytestmark = pytest.mark.usefixtures("quick_workers")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pydocs") / "pydocs.jsonl"
    sources.write_pydocs(path)
    return path


@pytest.fixture(scope="module")
def passages(written: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in written.read_text("utf-8").split("\n")[:-1]]


def test_the_corpus_is_megabytes_of_short_passages(passages: list[dict[str, str]]) -> None:
    assert sum(len(passage["text"].encode()) for passage in passages) > 1_500_000
    assert max(len(passage["text"].split()) for passage in passages) == 100
    assert all(set(passage) == {"id", "title", "text"} and passage["text"] for passage in passages)


def test_no_passage_occurs_twice(passages: list[dict[str, str]]) -> None:
    texts = [passage["text"] for passage in passages]
    assert len(texts) == len(set(texts))


def test_the_corpus_has_topics_and_docstrings_of_modules_classes_and_functions(passages: list[dict[str, str]]) -> None:
    titles = {passage["title"] for passage in passages}
    assert {"topic assert", "json", "json.encoder.JSONEncoder", "json.encoder.JSONEncoder.default"} <= titles


def test_the_corpus_is_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources.pydocs_files()
    assert files == sources.pydocs_files()
    monkeypatch.setattr(sources, "pydocs_files", lambda: files[:30])  # reading all takes seconds
    for name in ("first", "again"):
        sources.write_pydocs(tmp_path / name)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "first").read_bytes() != b""
