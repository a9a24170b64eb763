"""Builds corpora from a local Hub in processes of their own, as runs do: its clients keep what they have asked for."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from tests.support.hub_server import Hub

BUILD = """
import json, sys
from pathlib import Path

from t5train import host_resources
from t5train.data.corpus import build_corpus
from t5train.data.segments import passages_in, read_segments
from t5train.errors import T5TrainError
from t5train.spec import CorpusSpec, known_texts

changes = json.loads(sys.argv[2])
if (free := changes.pop("free_bytes", None)) is not None:
    host_resources.free_space_bytes = lambda _: free
for name, facts in changes.items():
    known_texts._KNOWN[name] = known_texts._KNOWN[name].model_copy(update=facts)
for settings in map(json.loads, sys.argv[3:]):
    try:
        corpus = build_corpus(CorpusSpec.model_validate(settings), Path(sys.argv[1]))
    except T5TrainError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        continue
    files = read_segments(corpus.path)
    passages = [*passages_in((file.source, each) for file in files for each in file.segments)]
    print(json.dumps({"fingerprint": corpus.fingerprint, "counts": corpus.counts, "passages": passages}))
"""
Settings = dict[str, Any]


def command(root: Path, *texts: Settings, **changes: Any) -> list[str]:
    """What builds corpora under a root. ``changes`` are to the catalogue, or ``free_bytes`` of the disk."""
    return [sys.executable, "-c", BUILD, str(root), json.dumps(changes), *map(json.dumps, texts)]


def environment(hub: Hub, root: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": f"{root}-hf-home", **more}


def build_all(hub: Hub, root: Path, *texts: Settings, offline: str = "", **changes: Any) -> list[dict[str, Any]]:
    """Build corpora one after the other. For each: its fingerprint, counts and passages, or the error."""
    switches = {offline: "1"} if offline else {}
    made = subprocess.run(
        command(root, *texts, **changes),
        env=environment(hub, root, **switches),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def build_one(hub: Hub, root: Path, text: Settings, *, offline: str = "", **changes: Any) -> dict[str, Any]:
    (made,) = build_all(hub, root, text, offline=offline, **changes)
    return made


def json_lines(*rows: Settings) -> bytes:
    return gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows), mtime=0)


def vectors_file(first_id: int, rows: int, words: str = "words") -> bytes:
    """A .parquet file as in wiki_dpr, most of which is embeddings."""
    file = io.BytesIO()
    embeddings = pyarrow.array(list(np.random.default_rng(0).standard_normal((rows, 768)).astype("float32")))
    numbers = range(first_id, first_id + rows)
    columns = {
        "id": list(map(str, numbers)),
        "text": [f"{words} of passage {number}" for number in numbers],
        "title": [f"Title {number // 7}" for number in numbers],
        "embeddings": embeddings,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=150)
    return file.getvalue()
