"""``score`` on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.inference.predict.predictions import PREDICTIONS, Prediction
from tests.support.documented_json import require_documented

QUICK = ("--resamples", "20")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A folder of predictions, and a worse file of the same rows."""
    rows = [
        Prediction(id=str(n), task=None, source="x", reference=each, hypothesis="yes", tokens=2, ended=True)
        for n, each in enumerate(["yes", "no"] * 5)
    ]
    folder, other = tmp_path / "predicted", tmp_path / "other.jsonl"
    folder.mkdir()
    (folder / PREDICTIONS).write_bytes(b"".join(row.line() for row in rows))
    other.write_bytes(b"".join(row.model_copy(update={"hypothesis": "a<b>"}).line() for row in rows))
    return str(folder), str(other)


def test_scores_classes_counts_and_signatures_are_printed(printed: Callable[..., str], files: tuple[str, str]) -> None:
    lines = printed("score", files[0], *QUICK).splitlines()
    assert lines[0] == "task\tmetric\tscore\tinterval of 95%"
    assert any(line.startswith("all rows\texact_match\t50.00\t") for line in lines)
    assert {"all rows\tno\t5\t0\t0.00", "all rows\tyes\t5\t10\t100.00"} < {*lines}
    assert "all rows: 10 rows; 0 hypotheses are empty, 0 cut before their end" in lines
    assert any(line.startswith("bleu: nrefs:1|bs:20|seed:12345|case:mixed|eff:no|tok:13a|") for line in lines)


def test_json_and_the_report_have_the_scores(
    printed: Callable[..., str], files: tuple[str, str], tmp_path: Path
) -> None:
    value = json.loads(printed("score", files[0], *QUICK, "--json", "--report", "scores.md"))
    require_documented("score", value)
    assert (value["resamples"], value["seed"]) == (20, 12345)
    (exact,) = (each for each in value["scores"] if each["metric"] == "exact_match")
    assert exact["score"] == 50
    report = (tmp_path / "scores.md").read_text("utf-8")
    assert "| all rows | exact_match | 50.00 |" in report
    assert "| all rows | yes | 5 | 10 | 100.00 |" in report


def test_two_files_are_compared(printed: Callable[..., str], files: tuple[str, str], tmp_path: Path) -> None:
    lines = printed("score", *files, *QUICK).splitlines()
    assert lines[0] == "task\tmetric\tfirst\tsecond\tdifference\tp"
    assert any(line.startswith("all rows\texact_match\t50.00\t0.00\t-50.00\t0.") for line in lines)
    value = json.loads(printed("score", *files, *QUICK, "--json", "--report", "scores.md"))
    require_documented("score PREDICTIONS OTHER", value)
    assert value["baseline"] == json.loads(printed("score", files[0], *QUICK, "--json"))
    report = (tmp_path / "scores.md").read_text("utf-8")
    assert "## Comparison" in report
    assert all(f"## `{file}`" in report for file in files)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("nowhere",), 4, "nowhere is not a file of predictions"),
        (("other.jsonl", "--report", "scores.txt"), 2, "--report is scores.txt, but its name must end in .md"),
        (("other.jsonl", "--report", "folder.md"), 4, "--report is folder.md, which is a folder. Give the name of a"),
        (("other.jsonl", "--report", "/proc/scores.md"), 5, "--report is /proc/scores.md, which cannot be written: No"),
        (("other.jsonl", "predicted", "--resamples", "0"), 2, "--resamples is '0'"),
        (("other.jsonl", "--resamples", "99999999999"), 2, "--resamples is '99999999999'"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(
    refused: Callable[..., str], files: tuple[str, str], options: tuple[str, ...], code: int, said: str
) -> None:
    Path("folder.md").mkdir()
    assert said in refused(code, "score", *options)


@pytest.mark.parametrize("package", ["sacrebleu", "rouge_score"])
def test_a_missing_package_is_named_with_its_extra_and_help_needs_none(
    run_without: Callable[..., Any], files: tuple[str, str], package: str
) -> None:
    refused = run_without(package, "score", files[0])
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert f"{package}" in refused.stderr
    assert "Install t5-pretrain[score]" in refused.stderr
    assert run_without("sacrebleu rouge_score nltk torch transformers prefect", "score", "--help").returncode == 0
