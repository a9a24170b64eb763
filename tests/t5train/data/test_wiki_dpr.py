"""wiki_dpr from a server like the Hub: a text that has a name, but no digests until its first download."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from t5train.data.download.parquet_columns import fetch_columns, needed_columns
from t5train.data.formats.parquet import require_columns
from t5train.data.passages import SourceFile
from t5train.data.readers import rows
from t5train.spec.known_texts import known_indexes, known_texts, licence_of
from tests.support.hub_server import Hub, HubSite
from tests.support.hub_texts import build_all, build_one, vectors_file

WIKI = {"source": "wiki_dpr", "workers": 1}
FILES, ROWS = 3, 400
FOLDER = "data/psgs_w100/nq"
FACTS = {"wiki_dpr": {"num_files": FILES, "rows": FILES * ROWS}}
"""How the text of the tests differs from that of the catalogue."""


def files(words: str = "words") -> dict[str, bytes]:
    """As the Hub has them: only the first of many, whose names count 157. Ids are numbered from 1."""
    every = {f"{FOLDER}/train-{n:05d}-of-00157.parquet": vectors_file(1 + ROWS * n, ROWS, words) for n in range(FILES)}
    others = {"data/psgs_w100/multiset/train-00000-of-00157.parquet": b"other vectors", "README.md": b"---\n---\n"}
    return every | others


@pytest.fixture
def hub(hub_site: HubSite) -> Iterator[Hub]:
    with hub_site.serving(Hub(files(), repository="facebook/wiki_dpr")) as hub:
        yield hub


@pytest.fixture(autouse=True)
def _prepared(python_with_datasets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import ``datasets`` once for all processes, which takes longer than what they do."""
    monkeypatch.setattr(sys, "executable", python_with_datasets)


def downloaded(root: Path) -> list[Path]:
    return sorted(root.glob("cache/*/*.parquet"))


def build(hub: Hub, root: Path, **more: Any) -> dict[str, Any]:
    return build_one(hub, root, WIKI, **FACTS | more)


def test_the_texts_of_all_files_are_downloaded_without_their_vectors_and_used_offline(hub: Hub, tmp_path: Path) -> None:
    made = build(hub, tmp_path)
    assert made["counts"]["passages"] == FILES * ROWS
    assert made["passages"][ROWS] == [str(ROWS + 1), f"Title {(ROWS + 1) // 7}", f"words of passage {ROWS + 1}"]
    assert hub.bytes_sent < sum(map(len, hub.files.values())) / 10
    assert [pyarrow.parquet.read_schema(path).names for path in downloaded(tmp_path)] == [
        ["id", "text", "title"]
    ] * FILES
    hub.requests.clear()
    assert build(hub, tmp_path) == made
    assert build(hub, tmp_path, offline="HF_DATASETS_OFFLINE") == made
    assert hub.requests == [], "what has been verified is not asked for again"
    first = downloaded(tmp_path)[0]
    part = first.with_name(f".{first.name}.part")
    part.write_bytes(b"the beginning of the whole file")
    first.unlink()
    assert build(hub, tmp_path) == made
    assert not part.exists()


def test_the_first_downloads_commit_and_digests_are_enforced_afterwards(hub: Hub, tmp_path: Path) -> None:
    made, first = build(hub, tmp_path), hub.main
    hub.commit(files("moved"))
    last = downloaded(tmp_path)[-1]
    last.unlink()
    assert build(hub, tmp_path) == made, "the missing file comes from the same commit"
    assert build(hub, tmp_path / "new")["passages"][0][2] == "moved of passage 1"
    assert build_one(hub, tmp_path / "pinned", WIKI | {"revision": first}, **FACTS) == made
    last.unlink()
    whole = hub.commits[first][f"{FOLDER}/{last.name}"]
    hub.commits[first][f"{FOLDER}/{last.name}"] = bytes([*whole[:200], whole[200] ^ 1, *whole[201:]])
    said = build(hub, tmp_path)["error"]
    assert f"{last.name} has the sha256 " in said
    assert "another file under this name" in said


def test_a_flipped_bit_or_a_missing_file_in_a_download_is_found_and_the_file_is_fetched_again(
    hub: Hub, tmp_path: Path
) -> None:
    made, place = build(hub, tmp_path), downloaded(tmp_path)[1]
    content = place.read_bytes()
    place.write_bytes(bytes([*content[:200], content[200] ^ 1, *content[201:]]))
    assert "is missing or damaged" in build(hub, tmp_path, offline="HF_HUB_OFFLINE")["error"]
    hub.downloads.clear()
    assert build(hub, tmp_path) == made
    assert place.read_bytes() == content
    assert {Path(path).name for path in hub.downloads} == {place.name}
    (listing,) = tmp_path.glob("cache/*/.downloaded-files.json")
    listing.write_text(json.dumps({"files": json.loads(listing.read_text())["files"][:-1]}))
    assert "is 2 files, but should be 3" in build(hub, tmp_path, offline="HF_HUB_OFFLINE")["error"]
    assert build(hub, tmp_path) == made


def test_a_text_with_missing_files_other_rows_ids_or_columns_is_refused(hub: Hub, tmp_path: Path) -> None:
    name = f"{FOLDER}/train-00001-of-00157.parquet"

    def said(root: str, wrong: bytes | None, **facts: Any) -> str:
        others = {path: content for path, content in files().items() if path != name}
        hub.commit(others if wrong is None else others | {name: wrong})
        return str(build(hub, tmp_path / root, wiki_dpr=FACTS["wiki_dpr"] | facts)["error"])

    assert "is 2 files, but should be 3" in said("missing", None)
    assert f"has {3 * ROWS:,} rows, but should have {ROWS:,}" in said("rows", files()[name], rows=ROWS)
    assert f"row 0: the id is {2 * ROWS}, but should be {ROWS + 1}" in said("ids", vectors_file(2 * ROWS, ROWS))
    types = {"id": "int64", "text": "string", "title": "string"}
    assert "should have id (int64), text (string), title (string)" in said("types", files()[name], columns=types)


def test_the_catalogue_says_what_is_known_of_wiki_dpr_and_no_more() -> None:
    known = known_texts()["wiki_dpr"]
    assert known.location.startswith("hf://datasets/facebook/wiki_dpr/data/psgs_w100/nq/train-")
    assert (known.revision, known.files) == ("", {}), "its commit and digests are recorded at the first download"
    assert (known.rows, known.num_files, known.vectors) == (21_015_300, 157, ("embeddings", 768))
    for index in known_indexes("wiki_dpr").values():
        assert (index.vectors, index.dimension, index.recall) == (known.rows, 768, {})
    assert licence_of(["wiki_dpr"], None) == "cc-by-nc-4.0"


def test_files_by_their_url_and_the_named_text_are_downloaded_apart(hub: Hub, tmp_path: Path) -> None:
    by_url = {"source": known_texts()["wiki_dpr"].location, "workers": 1}

    def first(text: dict[str, Any], offline: str = "") -> str:
        made = build_one(hub, tmp_path, text, offline=offline, **FACTS)
        return str(made["error"] if "error" in made else made["passages"][0][2])

    assert first(by_url) == "words of passage 1"
    assert "is not on this machine, and HF_HUB_OFFLINE does not allow" in first(WIKI, "HF_HUB_OFFLINE")
    hub.commit(files("moved"))
    assert first(WIKI) == "moved of passage 1", "without a recorded commit, downloads by URL are not used"
    hub.commit(files("again"))
    assert first(by_url) == "again of passage 1"
    assert first(WIKI) == first(WIKI, "HF_HUB_OFFLINE") == "moved of passage 1"
    assert first(by_url, "HF_HUB_OFFLINE") == "again of passage 1"


def test_the_text_is_the_same_whether_vectors_were_transferred_or_not(hub: Hub, tmp_path: Path) -> None:
    for name, content in hub.files.items():
        if name.startswith(FOLDER):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    by_url = {"source": known_texts()["wiki_dpr"].location, "workers": 1}
    of_hub, of_files = build_all(hub, tmp_path / "root", by_url, {"source": f"{tmp_path}/{FOLDER}", "workers": 1})
    assert of_hub == of_files
    assert hub.bytes_sent < sum(map(len, hub.files.values())) / 10


def test_a_named_text_and_a_dataset_by_its_name_share_the_commit(hub: Hub, tmp_path: Path) -> None:
    card = b"---\nconfigs:\n- config_name: nq\n  data_files: data/psgs_w100/nq/*.parquet\n---\n"
    build(hub, tmp_path)
    hub.files["README.md"] = card
    hub.commit(files("moved") | {"README.md": card})
    (made,) = build_all(hub, tmp_path, {"source": "hf://facebook/wiki_dpr", "workers": 1})
    assert made["passages"][0][2] == "words of passage 1"


@pytest.mark.parametrize(
    "kind", [pyarrow.string_view(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_columns_are_fetched_of_every_type_of_text_and_compared_with_their_checksums(
    tmp_path: Path, kind: pyarrow.DataType
) -> None:
    texts = pyarrow.array([f"passage {row}" for row in range(600)])
    table = pyarrow.table({"text": texts.cast(kind), "embeddings": [[1.0 / (row + 1)] * 16 for row in range(600)]})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, tmp_path / "whole.parquet", row_group_size=200, **options)
    content = (tmp_path / "whole.parquet").read_bytes()
    place = tmp_path / "text.parquet"

    def fetch(stored: bytes) -> None:
        columns = needed_columns(lambda start, end: stored[start:end], len(stored), ["id", "text", "title"])
        assert columns is not None
        fetch_columns(lambda start, end: stored[start:end], len(stored), columns, place)

    fetch(content)
    assert [row.passage.text for row in rows(SourceFile(place, place.name))] == texts.to_pylist()
    with pytest.raises(OSError, match="CRC"):
        fetch(content.replace(b"passage 300", b"passafe 300"))


@pytest.mark.parametrize("fault", ["several files", "two id columns"])
def test_columns_are_not_fetched_of_a_file_that_is_refused_as_a_whole(tmp_path: Path, fault: str) -> None:
    path, names = tmp_path / "whole.parquet", ["id", "text", "embeddings"] + ["id"] * (fault == "two id columns")
    columns = {"id": ["1"] * 600, "text": ["passage"] * 600, "embeddings": [[1 / (row + 1)] * 16 for row in range(600)]}
    pyarrow.parquet.write_table(pyarrow.table([columns[name] for name in names], names=names), path)
    stored = path.read_bytes() * (2 if fault == "several files" else 1)
    assert needed_columns(lambda start, end: stored[start:end], len(stored), ["id", "text", "title"]) is None


@pytest.mark.parametrize("kind", [pyarrow.string_view(), pyarrow.large_string()])
def test_a_known_text_may_have_every_type_of_text(tmp_path: Path, kind: pyarrow.DataType) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": pyarrow.array(["1"], kind)}), path)
    require_columns(SourceFile(path, path.name), {"id": "string"})
