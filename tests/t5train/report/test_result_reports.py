"""The proof, the publication's report and the summary have what a person needs to check them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from t5train.records.digests import FileDigest
from t5train.records.metrics import Values
from t5train.records.stage_records import Corpus, Export, Publication, Weights
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.release.publication import publish
from t5train.report.result_reports import (
    best_lines,
    data_wait_line,
    earlier_lines,
    predicting_lines,
    proof_report,
    publication_report,
    saving_line,
    summary_report,
)
from t5train.spec.recipes import recipe


@pytest.mark.parametrize("version", ["v1.0", "v1.1", "lora"])
def test_the_proof_has_the_counts_comparisons_and_digests_of_the_certificate(
    make_export: Callable[..., Export], version: str
) -> None:
    exported = make_export(version)
    path = exported.path / CERTIFICATE
    certificate = Certificate.parse(path.read_bytes(), str(path))
    weights = Weights(
        path=exported.path,
        fingerprint="f" * 64,
        files={},
        counts={"tensors": 7, "parameters": 1234, "bytes": 4936, "step": certificate.step},
    )
    report = proof_report(certificate, weights, exported)
    assert f"| {certificate.tensors_compared:,} tensors, {certificate.elements_compared:,} parameters |" in report
    assert ("| the start model plus the product of the exported adapter | equal |" in report) is (version == "lora")
    assert "7 tensors with 1,234 parameters (4,936 bytes in fp32)" in report
    assert all(f"logits on probe {name}" in report for name in certificate.probes)
    assert report.count("| equal bits |") == len(certificate.probes) > 0
    for name, digest in {**certificate.files, **certificate.witness}.items():
        assert f"| `{name}` | `{digest.sha256}` |" in report
    assert exported.files[CERTIFICATE].sha256 in report
    assert certificate.generation is not None
    tokens = f"{certificate.generation.tokens_compared:,} tokens in all"
    left_out = report.partition("## What was not compared")[2].partition("##")[0]
    assert all(each in left_out for each in ("control tokens", "unknown characters", tokens))


@pytest.mark.parametrize(
    ("scheme", "fetches"),
    [("s3", """t5-pretrain fetch 's3://bucket/it'"'"'s' mine"""), ("gs", """url_to_fs("gs://bucket/it's")""")],
)
def test_a_publication_in_a_store_is_fetched_before_it_is_loaded(tmp_path: Path, scheme: str, fetches: str) -> None:
    files = {"model.safetensors": FileDigest(size=12_345, sha256="a" * 64)}
    published = Publication(path=tmp_path, fingerprint="d" * 64, files=files, url=f"{scheme}://bucket/it's").sealed()
    report = publication_report(published, "mine")
    assert f"\n```\n{scheme}://bucket/it's\n```\n" in report
    assert f"""t5-pretrain verify '{scheme}://bucket/it'"'"'s'""" in report
    assert fetches in report
    assert "from_pretrained('mine')" in report
    assert "| bytes | 12,345 |" in report


@pytest.mark.slow
def test_the_code_that_loads_a_publication_works_as_shown(make_export: Callable[..., Export], tmp_path: Path) -> None:
    report = publication_report(publish(make_export(), str(tmp_path / "published")), "mine")
    (code,) = (block.partition("```")[0] for block in report.split("```python\n")[1:])
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True)


def test_the_location_of_a_publication_is_shown_as_it_is(tmp_path: Path) -> None:
    url = "s3://models/_t5_`x`"
    published = Publication(path=tmp_path, fingerprint="d" * 64, files={}, url=url).sealed()
    report = publication_report(published, "mine")
    assert "\npublished: s3://models/\\_t5\\_\\`x\\`\n" in report
    assert f"\nt5-pretrain verify '{url}'\n" in report
    assert f"\nt5-pretrain fetch '{url}' mine\n" in report


def test_the_summary_has_the_step_and_the_value_that_were_chosen() -> None:
    settings = {"evaluate": {"best_metric": "validation_chrf"}, "optimizer": {"num_steps": 60}}
    witness = Mock(step=40, validation={"validation_chrf": 32.5}, trained=Mock(settings=settings))
    assert best_lines(witness) == [
        "chosen: the model at step 40, the best by validation_chrf of a run of up to 60 steps: 32.5000"
    ]
    witness.validation["validation_chrf"] = 0.0
    assert "0.0000. All were 0, so the first one counted: train longer, or set another" in best_lines(witness)[0]
    settings["evaluate"] = {}
    assert best_lines(witness) == []


def test_saving_and_waiting_for_data_are_shares_of_the_time_without_validation() -> None:
    steps: list[Values] = [{"step": step, "seconds": 0.5, "data_wait_seconds": 0.001} for step in range(1, 197)]
    validation: list[Values] = [{"step": 100, "validation_loss": 2.0, "seconds": None}]
    saves: list[Values] = [{"step": 100, "save_seconds": 0.75}, {"step": 196, "save_seconds": 1.25}]
    lines = steps + validation + saves
    assert saving_line(lines) == "2 checkpoints, which paused training for 2.0 s: 2.00% of its time"
    assert saving_line(validation).endswith("0.0 s: 0.00% of its time")
    generated: list[Values] = [{"step": 100, "predict_seconds": 2.0}]
    shown = "1 prediction of held-out pairs, which paused training for 2.0 s: 2.00% of its time"
    assert predicting_lines(steps + generated) == [shown]
    assert predicting_lines(steps) == []
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
    assert "Recipe `smoke`, 400 steps." in text
    patient = spec.with_settings({"evaluate.best_metric": "validation_loss", "evaluate.patience": 2})
    assert "Recipe `smoke`, up to 400 steps." in summary_report(patient, stages, published, [], "training.png", {})
    assert "![Training and validation loss](training.png)" in text
    assert "[Data](data.md)" in text
    rows = [line for line in text.splitlines() if line.startswith(("| Get", "| Publish"))]
    assert rows == [
        f"| Get the text | - | `cccccccccccc` | `{corpus.seal[:12]}` | passages 3,000 | `{tmp_path / 'corpus'}` |",
        f"| Publish | corpus cccccccccccc | `dddddddddddd` | `{published.seal[:12]}` |  | `s3://bucket/t5` |",
    ]


def test_a_validation_loss_that_was_much_lower_at_another_step_is_named_with_its_step() -> None:
    lines = [{"step": 1, "loss": 1.0}] + [
        {"step": step, "validation_loss": loss} for step, loss in ((10, 0.9), (20, 0.5), (30, 2.0))
    ]
    (line,) = earlier_lines({"validation_loss": 2.0, "unigram_loss": 3.0}, lines)
    assert line.startswith(
        "The validation loss was lower at another step: 0.5000 after step 20, and 2.0000 of the published model."
    )
    for published in ({"validation_loss": 0.5, "unigram_loss": 3.0}, {"validation_loss": 2.0}):
        assert earlier_lines(published, lines) == [], "the best is published, or the run is on text"
    assert earlier_lines({"validation_loss": 2.0, "unigram_loss": 3.0}, []) == []
