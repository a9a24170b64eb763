"""The command that runs every variant: its cases, its results, and how it continues after an interruption."""

import json
import sys
from pathlib import Path

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.spec.recipes import RECIPES, recipe
from tests.acceptance.result_table import ResultLines
from tests.acceptance.variants import measure_all
from tests.acceptance.variants.variant_cases import CASES, Case
from tests.acceptance.variants.variant_runs import with_mfu
from tests.acceptance.variants.variant_table import table
from tests.support.generated_text import write_jsonl


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case.recipe in RECIPES], ids=lambda case: case.name)
def test_a_case_is_a_valid_run(case: Case, tiny: bool) -> None:
    spec = recipe(case.recipe).with_settings(case.all_settings(tiny=tiny))
    assert spec.optimizer.num_steps > spec.optimizer.warmup_steps


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_line_cut_off_by_a_kill_is_ignored_and_the_next_one_is_intact(tmp_path: Path) -> None:
    results = ResultLines(tmp_path / "results.jsonl")
    results.append({"name": "a", "passed": True})
    with open(tmp_path / "results.jsonl", "ab") as file:
        file.write(b'{"name": "b", "pas')
    assert [row["name"] for row in results.rows()] == ["a"]
    results.append({"name": "c", "passed": True})
    assert [row["name"] for row in results.rows()] == ["a", "c"]


def test_the_table_shows_failed_cases_with_their_errors() -> None:
    ran = {"name": "zero2-4", "ranks": 4, "tiny": False, "tokens_per_second": 1502e3 * 1.5, "flops_per_second": 4e14}
    ran |= {"passed": True, "seconds": {"train": 9.6, "certify": 3.2}, "loss": [10.0, 5.0], "skipped_steps": 0}
    failed = {"name": "moe-4", "ranks": 4, "tiny": False, "passed": False, "seconds": {}, "error": "error: no | room"}
    lines = table([with_mfu(row, 1e15) for row in (ran, failed)]).splitlines()[2:]
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert all(part in lines[2] for part in ("10.0%", "1.50 of", "10 + 3", "10.00 → 5.00", "passed"))
    assert "FAILED error: no / room" in lines[3]


@pytest.mark.slow
def test_a_case_is_run_once_to_its_certificate_and_a_skipped_one_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_workers: None
) -> None:
    text = str(write_jsonl(tmp_path / "text.jsonl", 2000))
    spec = recipe("smoke").with_settings({"tokenizer.vocab_size": 300, "corpus.source": text})
    vocabulary = build_tokenizer(spec.tokenizer, spec.corpus, build_corpus(spec.corpus, tmp_path), tmp_path)
    options = ["--tiny", "--corpus", text, "--tokenizer", str(vocabulary.path), "--out", str(tmp_path / "out")]
    options += ["--only", "zero2-1", "t5_11b-1", "--until-seconds", "1000"]
    monkeypatch.setattr(sys, "argv", ["measure_all", *options])
    outputs = []
    for _ in range(2):
        measure_all.main()
        outputs.append(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["zero2-1"]
    assert rows[0]["passed"], rows[0]
    assert rows[0]["certificate"]["bit_equal"]
    assert rows[0]["loss"][1] < rows[0]["loss"][0]
    assert min(rows[0][f"{of}_memory_bytes"] for of in ("accelerator", "host", "machine")) > 0
    assert not list((tmp_path / "out" / "work" / "runs").iterdir())
    assert outputs[0].startswith("zero2-1: passed")
    assert "zero2-1: passed" not in outputs[1]
    assert all("not run: t5_11b-1: " in output for output in outputs)
