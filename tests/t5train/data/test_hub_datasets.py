"""Text of any dataset of the Hugging Face Hub by its name, streamed with ``datasets`` from a server like the Hub."""

import bz2
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from t5train.data.download import hub_commit, hub_text
from t5train.data.download.kept_downloads import read_note
from t5train.data.download.remote_reading import Backoff, is_interrupted, message_of
from t5train.data.sources import require_source
from t5train.errors import InputError
from t5train.spec.data_spec import HubText
from tests.support.hub_server import REPOSITORY, Hub, HubSite
from tests.support.hub_texts import build_all, build_one, command, environment, json_lines, vectors_file

CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train.*.json.gz
  - split: validation
    path: en/validation.*.json.gz
- config_name: de
  data_files:
  - split: train
    path: de/train.*.json.gz
---
"""
SHARDS, ROWS = 3, 700
HELD_OUT = [{"text": f"held out {row}", "body": None, "n": row, "none": None} for row in range(3)]
NAME = f"hf://{REPOSITORY}"
PART = f"{NAME} (configuration 'en')"
COLUMNS = "text (string), body (string), n (int64), none (null)"
EN = {"source": NAME, "config": "en", "workers": 1}


@cache
def shard(language: str, number: int) -> bytes:
    rows = [
        {"text": f"{language} {number} {row} " + "some words " * 20, "body": f"body {row}", "n": row, "none": None}
        for row in range(ROWS)
    ]
    return json_lines(*rows)


def files(words: str = "") -> dict[str, bytes]:
    shards = {
        f"{lang}/train.{number}.json.gz": shard(lang + words, number)
        for lang in ("en", "de")
        for number in range(SHARDS)
    }
    return {"README.md": CARD, **shards, "en/validation.0.json.gz": json_lines(*HELD_OUT)}


@pytest.fixture
def hub(hub_site: HubSite) -> Iterator[Hub]:
    with hub_site.serving(Hub(files())) as hub:
        yield hub


@pytest.fixture(autouse=True)
def _prepared(python_with_datasets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import ``datasets`` once for all processes, which takes longer than what they do."""
    monkeypatch.setattr(sys, "executable", python_with_datasets)


def kept(root: Path) -> dict[str, str]:
    """The digests of the text that was streamed under a root, by the names of the files."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in root.glob("cache/*/*.passages.zst")}


@pytest.mark.slow
def test_rows_of_a_split_are_streamed_once_to_the_same_bytes_for_any_number_of_workers(
    hub: Hub, tmp_path: Path
) -> None:
    made = build_one(hub, tmp_path / "a", EN)
    assert made["counts"]["passages"] == SHARDS * ROWS
    assert made["passages"][ROWS][:2] == [f"train-00001-of-{SHARDS:05d}:0", ""]
    assert made["passages"][ROWS][2].startswith("en 1 0 some words")
    assert [passage[2].split()[2] for passage in made["passages"]] == [str(row) for row in range(ROWS)] * SHARDS
    hub.requests.clear()
    assert build_one(hub, tmp_path / "a", EN) == made
    assert build_one(hub, tmp_path / "a", EN, offline="HF_HUB_OFFLINE") == made
    assert hub.requests == [], "what is complete is used without asking the Hub"
    assert build_one(hub, tmp_path / "b", EN | {"workers": 3}) == made
    assert kept(tmp_path / "a") == kept(tmp_path / "b")
    assert len(kept(tmp_path / "a")) == SHARDS


def test_configuration_split_and_column_are_chosen(hub: Hub, tmp_path: Path) -> None:
    texts = {"config": "de"}, {"column": "body"}, {"hub_split": "validation"}
    mixed = {"mixed_with": [f"{NAME}#config=en&split=validation", f"{NAME}#config=de"]}
    german, bodies, held_out, mixture = build_all(hub, tmp_path, *(EN | each for each in (*texts, mixed)))
    assert german["passages"][0][2].startswith("de 0 0 ")
    assert bodies["passages"][3][2] == "body 3"
    assert [text for _, _, text in held_out["passages"]] == [row["text"] for row in HELD_OUT]
    assert mixture["passages"][SHARDS * ROWS :] == held_out["passages"] + german["passages"]


@pytest.mark.slow
def test_the_commit_of_the_first_download_is_used_from_then_on(hub: Hub, tmp_path: Path) -> None:
    before = build_one(hub, tmp_path / "a", EN)
    first = hub.main
    hub.commit(files(" moved"))
    german, same, moved = build_all(hub, tmp_path / "a", EN | {"config": "de"}, EN, EN | {"revision": hub.main})
    assert german["passages"][0][2].startswith("de 0 0 "), "another part of the dataset comes from the same commit"
    assert same == before
    assert moved["passages"][0][2].startswith("en moved 0 0 ")
    new, old = build_all(hub, tmp_path / "b", EN, EN | {"revision": first})
    assert new == moved
    assert old == before


def test_a_killed_download_continues_with_the_missing_shards(hub: Hub, tmp_path: Path) -> None:
    whole = build_one(hub, tmp_path / "whole", EN)
    root, last = tmp_path / "killed", f"en/train.{SHARDS - 1}.json.gz"

    killed = threading.Event()

    def hold_back_the_last(path: str) -> int:
        if path == last:
            killed.wait()
        return 206

    hub.status = hold_back_the_last
    downloading = command(root, EN)
    with subprocess.Popen(downloading, env=environment(hub, root), start_new_session=True) as process:
        while len([path for path in root.glob("cache/*/*.passages.zst") if read_note(path)]) < SHARDS - 1:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    hub.status = lambda _: 206
    written = {path: path.stat().st_mtime_ns for path in root.glob("cache/*/*.passages.zst")}
    hub.downloads.clear()
    assert "does not allow downloading it" in build_one(hub, root, EN, offline="HF_HUB_OFFLINE")["error"]
    killed.set()  # only now, as the workers end a moment after the process that started them
    assert build_one(hub, root, EN) == whole
    assert kept(root) == kept(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert set(hub.downloads) == {"en/train.0.json.gz", last}, "the first is looked at, and the last is read"


def test_opening_a_dataset_is_tried_again_if_the_hub_is_busy(hub: Hub, tmp_path: Path) -> None:
    refused = list[str]()

    def is_busy(path: str) -> bool:
        """One request of the process that looks at the dataset, and one of the process that reads it."""
        is_card = path.endswith("README.md") and not refused
        is_commit = "/revision/" in path and len(refused) == 1 and bool(hub.downloads)
        refused.extend([path] if is_card or is_commit else [])
        return is_card or is_commit

    hub.is_busy = is_busy
    assert build_one(hub, tmp_path, EN)["counts"]["passages"] == SHARDS * ROWS
    assert len(refused) == 2, refused


def test_datasets_does_not_retry_itself(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = (
        "from t5train.data.download import hub_text; hub_text._package('someone/texts')\n"
        "import datasets, json; settings = vars(datasets.config)\n"
        "print(json.dumps({name: value for name, value in settings.items() if name.startswith('STREAMING_')}))"
    )
    settings = json.loads(run_python(code).stdout)
    assert len(settings) == 6
    assert settings == {name: 1 if name.endswith("_MAX_RETRIES") else 0 for name in settings}


@pytest.mark.parametrize("source", [NAME, f"hf://datasets/{REPOSITORY}/en/train.*.json.gz", "wiki_dpr"])
@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_without_a_root_a_text_of_the_hub_is_refused_at_once_if_the_hub_must_not_be_asked(
    source: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "1")
    monkeypatch.setattr(time, "sleep", pytest.fail)
    monkeypatch.setattr(Backoff, "_pause", pytest.fail)
    with pytest.raises(InputError, match=rf" is not on this machine, and {switch} does not allow downloading it"):
        require_source(source)


def test_a_damaged_shard_is_streamed_again_and_must_be_the_same_text(hub: Hub, tmp_path: Path) -> None:
    made = build_one(hub, tmp_path, EN)
    (place,) = tmp_path.glob("cache/*/train-00002-*.zst")
    content = place.read_bytes()
    place.write_bytes(bytes([*content[:-9], content[-9] ^ 1, *content[-8:]]))
    assert build_one(hub, tmp_path, EN) == made
    assert place.read_bytes() == content
    place.unlink()
    hub.files["en/train.2.json.gz"] = shard("other", 2)
    said = build_one(hub, tmp_path, EN)["error"]
    assert f"{NAME} gave another text for {place.name} than before, at the same commit {hub.main}" in said
    assert not place.exists()


def test_ids_and_titles_are_read_where_there_are_any_and_embeddings_are_not(hub_site: HubSite, tmp_path: Path) -> None:
    of_vectors = {f"data/train-{number:05d}-of-00002.parquet": vectors_file(900 * number, 900) for number in range(2)}
    with hub_site.serving(Hub(of_vectors)) as hub:
        made = build_one(hub, tmp_path, {"source": NAME})
    assert made["counts"]["passages"] == 1800
    assert made["passages"][1799] == ["1799", "Title 257", "words of passage 1799"]
    assert sum(path.stat().st_size for path in tmp_path.glob("cache/*/*.zst")) < 100_000


def test_every_type_of_text_in_parquet_is_streamed(hub_site: HubSite, tmp_path: Path) -> None:
    file, texts = io.BytesIO(), pyarrow.array(["one", "two", "one"])
    columns = {"text": texts.dictionary_encode(), "title": texts.cast(pyarrow.string_view())}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    with hub_site.serving(Hub({"train.parquet": file.getvalue()})) as hub:
        made = build_one(hub, tmp_path, {"source": NAME, "workers": 1})
    assert [passage[1:] for passage in made["passages"]] == [["one", "one"], ["two", "two"], ["one", "one"]]


def with_checksums(rows: int) -> bytes:
    file, table = io.BytesIO(), pyarrow.table({"text": [f"words of passage {row}" for row in range(rows)]})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, file, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content"), [("train.parquet", with_checksums(900)), ("train.json.gz", shard("en", 0))]
)
def test_a_flipped_bit_is_noticed_where_the_format_has_checksums(
    hub_site: HubSite, tmp_path: Path, name: str, content: bytes
) -> None:
    position = len(content) // 2
    with hub_site.serving(Hub({name: content})) as hub:
        hub.sent[name] = bytes([*content[:position], content[position] ^ 1, *content[position + 1 :]])
        said = build_one(hub, tmp_path, {"source": NAME, "workers": 1})["error"]
        assert re.search(rf"{NAME} cannot be read by datasets: .*(CRC|invalid|decompress)", said), said
        assert not kept(tmp_path)
        del hub.sent[name]
        assert "error" not in build_one(hub, tmp_path, {"source": NAME, "workers": 1})


@pytest.mark.parametrize(("suffix", "compress"), [("xz", lzma.compress), ("bz2", bz2.compress)])
def test_compressed_files_are_streamed_to_their_last_byte_or_refused(
    hub_site: HubSite, tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    parts = [compress(b"".join(b'{"text": "%d %d"}\n' % (part, row) for row in range(900))) for part in range(2)]
    name, padding = f"train.jsonl.{suffix}", b"\0" * 4
    with hub_site.serving(Hub({name: padding.join(parts)})) as hub:
        made = build_one(hub, tmp_path / "padded", {"source": NAME, "workers": 1})
        assert made["counts"]["passages"] == 1800
        hub.commit({name: parts[0] + b"XX" + parts[1][2:]})
        said = build_one(hub, tmp_path / "damaged", {"source": NAME, "workers": 1})["error"]
    assert f"{NAME} cannot be read by datasets: stream 2, which begins at byte {len(parts[0]):,}" in said
    assert not kept(tmp_path / "damaged")


def test_errors_say_what_there_is_to_choose_from_and_what_to_do(hub: Hub, tmp_path: Path) -> None:
    expected: list[tuple[dict[str, Any], str]] = [
        ({"config": None}, f"corpus.config is not set, but {NAME} has the configurations en, de. Set"),
        ({"config": "fr"}, f"corpus.config is 'fr', but {NAME} has the configurations en, de. Set"),
        ({"hub_split": "test"}, f"corpus.hub_split is 'test', but {PART} has the splits train, validation. Set"),
        ({"column": "texts"}, f"corpus.column is 'texts', but split 'train' of {PART} has the columns {COLUMNS}. Set"),
        ({"column": "n"}, f"holds int64 and not text: split 'train' of {PART} has the columns {COLUMNS}. Set"),
        ({"revision": "v9"}, f"corpus.revision is 'v9', but {NAME} has no such commit, tag or branch. See"),
        ({"source": "hf://no/one"}, "'hf://no/one': the Hugging Face Hub has no such dataset, or it is private. Check"),
    ]
    found = build_all(hub, tmp_path, *(EN | settings for settings, _ in expected))
    for made, (_, error) in zip(found, expected, strict=True):
        assert error in made["error"]
    assert not kept(tmp_path)
    hub.is_gated = True
    assert "is a gated dataset: its owner decides" in build_one(hub, tmp_path, EN | {"config": "de"})["error"]
    hub.is_gated = False
    hub.commit({f"{REPOSITORY.partition('/')[2]}.py": b"raise SystemExit"})
    scripted = build_one(hub, tmp_path / "script", {"source": NAME})["error"]
    assert "has a loading script, and code of datasets is never run. See" in scripted


def test_rows_without_text_or_id_are_read_and_rows_of_other_types_are_refused(
    hub_site: HubSite, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "text": "1"},
        {"id": "b", "text": None},
        *({"id": each, "text": "2"} for each in ("", " ", None)),
    ]
    with hub_site.serving(Hub({"train.jsonl.gz": json_lines(*rows)})) as hub:
        made = build_one(hub, tmp_path / "a", {"source": NAME})
        assert (made["counts"]["passages"], made["counts"]["empty_passages"]) == (4, 1)
        names = [name for name, _, _ in made["passages"]]
        assert names == ["a", *(f"train-00000-of-00001:{row}" for row in (2, 3, 4))], "by the place, without an id"
        hub.commit({"train-0.jsonl.gz": json_lines({"text": "one"}), "train-1.jsonl.gz": json_lines({"text": [2]})})
        said = build_one(hub, tmp_path / "b", {"source": NAME})["error"]
    assert "hf://someone/texts cannot be read by datasets: Couldn't cast array" in said
    assert "name its files by their path: corpus.source=hf://datasets/someone/texts/PATH" in said


def test_a_shard_whose_file_does_not_have_the_column_is_refused(hub_site: HubSite, tmp_path: Path) -> None:
    features = b"".join(b"  - name: %b\n    dtype: string\n" % name for name in (b"text", b"content"))
    card = b"---\ndataset_info:\n  features:\n" + features + b"---\n"
    with_text, without = json_lines({"text": "one"}), json_lines({"content": "two"}, {"content": "three"})
    with hub_site.serving(Hub({"README.md": card, "train-0.jsonl.gz": with_text, "train-1.jsonl.gz": without})) as hub:
        said = build_one(hub, tmp_path, {"source": NAME, "workers": 1})["error"]
    assert "shard train-00001-of-00002 of hf://someone/texts has 2 rows, but none has a value in column" in said
    assert "'text' (corpus.column): its file may not have this column. Set corpus.column" in said
    assert [*kept(tmp_path)] == ["train-00000-of-00002.passages.zst"]


def test_ids_that_are_numbers_of_any_type_are_read() -> None:
    for kind in ("int16", "int64", "uint32", "float32", "float64", "string"):
        assert hub_text._columns({"text": "string", "id": kind}, HubText(), "some dataset").id == "id"


def test_files_with_frames_of_another_size_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub_text.HubSource(REPOSITORY, "", HubText())
    before = source.cache(tmp_path)
    assert source.cache(tmp_path) == before
    monkeypatch.setattr(hub_text, "SEGMENT_BYTES", 2 * hub_text.SEGMENT_BYTES)
    assert source.cache(tmp_path) != before


def test_a_disk_that_is_too_small_for_the_remaining_shards_is_noticed_after_the_first(hub: Hub, tmp_path: Path) -> None:
    said = build_one(hub, tmp_path, EN, free_bytes=2000)["error"]
    assert "too little disk space for the text of 2 more shards" in said
    assert len(kept(tmp_path)) < SHARDS


def test_an_error_that_is_its_own_cause_is_not_transient() -> None:
    error, other = OSError("a page is damaged"), ValueError("a file is damaged")
    error.__cause__, other.__cause__ = other, error
    assert not is_interrupted(error)
    assert message_of(error) == "a file is damaged"
    error.__cause__, other.__cause__ = other, TimeoutError()
    assert is_interrupted(error)


def test_errors_of_datasets_are_shown_without_the_queries_of_urls() -> None:
    signed = "https://user:key@cdn.example/a/b.json.gz?Signature=(a'b)%2F&Key-Pair-Id=K1#part"
    said = f"Cannot read '{signed}' ({signed}): gzip://b.json::{signed} is damaged, see [{signed}]"
    shown = "https://cdn.example/a/b.json.gz"
    expected = f"Cannot read '{shown}' ({shown}): gzip://b.json::{shown} is damaged, see [{shown}]"
    with pytest.raises(InputError) as raised, hub_commit.explained_by_datasets(REPOSITORY, "main"):
        raise ValueError(said)
    assert f"{NAME} cannot be read by datasets: {expected}. See" in str(raised.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"^hf://someone/texts needs a package .*: pip install 'datasets>="):
        hub_text.open_rows(REPOSITORY, "main", HubText())
