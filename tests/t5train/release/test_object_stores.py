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
def place(s3: Any, request: pytest.FixtureRequest) -> str:
    """A destination that only this test uses."""
    return f"{s3.url}/{request.node.originalname}/t5"


def names(store: S3FileSystem, place: str) -> set[str]:
    return {Path(path).name for path in store.find(place)}


def test_a_publication_is_whole_verified_and_reused(make_export: MakeExport, place: str, store: S3FileSystem) -> None:
    exported = make_export()
    check_destination(place)
    assert not names(store, place)
    assert publish(exported, place).url == place
    assert names(store, place) == {*exported.files, "manifest.json"}
    verified = verify(place)
    assert isinstance(verified, Publication)
    assert verified.files == exported.files
    check_destination(place, spec_fingerprint=exported.inputs["spec"])
    before = {path: entry["ETag"] for path, entry in store.find(place, detail=True).items()}
    assert publish(exported, place).reused
    assert {path: entry["ETag"] for path, entry in store.find(place, detail=True).items()} == before


def test_what_was_done_to_an_object_is_found_and_the_object_named(
    make_export: MakeExport, place: str, store: S3FileSystem
) -> None:
    publish(make_export(), place)
    for path in store.find(place):
        content = store.cat_file(path)
        at = random.Random(path).randrange(len(content))
        for other in (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content[:-1], None):
            store.rm_file(path) if other is None else store.pipe_file(path, other)
            with pytest.raises((DigestMismatch, RecordError), match=Path(path).name):
                verify(place)
        store.pipe_file(path, content)
    verify(place)
    store.pipe_file(f"{place}/pytorch_model.bin", b"run me")
    with pytest.raises(PublicationError, match=r"pytorch_model\.bin, which was not published"):
        verify(place)


def test_a_damaged_publication_is_left_for_the_user(make_export: MakeExport, place: str, store: S3FileSystem) -> None:
    exported = make_export()
    publish(exported, place)
    store.pipe_file(f"{place}/config.json", b"{}")
    with pytest.raises(PublicationError, match=r"damaged copy of this publication: .*config\.json"):
        publish(exported, place)
    assert store.cat_file(f"{place}/config.json") == b"{}"


@pytest.fixture
def kill(make_export: MakeExport, place: str) -> Iterator[Callable[[int], int]]:
    """Publishes to ``{place}-{n}`` in a process that is killed after n requests; returns the exit code."""
    command = [sys.executable, "-c", KILLED, str(make_export().path), place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def kill(requests: int) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{requests}\n")
            return int(process.stdout.readline())

        yield kill


def test_a_publication_killed_anywhere_is_no_publication_and_is_completed(
    kill: Callable[[int], int], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, sent, send = Export.load(tmp_path / "run/export"), [], S3FileSystem._call_s3

    async def counted(self: S3FileSystem, method: str, *arguments: Any, **settings: Any) -> Any:
        sent.append((method, settings.get("Key", "")))
        return await send(self, method, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(S3FileSystem, "_call_s3", counted)
        publish(exported, place)
    last = next(number for number, (method, key) in enumerate(sent) if method == "put_object" and "manifest" in key)
    for requests in [*random.Random(0).sample(range(last), 5), last]:
        assert kill(requests) == -signal.SIGKILL
        with pytest.raises(RecordError, match=r"manifest\.json does not exist: no stage was finished"):
            verify(f"{place}-{requests}")
        assert not publish(exported, f"{place}-{requests}").reused
        verify(f"{place}-{requests}")
    assert kill(last + 1) == -signal.SIGKILL  # the manifest was written, so the publication is complete
    assert publish(exported, f"{place}-{last + 1}").reused


def test_of_two_publishers_that_found_the_place_empty_the_second_is_refused(
    make_export: MakeExport, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_export("v1.1").path.rename(tmp_path / "first")
    shutil.rmtree(tmp_path / "run")
    first, second = Export.load(tmp_path / "first"), make_export("v1.0")

    def overtaken(*arguments: Any) -> None:
        patch.undo()
        publish(first, place)
        publication._create(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publication, "_create", overtaken)  # creates the certificate, after the place was found empty
        with pytest.raises(PublicationError, match=r"certificate\.json is not what was uploaded: another process"):
            publish(second, place)
    assert verify(place).inputs["export"] == first.fingerprint
    with pytest.raises(PublicationError, match="holds another publication"):
        publish(second, place)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("AWS_SECRET_ACCESS_KEY", "mistyped", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "nobody", "AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", None, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_credentials_are_told_at_once_and_not_repeated(
    place: str, monkeypatch: pytest.MonkeyPatch, setting: str, value: str | None, said: str
) -> None:
    monkeypatch.delenv(setting) if value is None else monkeypatch.setenv(setting, value)
    S3FileSystem.clear_instance_cache()
    attempts: list[Callable[[], object]] = [
        lambda: check_destination(place),
        lambda: verify(place),
        lambda: require_source(f"{place}/*.txt"),
    ]
    for attempt in attempts:
        with pytest.raises(T5TrainError, match=said) as caught:
            attempt()
        assert place in str(caught.value)
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
    s3: Any, make_export: MakeExport, place: str, store: S3FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        publish(make_export(), place)
        verify(place)
    stored = "".join(store.cat_file(path).decode("latin-1") for path in store.find(place))
    assert "manifest.json" in caplog.text
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in caplog.text + stored
    assert s3.environment["AWS_ACCESS_KEY_ID"] not in stored


def test_text_of_a_pattern_is_downloaded_once_and_again_when_it_changed(
    s3: Any, place: str, store: S3FileSystem, tmp_path: Path
) -> None:
    for part in range(3):
        lines = [json.dumps({"id": f"{part}-{row}", "text": f"text {row} of part {part}"}) for row in range(40)]
        store.pipe_file(f"{place}/part-{part}.jsonl.gz", gzip.compress("\n".join(lines).encode(), mtime=0))
    store.pipe_file(f"{place}/notes.md", b"not of the pattern")
    spec = CorpusSpec(source=f"{place}/part-*.jsonl.gz", workers=1)
    seen: set[str] = set()
    first = build_corpus(spec, tmp_path, lambda what, *_: seen.add(what))
    assert first.counts["passages"] == 120
    assert "bytes of part-1.jsonl.gz downloaded" in seen
    again: set[str] = set()
    assert build_corpus(spec, tmp_path, lambda what, *_: again.add(what)).reused
    assert not any("downloaded" in what for what in again)
    content = gzip.compress(b'{"text": "other"}\n', mtime=0)
    store.pipe_file(f"{place}/part-1.jsonl.gz", content)
    assert build_corpus(spec, tmp_path).counts["passages"] == 81
    store.pipe_file(f"{place}/part-1.jsonl.gz", content[:-4])
    with pytest.raises(InputError, match=r"part-1\.jsonl\.gz cannot be read to its end"):
        build_corpus(spec, tmp_path)
