"""The built-in corpus."""

import json
from pathlib import Path

import pytest

from t5train.data import sources

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_the_corpus_is_megabytes_of_short_passages_of_topics_and_docstrings(tmp_path: Path) -> None:
    sources.write_pydocs(tmp_path / "pydocs.jsonl")
    passages = [json.loads(line) for line in (tmp_path / "pydocs.jsonl").read_text("utf-8").split("\n")[:-1]]
    texts = [passage["text"] for passage in passages]
    assert sum(len(text.encode()) for text in texts) > 1_500_000
    assert max(len(text.split()) for text in texts) == 100
    assert all(set(passage) == {"id", "title", "text"} and passage["text"] for passage in passages)
    assert len(texts) == len(set(texts)), "a passage occurs twice"
    titles = {passage["title"] for passage in passages}
    assert {"topic assert", "json", "json.encoder.JSONEncoder", "json.encoder.JSONEncoder.default"} <= titles


def test_the_corpus_is_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources.pydocs_files()
    assert files == sources.pydocs_files()
    monkeypatch.setattr(sources, "pydocs_files", lambda: files[:30])  # reading all takes seconds
    for name in ("first", "again"):
        sources.write_pydocs(tmp_path / name)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "first").read_bytes() != b""
