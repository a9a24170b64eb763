"""``data`` shows a text as the model sees it, and ``train`` uses the token shards that it makes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli import stage_commands
from flows.cli.options import chosen
from flows.cli.stage_commands import _spec_on
from t5train.errors import SpecError
from t5train.records.stage_records import TokenShards
from tests.support.generated_text import write_jsonl

pytestmark = pytest.mark.usefixtures("quick_workers")
NO_SPLITS = '{"fingerprint": "", "source": [], "splits": {}, "files": {}}'


def test_the_data_commands_show_samples_and_statistics_of_a_users_text(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    options = ("smoke", "--corpus", str(text), "--root", str(tmp_path / "root"), "--set", "tokenizer.vocab_size=300")
    assert t5_pretrain("data", "show", *options, "--split", "validation", "--count", "2") == 0
    shown = capsys.readouterr().out.splitlines()
    of_a_sample = ["sample N of the validation split", "inputs (64 tokens)", "targets (14 tokens)", ""]
    assert [re.sub(r"^sample \d+", "sample N", line.split(":")[0]) for line in shown] == of_a_sample * 2
    assert " <extra_id_0> " in shown[1]
    assert t5_pretrain("data", "stats", *options, "--plot", str(tmp_path / "plot.png")) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split("\t")[:3] == ["split", "passages", "tokens"]
    assert [row.split("\t")[0] for row in rows[1:4]] == ["train", "validation", "test"]
    assert sum(int(row.split("\t")[1]) for row in rows[1:4]) == 300
    assert rows[-1] == f"plot: {tmp_path / 'plot.png'}"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert t5_pretrain("data", "show", "smoke", "--corpus", str(tmp_path / "no.txt")) == 4
    assert "does not exist" in capsys.readouterr().err


def test_a_dry_run_knows_the_epochs_exactly_from_token_shards_of_its_settings(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    made = ("smoke", "--corpus", str(text), "--set", "tokenizer.vocab_size=300", "--root", str(root))
    assert t5_pretrain("run", *made, "--dry-run") == 0
    said = capsys.readouterr().out
    assert re.search(r"\nepochs +about [\d.]+ over the train split, if a token is [2-5]\.\d bytes", said)
    assert t5_pretrain("data", "stats", *made) == 0
    (exact,) = re.findall(r"The run makes ([\d.]+) epochs", capsys.readouterr().out)
    (shards,) = (root / "shards").iterdir()
    said = f"{exact} over the train split, if the text has not changed since the token shards in {shards} were made\n"
    assert t5_pretrain("run", *made, "--dry-run") == 0
    assert said in capsys.readouterr().out
    for changed in (
        "corpus.split_seed=3",
        "shards.shard_tokens=123456",
        "tokenizer.vocab_size=310",
        "tokenizer.character_coverage=0.99",
    ):
        assert t5_pretrain("run", *made, "--dry-run", "--set", changed) == 0
        assert "\nepochs   about" in capsys.readouterr().out, changed
    (shards / "manifest.json").write_text("{}")
    assert t5_pretrain("run", *made, "--dry-run") == 0
    assert "\nepochs   about" in capsys.readouterr().out, "damaged shards are made again"


@pytest.mark.parametrize("content", [None, "{}", NO_SPLITS, "folder"])
def test_a_dry_run_ignores_token_shards_with_a_missing_or_damaged_description(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    made = ("smoke", "--corpus", str(text), "--set", "tokenizer.vocab_size=300", "--root", str(root))
    assert t5_pretrain("data", "stats", *made) == 0
    (description,) = root.glob("shards/*/shard-00000.json")
    description.unlink()
    if content == "folder":
        description.mkdir()
    elif content is not None:
        description.write_text(content)
    capsys.readouterr()
    assert t5_pretrain("run", *made, "--dry-run") == 0
    assert "\nepochs   about" in capsys.readouterr().out


def test_a_dry_run_ignores_a_folder_of_token_shards_that_cannot_be_read(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, folder = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root/shards/other"
    folder.mkdir(parents=True)
    (folder / "manifest.json").symlink_to("manifest.json")
    options = ("--corpus", str(text), "--root", str(tmp_path / "root"), "--set", "tokenizer.vocab_size=300")
    assert t5_pretrain("run", "smoke", *options, "--dry-run") == 0
    assert "\nepochs   about" in capsys.readouterr().out


def test_a_dry_run_ignores_token_shards_of_another_vocabulary_of_the_same_size(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    other = write_jsonl(tmp_path / "other.jsonl", 200)
    small = ("--set", "tokenizer.vocab_size=300")
    assert t5_pretrain("data", "stats", "smoke", "--corpus", str(text), *small, "--root", str(root)) == 0
    assert t5_pretrain("data", "stats", "smoke", "--corpus", str(other), *small, "--root", str(tmp_path / "other")) == 0
    capsys.readouterr()
    for folder, said in ((root, "since the token shards in"), (tmp_path / "other", "about")):
        (given,) = folder.glob("tokenizer/*/spiece.model")
        options = ("--corpus", str(text), "--root", str(root), "--set", f"tokenizer.path={given}")
        assert t5_pretrain("run", "smoke", *options, "--dry-run") == 0
        (epochs,) = re.findall(r"\nepochs (.*)", capsys.readouterr().out)
        assert said in epochs


@pytest.mark.parametrize("name", ["lengths.xyz", "lengths.pdf", "lengths"])
def test_a_plot_that_would_not_be_named_as_the_png_it_is_is_refused_before_any_work(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    assert t5_pretrain("data", "stats", "smoke", "--corpus", str(text), "--root", "root", "--plot", name) == 2
    assert (
        capsys.readouterr().err
        == f"error: --plot is {name}, but a plot is always a PNG. Give a name that ends in .png\n"
    )
    assert not (tmp_path / "root").exists()


def test_a_run_on_token_shards_is_one_on_the_text_that_they_were_made_of(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    made = ("smoke", "--corpus", str(text), "--set", "tokenizer.vocab_size=300", "--set", "corpus.split_seed=3")
    assert t5_pretrain("data", "show", *made, "--root", str(root)) == 0
    (shards,) = (root / "shards").iterdir()
    spec = _spec_on(TokenShards.load(shards), chosen("smoke", None, {}))
    assert (spec.corpus.source, spec.corpus.split_seed) == (str(text), 3)
    for setting in ("corpus.source=pydocs", f"corpus.source={tmp_path / 'other.txt'}", "corpus.split_seed=4"):
        assert t5_pretrain("train", "smoke", "--root", str(root), "--set", setting) == 2
        assert f"but the token shards in {shards} were made with" in capsys.readouterr().err
    config = tmp_path / "run.yaml"
    config.write_text("recipe: smoke\ncorpus:\n  split_seed: 0\n")  # the recipe's own value
    assert t5_pretrain("train", "--config", str(config), "--root", str(root)) == 2
    assert "corpus.split_seed is 0, but the token shards in" in capsys.readouterr().err
    moved = chosen("smoke", None, {"corpus.source": str(tmp_path / "moved" / "text.jsonl"), "corpus.revision": "2"})
    assert _spec_on(TokenShards.load(shards), moved).corpus.source == str(tmp_path / "moved" / "text.jsonl")
    record = json.loads((shards / "manifest.json").read_bytes())
    del record["files"]["settings.json"]  # as an earlier version wrote it
    TokenShards.model_validate(record).commit()
    assert t5_pretrain("train", "smoke", "--root", str(root)) == 2
    assert "add --set corpus.source=TEXT" in capsys.readouterr().err
    assert not (root / "runs").exists()


def test_train_finds_the_token_shards_that_tokenize_has_made_at_the_same_root(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    small = ("--set", "tokenizer.vocab_size=300", "--root", str(root))
    assert t5_pretrain("tokenizer", "smoke", "--set", f"corpus.source={text}", *small) == 0
    (vocabulary,) = root.glob("tokenizer/*/spiece.model")
    made = ("--corpus", str(text), "--tokenizer", str(vocabulary), "--out", str(tmp_path / "out"))
    assert t5_pretrain("tokenize", *made) == 0
    other_text = ("--set", f"corpus.source={tmp_path / 'other.txt'}")
    assert t5_pretrain("train", "smoke", "--root", str(tmp_path / "out"), *other_text) == 2
    assert f"but the token shards in {tmp_path / 'out/shards'} were made with" in capsys.readouterr().err


def test_a_run_on_token_shards_of_a_mixture_takes_its_texts_from_them_and_rates_from_its_user(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, two = (str(write_jsonl(tmp_path / f"{number}.jsonl", 300, number)) for number in (1, 2))
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    made = ("smoke", "--corpus", one, "--set", "tokenizer.vocab_size=300")
    assert t5_pretrain("data", "show", *made, "--root", str(alone)) == 0
    assert t5_pretrain("data", "show", *made, "--set", f"corpus.mixed_with={two}", "--root", str(mixed)) == 0
    (of_mixture,) = (mixed / "shards").iterdir()
    spec = _spec_on(TokenShards.load(of_mixture), chosen("smoke", None, {"objective.mixing_weights": "1,3"}))
    assert (spec.corpus.mixed_with, spec.objective.mixing_weights) == ((two,), (1, 3))
    moved = chosen("smoke", None, {"corpus.mixed_with": "elsewhere/2.jsonl"})
    assert _spec_on(TokenShards.load(of_mixture), moved).corpus.mixed_with == ("elsewhere/2.jsonl",)
    for root, choice in ((alone, f"corpus.mixed_with={two}"), (mixed, "corpus.mixed_with=[]")):
        assert t5_pretrain("train", "smoke", "--root", str(root), "--set", choice) == 2
        assert "corpus.mixed_with is" in capsys.readouterr().err
    assert t5_pretrain("train", "smoke", "--root", str(alone), "--set", "objective.mixing_weights=1,3") == 2
    assert "objective.mixing_weights is set, but there is one text" in capsys.readouterr().err


def test_a_run_on_token_shards_without_listed_passages_needs_the_list_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: Any = SimpleNamespace(path=tmp_path)  # its settings are given below
    monkeypatch.setattr(stage_commands, "settings_of", lambda _: {"corpus.source": "a", "corpus.remove_listed": True})
    with pytest.raises(SpecError, match=r"add --set corpus.remove_listed=FILE"):
        _spec_on(shards, chosen("smoke", None, {}))
    named = chosen("smoke", None, {"corpus.remove_listed": "pairs.jsonl"})
    assert _spec_on(shards, named).corpus.remove_listed == "pairs.jsonl"
    monkeypatch.setattr(stage_commands, "settings_of", lambda _: {"corpus.source": "a"})
    with pytest.raises(SpecError, match=r"corpus.remove_listed is 'pairs.jsonl', but the token shards in"):
        _spec_on(shards, named)
