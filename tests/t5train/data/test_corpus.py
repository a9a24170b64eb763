"""The corpus stage: what it finds, what it names the result, and what it refuses."""

import fcntl
import gzip
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from t5train.data.corpus import build_corpus, corpus_name
from t5train.data.download.source_listing import _may_be_named_in
from t5train.data.segments import read_segments
from t5train.data.sources import local_files, require_source
from t5train.errors import InputError, StorageError
from t5train.progress import silent
from t5train.records.digests import digest_file
from t5train.records.locations import redacted
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec
from tests.support.waiting import await_that

pytestmark = pytest.mark.usefixtures("quick_workers")
REMOTE = "memory://texts/a.txt"


@pytest.fixture
def remote() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True)


def build(source: object, root: Path) -> Corpus:
    return build_corpus(CorpusSpec(source=str(source), workers=1), root / "root")


def make(folder: Path, **texts: str) -> Path:
    """Write files of text, and return the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_a_corpus_is_reused_until_its_text_changes_or_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make(tmp_path, a="one\n\ntwo\n") / "a.txt"
    first = build(text, tmp_path)
    assert first.counts == {"passages": 2, "empty_passages": 1, "text_bytes": 6, "repeated_passages": 0}
    assert list(first.files) == [str(text), "segments.json", "text-findings.json"]
    assert not first.reused
    read: list[Path] = []
    for module in ("t5train.data.checks.unchanged_files", "t5train.records.digests"):
        monkeypatch.setattr(f"{module}.digest_file", lambda path, *_: read.append(path) or digest_file(path))
    assert build(text, tmp_path).reused
    assert read.count(text) == 1
    (tmp_path / "there").mkdir()
    moved = text.rename(tmp_path / "there" / "a.txt")
    again = build(moved, tmp_path)
    assert not again.reused
    assert str(moved) in again.files
    assert again.fingerprint == build(moved.parent, tmp_path).fingerprint == first.fingerprint
    moved.write_text("one\n\ntwp\n")
    assert build(moved, tmp_path).fingerprint != first.fingerprint


def test_files_of_folders_and_patterns_are_sorted_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "text" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("two\n")
    (folder.parent / "a.txt.gz").write_bytes(gzip.compress(b"one\n"))
    (folder.parent / "notes.md").write_text("not text of ours")
    names = [file.source.name for file in read_segments(build(folder.parent, tmp_path).path)]
    assert names == ["a.txt.gz", "deep/b.txt"]
    assert build(folder.parent / "**/*.txt", tmp_path).counts["passages"] == 1
    with pytest.raises(InputError, match=r"notes\.md, which has an unsupported format"):
        build(folder.parent / "*.md", tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_corpus_without_a_passage_is_refused(tmp_path: Path, content: str) -> None:
    make(tmp_path, a=content)
    with pytest.raises(InputError, match="holds no text"):
        build(tmp_path / "a.txt", tmp_path)


def test_empty_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    make(tmp_path, a="")
    with pytest.raises(InputError, match="all files are empty"):
        require_source(str(tmp_path))
    found = require_source(str(make(tmp_path, b="one\n")))
    assert found.size_bytes == 4
    assert [file.name for file in found.local] == [*found.sizes] == ["a.txt", "b.txt"]


def test_an_output_folder_takes_one_result_and_only_if_nothing_else_is_there(tmp_path: Path) -> None:
    text, out = make(tmp_path, good="one\n", other="two\n"), tmp_path / "out"
    (text / "bad.txt").write_bytes(b"\xff\n")

    def build_out(name: str) -> Corpus:
        return build_corpus(CorpusSpec(source=str(text / name), workers=1), tmp_path, out=out)

    with pytest.raises(InputError, match="not UTF-8"):
        build_out("bad.txt")
    first = build_out("good.txt")
    with pytest.raises(StorageError, match="holds a result of other inputs or settings"):
        build_out("other.txt")
    assert Corpus.load(out).fingerprint == first.fingerprint
    (out / ".claim").write_bytes(b"\xff" * 64)
    with pytest.raises(StorageError, match="other inputs or settings"):
        build_out("good.txt")
    shutil.rmtree(out)
    make(out, thesis="years of work")
    with pytest.raises(StorageError, match="not empty"):
        build_out("good.txt")
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_a_new_root_is_private_and_is_made_only_for_a_source_that_exists(tmp_path: Path) -> None:
    text, root = make(tmp_path, good="one\n") / "good.txt", tmp_path / "new" / "root"
    with pytest.raises(InputError):
        build_corpus(CorpusSpec(source=str(tmp_path / "god.txt"), workers=1), root)
    assert not root.parent.exists()
    build_corpus(CorpusSpec(source=str(text), workers=1), root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    with pytest.raises(StorageError, match="cannot be written"):
        build_corpus(CorpusSpec(source=str(text)), text)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("absent.txt", r"absent\.txt' does not exist\. Correct the path"),
        ("absent*.txt", r"absent\*\.txt' matches no file"),
        ("pipe", r"pipe' is neither a file nor a folder"),
        ("empty", r"is a folder without \.txt, .* files\. It is empty\. Set corpus\.source"),
    ],
)
def test_an_absent_source_is_called_absent_and_another_kind_of_file_by_its_kind(
    tmp_path: Path, source: str, said: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=said):
        build(tmp_path / source, tmp_path)


def test_files_of_other_formats_in_a_folder_are_counted_and_the_first_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "text"
    (text / "deep").mkdir(parents=True)
    for number in range(7):
        (text / "deep" / f"{number}.md").write_text("# a title\n")
    with pytest.raises(InputError, match=r"has only files of other formats: deep/0\.md, .*, deep/4\.md and 2 more\."):
        build(text, tmp_path)
    (text / "a.txt").write_text("one\n")
    assert require_source(str(text)).skipped == [f"deep/{number}.md" for number in range(7)]
    with caplog.at_level(logging.INFO):
        build(text, tmp_path)
    (line,) = [record for record in caplog.records if ".md" in record.getMessage()]
    names = "deep/0.md, deep/1.md, deep/2.md, deep/3.md, deep/4.md and 2 more"
    assert line.getMessage() == f"leaving out 7 files in other formats than .txt, .jsonl, .tsv, .csv, .parquet: {names}"
    assert line.levelname == "INFO", "a choice of files needs no warning at every start"


@pytest.mark.parametrize("root", ["", "text/deep/"])
@pytest.mark.parametrize("source", ["", "text", "**/*.txt", "text/**/*.txt"])
def test_what_runs_made_is_no_text(tmp_path: Path, source: str, root: str) -> None:
    of_user = ["text/a.txt", "text/corpus/b.txt", "text/nights/d.txt", "text/runs/mine/c.txt"]
    marks = ["runs/first/lock", "corpus/some/.claim", "prefect-2/api-key", "regression/nights/1"]
    made = ["runs/first/m.txt", "corpus/some/t.txt", "prefect-2/ui/robots.txt", "regression/h.txt", "cache/0/e.txt"]
    for name in (*of_user, *(f"{root}{each}" for each in (*marks, *made, "cache/0/e.txt.download.json"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    found = local_files(str(tmp_path / source), "", tmp_path / "elsewhere", silent)
    assert [file.path for file in found] == [tmp_path / name for name in of_user]
    assert len(require_source(str(tmp_path / source)).sizes) == len(of_user)


def test_a_source_with_parents_is_read_and_recorded_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "text", a="one\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for source in ("../text", "../text/a.txt", "../text/*.txt", f"{tmp_path}/here/../text"):
        assert build(Path(source), tmp_path / "root").counts["passages"] == 1


def test_what_a_run_made_is_read_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "some").mkdir(parents=True)
    for name in ("a.txt", ".claim"):
        (tmp_path / "corpus" / "some" / name).write_text("one\n")
    for source in ("corpus/some", "corpus/some/a.txt", "corpus/some/*.txt"):
        assert [file.name for file in local_files(str(tmp_path / source), "", tmp_path, silent)] == ["a.txt"]
    with pytest.raises(InputError, match=r"\*/\*/\*\.txt' matches only what runs made\. Correct the pattern"):
        require_source(str(tmp_path / "*" / "*" / "*.txt"))
    with pytest.raises(InputError, match=r"It has only what runs made\. Set corpus\.source"):
        require_source(str(tmp_path))


def test_an_unreadable_folder_that_a_pattern_cannot_match_is_no_error() -> None:
    assert _may_be_named_in("/data/wiki", "/data/wiki/*.txt")
    assert _may_be_named_in("/data/a/b/c", "/data/**/*.txt")
    assert _may_be_named_in("/data/wiki-1", "/data/wiki*/deep/*.txt")
    assert not _may_be_named_in("/data/lost+found", "/data/wiki*/*.txt")
    assert not _may_be_named_in("/data/wiki/deep", "/data/wiki/*.txt")


@pytest.fixture
def downloaded(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> tuple[Corpus, Path]:
    """The corpus of memory://texts/a.txt, and its download."""
    remote.pipe("/texts/a.txt", b"one\n")
    made = build(REMOTE, tmp_path)
    (path,) = (tmp_path / "root" / "cache").rglob("a.txt")
    return made, path


def test_a_remote_file_is_downloaded_once_and_again_when_it_has_changed(
    tmp_path: Path, remote: fsspec.AbstractFileSystem, downloaded: tuple[Corpus, Path]
) -> None:
    first, path = downloaded
    written = path.stat().st_mtime_ns
    assert build(REMOTE, tmp_path).reused
    assert path.stat().st_mtime_ns == written
    remote.pipe("/texts/a.txt", b"two\n")
    assert build(REMOTE, tmp_path).fingerprint != first.fingerprint
    remote.pipe("/texts/b.jsonl.gz", gzip.compress(b'{"text": "two"}\n'))
    assert build("memory://texts/*", tmp_path).counts["passages"] == 2


def test_a_damaged_download_is_fetched_again(
    tmp_path: Path, downloaded: tuple[Corpus, Path], caplog: pytest.LogCaptureFixture
) -> None:
    first, path = downloaded
    path.write_bytes(b"onf\n")
    with caplog.at_level(logging.WARNING):
        assert build(REMOTE, tmp_path).fingerprint == first.fingerprint
    assert f"the download of {path} is damaged" in caplog.text
    assert path.read_bytes() == b"one\n"


@pytest.mark.parametrize("note", [b"", b"\xff\x00", b"{}", b'{"size": -1, "sha256": "0", "state": 1}'])
def test_a_damaged_download_record_is_written_again(
    tmp_path: Path, downloaded: tuple[Corpus, Path], note: bytes
) -> None:
    first, path = downloaded
    kept = path.with_name("a.txt.download.json")
    original = kept.read_bytes()
    kept.write_bytes(note)
    assert build(REMOTE, tmp_path).fingerprint == first.fingerprint
    assert kept.read_bytes() == original


def test_temporary_files_of_a_killed_download_are_removed_by_the_next_one(
    tmp_path: Path, downloaded: tuple[Corpus, Path]
) -> None:
    leftovers = [downloaded[1].with_name(f".{name}.txt.0badcafe.tmp") for name in "ab"]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    build(REMOTE, tmp_path)
    assert not any(leftover.exists() for leftover in leftovers)


def test_two_downloads_of_one_file_take_turns(
    tmp_path: Path, downloaded: tuple[Corpus, Path], caplog: pytest.LogCaptureFixture
) -> None:
    other = os.open(downloaded[1].parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def release_when_awaited() -> None:
        try:
            await_that(lambda: "another process: waiting" in caplog.text)
        finally:
            os.close(other)

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release_when_awaited)
        assert build(REMOTE, tmp_path).reused
        released.result()


def test_a_named_pipe_in_a_text_folder_is_ignored(tmp_path: Path) -> None:
    folder = make(tmp_path / "text", a="one\n")
    os.mkfifo(folder / "b.txt")
    (folder / "c.txt").symlink_to(make(tmp_path, other="two\n") / "other.txt")
    assert [file.source.name for file in read_segments(build(folder, tmp_path).path)] == ["a.txt", "c.txt"]


def test_a_missing_protocol_package_is_named_without_the_user_of_the_url(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adlfs") as caught:
        build("abfs://somebody@account/a.txt", tmp_path)
    assert "somebody" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(InputError, match="Protocol not known: nosuch"):
        build("nosuch://bucket/a.txt", tmp_path)


@pytest.mark.usefixtures("downloaded")
def test_the_url_of_a_corpus_is_never_written_to_disk(tmp_path: Path) -> None:
    assert redacted("s3://key:secret@bucket/x/*.txt?token=t#f") == "s3://bucket/x/*.txt"
    assert redacted("/data/a?.txt") == "/data/a?.txt"
    assert corpus_name(CorpusSpec(source="sftp://user@host/a b.txt")) == "a-b"
    for path in tmp_path.rglob("*.json"):
        assert "memory://" not in path.read_text("utf-8")
