"""The summary of a run: how long saving checkpoints paused training, and the lineage."""

from pathlib import Path

from t5train.records.metrics import Values
from t5train.records.stage_records import Corpus, Publication
from t5train.report.summary_report import data_wait_line, saving_line, summary_report
from t5train.spec.recipes import recipe


def test_saving_and_waiting_for_data_are_shares_of_the_time_without_validation() -> None:
    steps: list[Values] = [{"step": step, "seconds": 0.5, "data_wait_seconds": 0.001} for step in range(1, 197)]
    validation: list[Values] = [{"step": 100, "validation_loss": 2.0, "seconds": None}]
    saves: list[Values] = [{"step": 100, "save_seconds": 0.75}, {"step": 196, "save_seconds": 1.25}]
    lines = steps + validation + saves
    assert saving_line(lines) == "2 checkpoints, which paused training for 2.0 s: 2.00% of its time"
    assert saving_line(validation).endswith("0.0 s: 0.00% of its time")
    assert data_wait_line(lines) == "waiting for data: 0.2 s, 0.20% of the time of all steps"
    assert data_wait_line([]) == "waiting for data: 0.0 s, 0.00% of the time of all steps"


def test_the_lineage_leads_from_the_text_to_the_publication(tmp_path: Path) -> None:
    corpus = Corpus(path=tmp_path / "corpus", fingerprint="c" * 64, files={}, counts={"passages": 3000}).commit(
        tmp_path
    )
    published = Publication(
        path=tmp_path, fingerprint="d" * 64, files={}, url="s3://bucket/t5", inputs={"corpus": "c" * 64}
    ).sealed()
    spec = recipe("smoke").with_settings({"name": "mine"})
    stages = {"Get the text": corpus, "Publish": published}
    text = summary_report(spec, stages, published, ["5.1 nats"], "training.png", {"Data": "data.md"})
    assert text.startswith("# mine\n")
    assert "- 5.1 nats\n" in text
    assert "![Training and validation loss](training.png)" in text
    assert "[Data](data.md)" in text
    rows = [line for line in text.splitlines() if line.startswith(("| Get", "| Publish"))]
    assert rows == [
        f"| Get the text | - | `cccccccccccc` | `{corpus.seal[:12]}` | passages 3,000 | `{tmp_path / 'corpus'}` |",
        f"| Publish | corpus cccccccccccc | `dddddddddddd` | `{published.seal[:12]}` |  | `s3://bucket/t5` |",
    ]
