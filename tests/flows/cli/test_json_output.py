"""``--json`` prints one JSON document on standard output and nothing else; errors stay on standard error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.data.corpus import build_corpus
from t5train.spec import CorpusSpec
from t5train.spec.recipes import RECIPES, recipe
from tests.support.documented_json import require_documented


@pytest.fixture
def document(printed: Callable[..., str]) -> Callable[..., Any]:
    """Return the JSON that a command prints."""
    return lambda *arguments: json.loads(printed(*arguments, "--json"))


def test_recipes(document: Callable[..., Any]) -> None:
    value = document("recipes")
    assert [each["name"] for each in value["recipes"]] == list(RECIPES)
    assert all(each["summary"] for each in value["recipes"])
    require_documented("recipes", value)


def test_verify(document: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    corpus = build_corpus(CorpusSpec(source=str(tmp_path / "text.txt")), tmp_path / "root")
    value = document("verify", str(corpus.path))
    assert (value["kind"], value["location"], value["fingerprint"]) == ("corpus", str(corpus.path), corpus.fingerprint)
    assert value["bytes"] == sum(digest.size for digest in corpus.files.values())
    require_documented("verify", value)


def test_gc(document: Callable[..., Any], tmp_path: Path) -> None:
    aside = tmp_path / "work/runs/mine/set-aside"
    left = tmp_path / "work/runs/mine/checkpoints/.step-00000004.discarded"
    for folder in (aside, left):
        folder.mkdir(parents=True)
        (folder / "state.pt").write_bytes(bytes(1000))
    value = document("gc")
    kept, garbage = sorted(value["found"], key=lambda each: not each["kept"])
    assert (kept["host"], kept["path"], kept["bytes"]) == ("this machine", "runs/mine/set-aside", 1000)
    assert garbage["path"] == "runs/mine/checkpoints/.step-00000004.discarded"
    assert value["removed"] == []
    require_documented("gc", value)
    freed = document("gc", "--free")
    assert freed["removed"] == [{"host": "this machine", "path": garbage["path"]}]
    require_documented("gc", freed)
    assert aside.exists()
    assert not left.exists()


def test_dry_run(document: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    value = document("run", "smoke", "--dry-run", "--hostfile", "hosts", "--name", "mine")
    spec = recipe("smoke")
    assert (value["recipe"], value["name"]) == ("smoke", "mine")
    assert value["fingerprints"]["run"] == spec.fingerprint()
    assert value["deepspeed_config"]["train_batch_size"] == spec.optimizer.global_batch_sequences
    assert value["memory_of_a_rank"][0]["host_bytes"] >= 0
    assert value["launch_command"][0]
    require_documented("run --dry-run", value)


def test_control_characters_are_escaped(document: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "work/runs/mi\x1bne/checkpoints/.step-00000004.discarded"
    folder.mkdir(parents=True)
    assert document("gc")["found"][0]["path"] == "runs/mi\x1bne/checkpoints/.step-00000004.discarded"
