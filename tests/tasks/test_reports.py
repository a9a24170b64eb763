"""The table of stages is an artifact and a file, which a disk or a server that fails does not make fail."""

import logging
from pathlib import Path
from typing import Any

import pytest

from t5train.records.stage_records import Corpus, Publication
from t5train.release.markdown import escaped
from tasks import run_page
from tasks.reports import StageTable
from tasks.stages import CORPUS, PUBLISH, TOKENIZER


def test_every_stage_is_a_row_of_the_file_and_of_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(run_page.Shown, "show", lambda _self, rows, _text: shown.append(list(rows)))
    corpus = Corpus(
        path=tmp_path / "_text_", fingerprint="c" * 64, files={}, counts={"passages": 3000, "passages_of_task_0": 1}
    )
    table = StageTable(tmp_path)
    table.add(CORPUS, corpus)
    assert (tmp_path / "report/stages.md").read_text().splitlines() == [
        "# Result of each stage",
        "",
        "| stage | result | seconds | files | bytes | fingerprint | folder | counts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| Get the text | made | 0.0 | 0 | 0 | cccccccccccc | {escaped(corpus.path)} | passages 3,000 |",
    ]
    (tmp_path / "report/stages.md").unlink()
    (tmp_path / "report/stages.md").mkdir()
    with caplog.at_level(logging.WARNING):
        assert table.add(TOKENIZER, corpus) is corpus
    assert "could not show the stages in the run's folder" in caplog.text
    assert [len(rows) for rows in shown] == [1, 2]


@pytest.mark.parametrize("folder", [None, Path("/models/t5")])
def test_a_publication_is_shown_with_its_folder_or_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path | None
) -> None:
    monkeypatch.setattr(run_page.Shown, "show", lambda *_: None)
    url = "s3://models/t5" if folder is None else str(folder)
    publication = Publication(path=folder or Path(), url=url, fingerprint="p" * 64, files={})
    with caplog.at_level(logging.INFO):
        StageTable(tmp_path).add(PUBLISH, publication)
    assert f"Publish: made {url}\n" in caplog.text
    assert f"| {escaped(url)} |" in (tmp_path / "report/stages.md").read_text()
