"""Read text from a real object store through the S3 API, and report its errors."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from t5train.data.corpus import build_corpus
from t5train.data.sources import require_source
from t5train.errors import InputError, StoreError, T5TrainError
from t5train.records.stage_records import Export
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify
from t5train.spec import CorpusSpec

pytestmark = pytest.mark.slow

MakeExport = Callable[..., Export]


@pytest.fixture
def store(s3: Any) -> S3FileSystem:
    """The store, as another program sees it."""
    return S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


@pytest.mark.parametrize(
    ("setting", "value", "named_setting"),
    [
        ("AWS_SECRET_ACCESS_KEY", "mistyped", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "nobody", "AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", None, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_credentials_are_reported_without_their_values(
    destination: str, monkeypatch: pytest.MonkeyPatch, setting: str, value: str | None, named_setting: str
) -> None:
    monkeypatch.delenv(setting) if value is None else monkeypatch.setenv(setting, value)
    S3FileSystem.clear_instance_cache()
    attempts: list[Callable[[], object]] = [
        lambda: check_destination(destination),
        lambda: verify(destination),
        lambda: require_source(f"{destination}/*.txt"),
    ]
    for attempt in attempts:
        with pytest.raises(T5TrainError, match=named_setting) as caught:
            attempt()
        assert destination in str(caught.value)
        assert str(value) not in str(caught.value)


def test_a_missing_bucket_is_named(s3: Any, make_random_export: MakeExport) -> None:
    for attempt in (check_destination, verify, lambda url: publish(make_random_export(), url)):
        with pytest.raises(StoreError, match=r"s3://nowhere/t5\S* cannot be read: the bucket does not exist"):
            attempt("s3://nowhere/t5")
    with pytest.raises(InputError, match=r"s3://nowhere/\*\.txt"):
        require_source("s3://nowhere/*.txt")


def test_text_files_of_a_pattern_are_downloaded_again_only_when_they_change(
    s3: Any, destination: str, store: S3FileSystem, tmp_path: Path
) -> None:
    for part in range(3):
        lines = [json.dumps({"id": f"{part}-{row}", "text": f"text {row} of part {part}"}) for row in range(40)]
        store.pipe_file(f"{destination}/part-{part}.jsonl.gz", gzip.compress("\n".join(lines).encode(), mtime=0))
    store.pipe_file(f"{destination}/notes.md", b"not of the pattern")
    spec = CorpusSpec(source=f"{destination}/part-*.jsonl.gz", workers=1)
    seen: set[str] = set()
    first = build_corpus(spec, tmp_path, lambda what, *_: seen.add(what))
    assert first.counts["passages"] == 120
    assert "bytes downloaded, 2 of 3 files complete" in seen
    again: set[str] = set()
    assert build_corpus(spec, tmp_path, lambda what, *_: again.add(what)).reused
    assert not any("downloaded" in what for what in again)
    content = gzip.compress(b'{"text": "other"}\n', mtime=0)
    store.pipe_file(f"{destination}/part-1.jsonl.gz", content)
    assert build_corpus(spec, tmp_path).counts["passages"] == 81
    store.pipe_file(f"{destination}/part-1.jsonl.gz", content[:-4])
    with pytest.raises(InputError, match=r"part-1\.jsonl\.gz cannot be read to its end"):
        build_corpus(spec, tmp_path)
