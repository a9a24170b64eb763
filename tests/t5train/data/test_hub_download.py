"""Text of a dataset of the Hugging Face Hub, read from a server that behaves like the Hub."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from t5train.data.corpus import build_corpus
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec
from tests.support.hub_server import REPOSITORY, Hub, serving_hub

BUILD = """
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.errors import InputError
from t5train.spec import CorpusSpec

try:
    print(build_corpus(CorpusSpec(source=sys.argv[1], workers=1), Path(sys.argv[2])).counts["passages"])
except InputError as error:
    print(error)
"""


def parquet(text: str) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{text} {number}" for number in range(400)]}), file)
    return file.getvalue()


def with_embeddings(text: str) -> bytes:
    """A file as in wiki_dpr, most of which is embeddings."""
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    embeddings = pyarrow.array(list(rng.standard_normal((400, 768)).astype("float32")))
    texts = [f"{text} {number}" for number in range(400)]
    columns = {"id": list(map(str, range(400))), "text": texts, "title": texts, "embeddings": embeddings}
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=150)
    return file.getvalue()


def build(hub: Hub, root: Path, **more: str) -> str:
    """What the corpus stage says in a process of its own, because the Hub's client reads its settings on import."""
    command = [sys.executable, "-c", BUILD, f"hf://datasets/{REPOSITORY}@main/data/train-*.parquet", str(root)]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_files_of_a_dataset_are_downloaded_compared_with_the_hubs_digests_and_used_offline(tmp_path: Path) -> None:
    files = {f"data/train-{number:05d}.parquet": parquet(f"text {number}") for number in range(3)}
    first = next(iter(files))
    with serving_hub(Hub(files)) as hub:
        hub.sent[first] = bytes([*files[first][:-200], files[first][-200] ^ 1, *files[first][-199:]])
        said = build(hub, tmp_path)
        assert f"{first} was downloaded twice, and both times its sha256 was not" in said
        hub.sent.clear()
        hub.downloads.clear()
        assert build(hub, tmp_path) == "1200\n"
        assert set(hub.downloads) == set(files)
        hub.downloads.clear()
        assert build(hub, tmp_path) == "1200\n"
        assert not hub.downloads
    assert build(hub, tmp_path, HF_HUB_OFFLINE="1") == "1200\n"
    assert "does not allow downloading it" in build(hub, tmp_path / "other", HF_HUB_OFFLINE="1")


def test_of_files_that_are_mostly_embeddings_only_the_text_is_downloaded(tmp_path: Path) -> None:
    files = {f"data/train-{number:05d}.parquet": with_embeddings(f"text {number}") for number in range(3)}
    with serving_hub(Hub(files)) as hub:
        assert build(hub, tmp_path) == "1200\n"
        assert hub.bytes_sent < sum(map(len, files.values())) / 10
        hub.downloads.clear()
        assert build(hub, tmp_path) == "1200\n"
        assert not hub.downloads
    (made,) = (tmp_path / "corpus").iterdir()
    whole = tmp_path / "whole"
    whole.mkdir()
    for name, content in files.items():
        (whole / Path(name).name).write_bytes(content)
    same = build_corpus(CorpusSpec(source=str(whole), workers=1), tmp_path, out=tmp_path / "same")
    assert Corpus.load(made).fingerprint == same.fingerprint, "the text is the same, however it was transferred"
    for path in (tmp_path / "cache").rglob("*.parquet"):
        read = pyarrow.parquet.read_table(path)
        assert read == pyarrow.parquet.read_table(io.BytesIO(files[f"data/{path.name}"])).select(read.column_names)
        assert read.column_names == ["id", "text", "title"]
    assert build(hub, tmp_path, HF_HUB_OFFLINE="1") == "1200\n"
