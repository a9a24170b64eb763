"""Publish to, verify in, and read text from a real object store, through the S3 API."""

import gzip
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from t5train.data.corpus import build_corpus
from t5train.data.sources import require_source
from t5train.errors import DigestMismatch, InputError, PublicationError, RecordError, T5TrainError
from t5train.records.stage_records import Export, Publication
from t5train.release import publication
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify
from t5train.spec import CorpusSpec

pytestmark = pytest.mark.slow

MakeExport = Callable[..., Export]

# For every number n that it reads, publishes in a new child process, and kills the child after n requests.
KILLED = """
import os, signal, sys
from pathlib import Path
from s3fs import S3FileSystem
from t5train.release import publication
from t5train.release.publication import publish
from t5train.records.stage_records import Export

send = S3FileSystem._call_s3

async def send_or_die(*arguments, **settings):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return await send(*arguments, **settings)

S3FileSystem._call_s3 = send_or_die
for line in sys.stdin:
    left = int(line)
    if (child := os.fork()) == 0:
        publish(Export.load(Path(sys.argv[1])), f"{sys.argv[2]}-{left}")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def store(s3: Any) -> S3FileSystem:
    """The store, as another program sees it."""
    return S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture
def destination(s3: Any, request: pytest.FixtureRequest) -> str:
    """A destination that only this test uses."""
    return f"{s3.url}/{request.node.originalname}/t5"


def names(store: S3FileSystem, destination: str) -> set[str]:
    return {Path(path).name for path in store.find(destination)}


def test_a_publication_is_complete_verified_and_reused(
    make_export: MakeExport, destination: str, store: S3FileSystem
) -> None:
    exported = make_export()
    check_destination(destination)
    assert not names(store, destination)
    assert publish(exported, destination).url == destination
    assert names(store, destination) == {*exported.files, "manifest.json"}
    verified = verify(destination)
    assert isinstance(verified, Publication)
    assert verified.files == exported.files
    check_destination(destination, spec_fingerprint=exported.inputs["spec"])
    before = {path: entry["ETag"] for path, entry in store.find(destination, detail=True).items()}
    assert publish(exported, destination).reused
    assert {path: entry["ETag"] for path, entry in store.find(destination, detail=True).items()} == before


def test_any_change_of_an_object_is_detected_and_the_object_named(
    make_export: MakeExport, destination: str, store: S3FileSystem
) -> None:
    publish(make_export(), destination)
    for path in store.find(destination):
        content = store.cat_file(path)
        at = random.Random(path).randrange(len(content))
        for other in (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content[:-1], None):
            store.rm_file(path) if other is None else store.pipe_file(path, other)
            with pytest.raises((DigestMismatch, RecordError), match=Path(path).name):
                verify(destination)
        store.pipe_file(path, content)
    verify(destination)
    store.pipe_file(f"{destination}/pytorch_model.bin", b"run me")
    with pytest.raises(PublicationError, match=r"files that were not published: pytorch_model\.bin"):
        verify(destination)


def test_a_damaged_publication_is_refused_and_not_overwritten(
    make_export: MakeExport, destination: str, store: S3FileSystem
) -> None:
    exported = make_export()
    publish(exported, destination)
    store.pipe_file(f"{destination}/config.json", b"{}")
    with pytest.raises(PublicationError, match=r"damaged copy of this publication: .*config\.json"):
        publish(exported, destination)
    assert store.cat_file(f"{destination}/config.json") == b"{}"


@pytest.fixture
def publish_and_kill(make_export: MakeExport, destination: str) -> Iterator[Callable[[int], int]]:
    """Publishes to ``{destination}-{n}`` in a process that is killed after n requests; returns the exit code."""
    command = [sys.executable, "-c", KILLED, str(make_export().path), destination]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def publish_and_kill(requests: int) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{requests}\n")
            return int(process.stdout.readline())

        yield publish_and_kill


def test_an_interrupted_publication_is_not_accepted_and_can_be_completed(
    publish_and_kill: Callable[[int], int], tmp_path: Path, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, sent, send = Export.load(tmp_path / "run/export"), [], S3FileSystem._call_s3

    async def counted(self: S3FileSystem, method: str, *arguments: Any, **settings: Any) -> Any:
        sent.append((method, settings.get("Key", "")))
        return await send(self, method, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(S3FileSystem, "_call_s3", counted)
        publish(exported, destination)
    last = next(number for number, (method, key) in enumerate(sent) if method == "put_object" and "manifest" in key)
    for requests in [*random.Random(0).sample(range(last), 5), last]:
        assert publish_and_kill(requests) == -signal.SIGKILL
        with pytest.raises(RecordError, match=r"manifest\.json does not exist: no stage was finished"):
            verify(f"{destination}-{requests}")
        assert not publish(exported, f"{destination}-{requests}").reused
        verify(f"{destination}-{requests}")
    assert publish_and_kill(last + 1) == -signal.SIGKILL  # the manifest was written, so the publication is complete
    assert publish(exported, f"{destination}-{last + 1}").reused


def test_of_two_publishers_to_an_empty_destination_the_second_is_refused(
    make_export: MakeExport, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_export("v1.1").path.rename(tmp_path / "first")
    shutil.rmtree(tmp_path / "run")
    first, second = Export.load(tmp_path / "first"), make_export("v1.0")

    def overtaken(*arguments: Any) -> None:
        patch.undo()
        publish(first, destination)
        publication._create(*arguments)

    with monkeypatch.context() as patch:
        # ``_create`` writes the certificate, after the destination was found empty.
        patch.setattr(publication, "_create", overtaken)
        with pytest.raises(PublicationError, match=r"certificate\.json is not what was uploaded: another process"):
            publish(second, destination)
    assert verify(destination).inputs["export"] == first.fingerprint
    with pytest.raises(PublicationError, match="holds another publication"):
        publish(second, destination)


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


def test_a_missing_bucket_is_named(s3: Any, make_export: MakeExport) -> None:
    for attempt in (check_destination, lambda url: publish(make_export(), url)):
        with pytest.raises(PublicationError, match=r"s3://nowhere/t5 .*bucket does not exist"):
            attempt("s3://nowhere/t5")
    with pytest.raises(RecordError, match=r"s3://nowhere/t5/manifest\.json does not exist"):
        verify("s3://nowhere/t5")
    with pytest.raises(InputError, match=r"s3://nowhere/\*\.txt"):
        require_source("s3://nowhere/*.txt")


def test_no_secret_is_logged_or_stored(
    s3: Any, make_export: MakeExport, destination: str, store: S3FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        publish(make_export(), destination)
        verify(destination)
    stored = "".join(store.cat_file(path).decode("latin-1") for path in store.find(destination))
    assert "manifest.json" in caplog.text
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in caplog.text + stored
    assert s3.environment["AWS_ACCESS_KEY_ID"] not in stored


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
