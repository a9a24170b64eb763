"""Pairs of datasets of the Hugging Face Hub: the data files of a split, as they are stored at one commit."""

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.hub_server import REPOSITORY, Hub, HubSite
from tests.support.hub_texts import environment

NAME = f"hf://{REPOSITORY}"
COLUMNS = "source=translation.en&target=translation.ro&prefix=to Romanian: &task=en-ro"
CARD = b"""---
configs:
- config_name: ro-en
  data_files:
  - split: train
    path: ro-en/train-*.parquet
  - split: validation
    path: ro-en/validation.parquet
- config_name: de-en
  data_files:
  - split: train
    path: de-en/train.json.gz
---
"""
BUILD = """
import json, sys
from pathlib import Path

from t5train.data.pairs.pairs import build_pairs, read_pairs
from t5train.errors import T5TrainError
from t5train.spec import build

for settings in map(json.loads, sys.argv[2:]):
    try:
        pairs = build_pairs(build({"recipe": "smoke", "pairs": settings}).pairs, Path(sys.argv[1]))
    except T5TrainError as error:
        print(json.dumps({"error": str(error)}))
        continue
    found = {split: list(read_pairs(pairs, split, 0)) for split in ("train", "validation", "test")}
    print(json.dumps({"fingerprint": pairs.fingerprint, "reused": pairs.reused, **found}))
"""


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"translation": {"en": f"word {at}", "ro": f"vorba {at}"}} for at in range(first, first + count)]


def parquet(first: int, count: int) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(first, count)), file)
    return file.getvalue()


def lines(count: int) -> bytes:
    return gzip.compress(
        b"".join(json.dumps({"source": f"{at}", "target": "x"}).encode() + b"\n" for at in range(count))
    )


def files(first: int = 0) -> dict[str, bytes]:
    shards = {f"ro-en/train-{at}.parquet": parquet(first + 100 * at, 100) for at in range(2)}
    return {
        "README.md": CARD,
        **shards,
        "ro-en/validation.parquet": parquet(1000, 5),
        "de-en/train.json.gz": lines(300),
    }


@pytest.fixture
def hub(hub_site: HubSite) -> Iterator[Hub]:
    with hub_site.serving(Hub(files())) as hub:
        yield hub


@pytest.fixture(autouse=True)
def _prepared(python_with_datasets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import ``datasets`` once for all processes, which takes longer than what they do."""
    monkeypatch.setattr(sys, "executable", python_with_datasets)


def build_all(hub: Hub, root: Path, *pairs: dict[str, Any], **switches: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", BUILD, str(root), *map(json.dumps, pairs)]
    variables = environment(hub, root, **switches)
    made = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def test_the_files_of_a_split_are_read_at_one_commit_and_without_the_hub_once_they_are_here(
    hub: Hub, tmp_path: Path
) -> None:
    settings = {"train": f"{NAME}#config=ro-en&{COLUMNS}", "validation": f"{NAME}#config=ro-en"}
    (made,) = build_all(hub, tmp_path, settings)
    assert "error" not in made, made
    trained = [*made["train"], *made["test"]]
    assert sorted(trained) == sorted([f"to Romanian: word {at}", f"vorba {at}"] for at in range(200))
    assert made["validation"] == [[f"to Romanian: word {at}", f"vorba {at}"] for at in range(1000, 1005)]
    first = hub.main
    hub.commit(files(5000))
    hub.requests.clear()
    (offline,) = build_all(hub, tmp_path, settings, HF_HUB_OFFLINE="1")
    assert offline == made | {"reused": True}
    assert hub.requests == []
    pinned = settings | {"train": f"{settings['train']}&revision={first}"}
    moved, same = build_all(hub, tmp_path / "other", settings, pinned)
    assert moved["fingerprint"] != made["fingerprint"] == same["fingerprint"]


def test_what_the_dataset_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    wrong = [
        f"{NAME}#config=de-en",
        f"{NAME}#config=fr-en",
        f"{NAME}#config=ro-en&split=tset",
        f"{NAME}#config=ro-en",
        NAME,
    ]
    flat, *refused = build_all(hub, tmp_path, *({"train": each} for each in wrong))
    assert len(flat["train"]) > 250, "JSON lines, also by the name of .json"
    found = [each["error"] for each in refused]
    assert "#config= is 'fr-en', but" in found[0]
    assert "#split= is 'tset', but" in found[1]
    assert "has the splits train, validation" in found[1]
    assert "has no column 'source', only translation.en, translation.ro" in found[2]
    assert "#config= is not set" in found[3]
