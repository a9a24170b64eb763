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
from tests.support.documented_json import require_documented
from tests.support.generated_text import write_copies, write_jsonl

pytestmark = pytest.mark.usefixtures("quick_workers")
Printed = Callable[..., str]
Refused = Callable[..., str]
SMALL = ("--set", "tokenizer.vocab_size=300")


def test_the_data_commands_show_samples_and_statistics_of_a_users_text(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    options = ("smoke", "--corpus", str(text), "--root", str(tmp_path / "root"), *SMALL)
    shown = printed("data", "show", *options, "--split", "validation", "--count", "2").splitlines()
    of_a_sample = ["sample N of the validation split", "inputs (64 tokens)", "targets (14 tokens)", ""]
    assert [re.sub(r"^sample \d+", "sample N", line.split(":")[0]) for line in shown] == of_a_sample * 2
    assert " <extra_id_0> " in shown[1]
    rows = printed("data", "stats", *options, "--plot", str(tmp_path / "plot.png")).splitlines()
    assert rows[0].split("\t")[:3] == ["split", "passages", "tokens"]
    assert [row.split("\t")[0] for row in rows[1:4]] == ["train", "validation", "test"]
    assert sum(int(row.split("\t")[1]) for row in rows[1:4]) == 300
    assert rows[-1] == f"plot: {tmp_path / 'plot.png'}"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "does not exist" in refused(4, "data", "show", "smoke", "--corpus", str(tmp_path / "no.txt"))


def test_a_dry_run_knows_the_epochs_exactly_only_from_sound_token_shards_of_its_settings(
    printed: Printed, tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    made = ("smoke", "--corpus", str(text), *SMALL, "--root", str(root))

    def epochs(*options: str) -> str:
        (found,) = re.findall(r"\nepochs +(.*)", printed("run", *made, "--dry-run", *options))
        return str(found)

    estimate = r"about [\d.]+ over the train split, if a token is [2-5]\.\d bytes"
    assert re.match(estimate, epochs())
    (exact,) = re.findall(r"The run makes ([\d.]+) epochs", printed("data", "stats", *made))
    (shards,) = (root / "shards").iterdir()
    unreadable = root / "shards/other/manifest.json"
    unreadable.parent.mkdir()
    unreadable.symlink_to(unreadable.name)
    unchanged = "if the text has not changed since the token shards in"
    assert epochs() == f"{exact} over the train split, {unchanged} {shards} were made"
    for changed in (
        "corpus.split_seed=3",
        "shards.shard_tokens=123456",
        "tokenizer.vocab_size=310",
        "tokenizer.character_coverage=0.99",
    ):
        assert epochs("--set", changed).startswith("about"), changed
    description = shards / "shard-00000.json"
    for content in ("{}", '{"fingerprint": "", "source": [], "splits": {}, "files": {}}'):
        description.write_text(content)
        assert epochs().startswith("about"), "a damaged description is made again"
    description.unlink()
    assert epochs().startswith("about"), "so is a missing one"
    description.mkdir()
    assert epochs().startswith("about")
    (shards / "manifest.json").write_text("{}")
    assert epochs().startswith("about"), "damaged shards are made again"


def test_a_dry_run_ignores_token_shards_of_another_vocabulary_of_the_same_size(
    printed: Printed, tmp_path: Path
) -> None:
    text, root = str(write_jsonl(tmp_path / "text.jsonl", 300)), tmp_path / "root"
    other = str(write_jsonl(tmp_path / "other.jsonl", 200))
    printed("data", "stats", "smoke", "--corpus", text, *SMALL, "--root", str(root))
    printed("data", "stats", "smoke", "--corpus", other, *SMALL, "--root", str(tmp_path / "other"))
    for folder, said in ((root, "since the token shards in"), (tmp_path / "other", "about")):
        (given,) = folder.glob("tokenizer/*/spiece.model")
        options = ("--corpus", text, "--root", str(root), "--set", f"tokenizer.path={given}")
        (epochs,) = re.findall(r"\nepochs (.*)", printed("run", "smoke", *options, "--dry-run"))
        assert said in epochs


@pytest.mark.parametrize("name", ["lengths.pdf", "lengths"])
def test_a_plot_that_would_not_be_named_as_the_png_it_is_is_refused_before_any_work(
    refused: Refused, tmp_path: Path, name: str
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    said = refused(2, "data", "stats", "smoke", "--corpus", str(text), "--root", "root", "--plot", name)
    assert said == f"error: --plot is {name}, but its name must end in .png. Give such a name\n"
    assert not (tmp_path / "root").exists()


def test_a_run_on_token_shards_is_one_on_the_text_that_they_were_made_of(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    text, root = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root"
    here = ("--root", str(root))
    printed("data", "show", "smoke", "--corpus", str(text), *SMALL, "--set", "corpus.split_seed=3", *here)
    (shards,) = (root / "shards").iterdir()
    spec = _spec_on(TokenShards.load(shards), chosen("smoke", None, {}))
    assert (spec.corpus.source, spec.corpus.split_seed) == (str(text), 3)
    for setting in ("corpus.source=pydocs", f"corpus.source={tmp_path / 'other.txt'}", "corpus.split_seed=4"):
        said = refused(2, "train", "smoke", *here, "--set", setting)
        assert f"but the token shards in {shards} were made with" in said
    config = tmp_path / "run.yaml"
    config.write_text("recipe: smoke\ncorpus:\n  split_seed: 0\n")  # the recipe's own value
    said = refused(2, "train", "--config", str(config), *here)
    assert "corpus.split_seed is 0, but the token shards in" in said
    moved = chosen("smoke", None, {"corpus.source": str(tmp_path / "moved" / "text.jsonl"), "corpus.revision": "2"})
    assert _spec_on(TokenShards.load(shards), moved).corpus.source == str(tmp_path / "moved" / "text.jsonl")
    record = json.loads((shards / "manifest.json").read_bytes())
    del record["files"]["settings.json"]  # as an earlier version wrote it
    TokenShards.model_validate(record).commit()
    assert "add --set corpus.source=TEXT" in refused(2, "train", "smoke", *here)
    assert not (root / "runs").exists()


def test_train_finds_the_token_shards_that_tokenize_has_made_at_the_same_root(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    text, root, out = write_jsonl(tmp_path / "text.jsonl", 300), tmp_path / "root", tmp_path / "out"
    printed("tokenizer", "smoke", "--set", f"corpus.source={text}", *SMALL, "--root", str(root))
    (vocabulary,) = root.glob("tokenizer/*/spiece.model")
    printed("tokenize", "--corpus", str(text), "--tokenizer", str(vocabulary), "--out", str(out))
    said = refused(2, "train", "smoke", "--root", str(out), "--set", f"corpus.source={tmp_path / 'other.txt'}")
    assert f"but the token shards in {out / 'shards'} were made with" in said


def test_a_run_on_token_shards_of_a_mixture_takes_its_texts_from_them_and_rates_from_its_user(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    one, two = (str(write_jsonl(tmp_path / f"{number}.jsonl", 300, number)) for number in (1, 2))
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    made = ("smoke", "--corpus", one, *SMALL)
    printed("data", "show", *made, "--root", str(alone))
    printed("data", "show", *made, "--set", f"corpus.mixed_with={two}", "--root", str(mixed))
    (of_mixture,) = (mixed / "shards").iterdir()
    spec = _spec_on(TokenShards.load(of_mixture), chosen("smoke", None, {"objective.mixing_weights": "1,3"}))
    assert (spec.corpus.mixed_with, spec.objective.mixing_weights) == ((two,), (1, 3))
    moved = chosen("smoke", None, {"corpus.mixed_with": "elsewhere/2.jsonl"})
    assert _spec_on(TokenShards.load(of_mixture), moved).corpus.mixed_with == ("elsewhere/2.jsonl",)
    for root, setting, said in (
        (alone, f"corpus.mixed_with={two}", "corpus.mixed_with is"),
        (mixed, "corpus.mixed_with=[]", "corpus.mixed_with is"),
        (alone, "objective.mixing_weights=1,3", "objective.mixing_weights is set, but there is one text"),
    ):
        assert said in refused(2, "train", "smoke", "--root", str(root), "--set", setting)


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


def test_a_check_finds_copies_and_shared_text_without_removing_them(
    printed: Printed, refused: Refused, tmp_path: Path
) -> None:
    text = write_copies(tmp_path / "text.jsonl")
    options = ("smoke", "--corpus", str(text), "--set", "corpus.split=[700,200,100]", "--root", str(tmp_path / "root"))
    shown = printed("data", "check", *options, "--plot", str(tmp_path / "plot.png"))
    assert "400 passages and 0 empty ones" in shown
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in shown.splitlines() if "\t" in row}
    assert rows["copies of an earlier passage of the split"][3] == "0"
    copies, across = (
        [int(number) for number in rows[name]]
        for name in ("copies of an earlier passage of the split", "copies between training and held-out text")
    )
    assert copies[0] > 30
    assert across[0] == across[1] + across[2] > 10
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "root").glob("checks/*/.compared"))
    value = json.loads(printed("data", "check", *options, "--test-set", str(text), "--json"))
    require_documented("data check", value)
    found = value["repetitions"]
    assert found["test_sets_passages"] == 400
    assert found["train_duplicates_across"] == found["train_passages"], "all of it is in the test set"
    absent = refused(4, "data", "check", *options, "--test-set", str(tmp_path / "absent.txt"))
    assert "corpus.test_sets" in absent
