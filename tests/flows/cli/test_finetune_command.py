"""``finetune`` is ``run`` for pairs: what it shows, and what it refuses with the command to use instead."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.pairs_plan import start_said
from t5train.model.model_shape import resolve
from t5train.spec.recipes import recipe
from tests.support.mt5_vocabulary import write_mt5_vocabulary

Printed = Callable[..., str]
Refused = Callable[..., str]
PAIRS = '{"translation": {"en": "a house", "de": "ein Haus"}}\n'


@pytest.fixture
def wmt(tmp_path: Path) -> str:
    (tmp_path / "wmt.jsonl").write_text(PAIRS * 40_000)
    return f"{tmp_path / 'wmt.jsonl'}#source=translation.en&target=translation.de&prefix=English to German: &task=en-de"


def test_a_dry_run_shows_tasks_splits_rows_and_where_the_weights_come_from(printed: Printed, wmt: str) -> None:
    options = ("--train", wmt, "--train", "sort_digits", "--set", "pairs.test=" + json.dumps([wmt, "sort_digits"]))
    shown = printed("finetune", "reverse_and_sort", *options, "--dry-run")
    rows = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    assert rows["pairs"].strip().startswith("2 tasks: en-de from ")
    assert "(prefix 'English to German: '), sort_digits (prefix 'sort: '); 2 files, 4.2 MB" in rows["pairs"]
    assert "train 97% of the sources, validation 3% of the sources, test " in rows["splits"]
    assert "drawn at random, as model.start_from is not set" in rows["model"]
    assert "8 rows of 128 input and 64 target tokens, each packed with pairs of one task" in rows["a step"]


def test_a_dry_run_says_which_hosts_evaluate_and_what_is_predicted_to_choose_the_result(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    chosen = ("--set", "evaluate.best_metric=validation_chrf", "--set", "storage.validate_every_steps=50")
    options = ("finetune", "reverse_and_sort", "--dry-run", "--ship-code", *chosen, "--set")
    shown = printed(*options, f"evaluate.hostfile={tmp_path}/hosts")
    assert f"after the export, on 2 hosts of {tmp_path}/hosts" in shown
    assert "the checkpoint with the best validation_chrf: at most 100 pairs are predicted every 50 steps" in shown
    assert "none: No such file or directory" in refused(2, *options, f"evaluate.hostfile={tmp_path}/none")


def test_a_model_of_the_hub_that_is_here_is_used_without_asking_and_named_with_its_commit(
    printed: Printed, wmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 2}
    config = {"model_type": "mt5", "vocab_size": 512, "feed_forward_proj": "gated-gelu", **sizes}
    copy = tmp_path / "starts/someone--t5@abc"
    write_mt5_vocabulary(copy)
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "remote-start.json").write_text('{"start": "hf://someone/t5", "revision": "abc"}')
    start = ("--root", str(tmp_path), "--set", "model.start_from=hf://someone/t5@abc")
    options = ("--set", "model.version=v1.1", "--train", wmt, *start)
    rows = printed("finetune", "reverse_and_sort", *options, "--dry-run")
    assert "parameters, from hf://someone/t5@abc" in rows
    shown = printed("finetune", "reverse_and_sort", *options, "--dry-run", "--json")
    spec = json.loads(shown)["spec"]
    assert (spec["model"]["start_from"], spec["tokenizer"]["path"]) == (str(copy), str(copy))
    lines = [json.dumps({"source": f"number {at}", "target": "the time"}) for at in range(200)]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    assert "unknown pieces" in printed("data", "pairs", str(tmp_path / "few.jsonl"), *start)


def test_a_dry_run_says_that_adapters_are_trained_in_place_of_the_weights() -> None:
    lora = {"model.start_from": "/models/t5", "optimizer.kind": "adamw", "finetune.lora.rank": 4}
    spec = recipe("reverse_and_sort").with_settings(lora)
    of_q_and_v = (2 + 2 * 2) * 2 * 4 * (64 + 64)
    assert start_said(spec, resolve(spec.model, 32)) == (
        f", from /models/t5 and frozen; {of_q_and_v:,} more, of adapters, are trained"
    )


def test_the_file_that_init_prints_fine_tunes(printed: Printed, tmp_path: Path) -> None:
    text = printed("init", "finetune_base")
    assert "t5-pretrain finetune --config run.yaml" in text
    assert "# train: " in text, "the recipe for GPUs names no pairs"
    (tmp_path / "run.yaml").write_text(printed("init", "reverse_and_sort"))
    shown = printed("finetune", "--config", str(tmp_path / "run.yaml"), "--dry-run", "--json")
    assert json.loads(shown)["fingerprints"]["run"] == recipe("reverse_and_sort").fingerprint()


def test_the_unchanged_file_of_a_recipe_for_gpus_is_refused_until_it_names_pairs(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(printed("init", "finetune_base"))
    command = ("finetune", "--config", str(tmp_path / "run.yaml"), "--set", "cluster.accelerator=cpu")
    assert "recipe 'finetune_base' needs pairs to train on: name a file with --train" in refused(2, *command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run reverse_and_sort", "trains on pairs: use `t5-pretrain finetune reverse_and_sort`"),
        ("finetune smoke", "trains on text: use `t5-pretrain run smoke`"),
        ("finetune reverse_and_sort --set objective.input_tokens=64", "set pairs.input_tokens"),
        ("run smoke --set pairs.split_seed=1", "'smoke' trains on text, where it has no effect: set corpus.split_seed"),
        ("finetune reverse_and_sort --set layout.pipeline_stages=2", "set layout.pipeline_stages=1"),
        ("train reverse_and_sort", "this command is for text: use `t5-pretrain finetune reverse_and_sort`"),
        ("data stats reverse_and_sort", "this command is for text: use `t5-pretrain data pairs FILE`"),
        ("data pairs --recipe smoke", "trains on text"),
    ],
)
def test_the_other_kind_of_recipe_or_setting_is_refused_with_a_remedy(
    refused: Refused, command: str, said: str
) -> None:
    assert said in refused(2, *command.split())


def test_a_column_that_is_missing_is_refused_before_anything_is_made(
    refused: Refused, wmt: str, tmp_path: Path
) -> None:
    named = wmt.replace("translation.de", "translation.fr")
    for more in ((), ("--dry-run",)):  # which then shows no plan
        error = refused(4, "finetune", "reverse_and_sort", "--train", named, "--root", str(tmp_path / "root"), *more)
        assert "line 1 has no column 'translation.fr', only translation.en, translation.de" in error
    assert not (tmp_path / "root").exists()


@pytest.mark.usefixtures("quick_workers")
def test_the_report_on_pairs_uses_the_chosen_vocabulary(printed: Printed, wmt: str, tmp_path: Path) -> None:
    root = ("--root", str(tmp_path / "root"))
    trained = ("--set", "tokenizer.vocab_size=31", "--set", "tokenizer.character_coverage=1.0")
    report = printed("data", "pairs", "reverse_digits", "sort_digits", *trained, *root)
    assert "| reverse_digits | `reverse: ...` |" in report
    assert "Tokens are those of a vocabulary of 31 pieces that was trained on these pairs." in report
    (made,) = (tmp_path / "root" / "tokenizer").iterdir()
    report = printed("data", "pairs", "sort_digits", "--tokenizer", str(made), *root)
    assert "sort_digits: 0 unknown pieces" in report
    assert "was trained on these pairs" not in report


@pytest.mark.usefixtures("quick_workers")
def test_pairs_too_few_for_the_vocabulary_of_a_recipe_are_reported_with_a_smaller_one(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    pairs = "".join(f"the cat number {number}\tdie Katze Nummer {number}\n" for number in range(60))
    (tmp_path / "a.tsv").write_text(f"source\ttarget\n{pairs}")
    command = ("data", "pairs", str(tmp_path / "a.tsv"), "--root", str(tmp_path / "root"))
    assert re.search(r"Tokens are those of a vocabulary of \d\d pieces that was trained on these", printed(*command))
    assert "this corpus gives at most" in refused(2, *command, "--set", "tokenizer.vocab_size=32000")
