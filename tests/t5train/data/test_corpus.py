"""The corpus stage: what it finds, what it names the result, and what it refuses."""

import fcntl
import gzip
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from t5train.data.corpus import build_corpus, corpus_name
from t5train.data.download.source_listing import _may_be_named_in
from t5train.data.segments import read_segments
from t5train.data.sources import local_files, redacted, require_source
from t5train.errors import InputError, StorageError
from t5train.progress import silent
from t5train.records.digests import digest_file
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec

pytestmark = pytest.mark.usefixtures("quick_workers")


@pytest.fixture
def remote() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True)


def build(source: object, root: Path) -> Corpus:
    return build_corpus(CorpusSpec(source=str(source), workers=1), root / "root")


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "a.txt").write_text("one\ntwo\n")
    shutil.copytree(here, there)
    first = build(here, tmp_path)
    assert build(there / "a.txt", tmp_path).fingerprint == first.fingerprint
    (there / "a.txt").write_text("one\ntwp\n")
    assert build(there / "a.txt", tmp_path).fingerprint != first.fingerprint


def test_a_corpus_is_reused_until_its_text_changes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n\ntwo\n")
    first = build(text, tmp_path)
    assert first.counts == {"passages": 2, "empty_passages": 1, "text_bytes": 6, "repeated_passages": 0}
    assert list(first.files) == [str(text), "segments.json", "text-findings.json"]
    assert not first.reused
    assert build(text, tmp_path).reused
    text.write_text("three\n")
    assert not build(text, tmp_path).reused


def test_a_reused_corpus_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n")
    build(text, tmp_path)
    read: list[Path] = []
    for module in ("t5train.data.corpus", "t5train.records.digests"):
        monkeypatch.setattr(f"{module}.digest_file", lambda path: read.append(path) or digest_file(path))
    assert build(text, tmp_path).reused
    assert read.count(text) == 1


def test_a_corpus_whose_source_moved_is_not_reused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n")
    build(text, tmp_path)
    (tmp_path / "there").mkdir()
    moved = text.rename(tmp_path / "there" / "a.txt")
    again = build(moved, tmp_path)
    assert not again.reused
    assert str(moved) in again.files


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
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(InputError, match="holds no text"):
        build(tmp_path / "a.txt", tmp_path)


def test_the_output_folder_of_a_failed_build_can_be_used_for_other_text(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\n")
    (tmp_path / "good.txt").write_text("one\n")
    (tmp_path / "other.txt").write_text("two\n")
    with pytest.raises(InputError, match="not UTF-8"):
        build_corpus(CorpusSpec(source=str(tmp_path / "bad.txt"), workers=1), tmp_path, out=tmp_path / "out")
    build_corpus(CorpusSpec(source=str(tmp_path / "good.txt"), workers=1), tmp_path, out=tmp_path / "out")
    with pytest.raises(StorageError, match="holds a result of other inputs"):
        build_corpus(CorpusSpec(source=str(tmp_path / "other.txt"), workers=1), tmp_path, out=tmp_path / "out")


def test_a_new_root_is_private_and_is_made_only_for_a_source_that_exists(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("one\n")
    root = tmp_path / "new" / "root"
    with pytest.raises(InputError):
        build_corpus(CorpusSpec(source=str(tmp_path / "god.txt"), workers=1), root)
    assert not root.parent.exists()
    build_corpus(CorpusSpec(source=str(tmp_path / "good.txt"), workers=1), root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_empty_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match="all files are empty"):
        require_source(str(tmp_path))
    (tmp_path / "b.txt").write_text("one\n")
    found = require_source(str(tmp_path))
    assert (found.size_bytes, len(found.sizes)) == (4, 2)
    assert [file.name for file in found.local] == ["a.txt", "b.txt"]


def test_an_absent_source_is_called_absent_and_another_kind_of_file_by_its_kind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.txt' does not exist\. Correct the path"):
        build(tmp_path / "absent.txt", tmp_path)
    with pytest.raises(InputError, match=r"absent\*\.txt' matches no file"):
        build(tmp_path / "absent*.txt", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe' is neither a file nor a folder"):
        build(tmp_path / "pipe", tmp_path)
    (tmp_path / "pipe").unlink()
    with pytest.raises(InputError, match=r"is a folder without \.txt, .* files\. It is empty\. Set corpus\.source"):
        build(tmp_path, tmp_path)


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
    marks = [
        "runs/first/lock",
        "corpus/some/.claim",
        "prefect-2/api-key",
        "regression/nights/1",
        "cache/0/e.txt.download.json",
    ]
    made = ["runs/first/m.txt", "corpus/some/t.txt", "prefect-2/ui/robots.txt", "regression/h.txt", "cache/0/e.txt"]
    for name in (*of_user, *(f"{root}{each}" for each in (*marks, *made))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    found = local_files(str(tmp_path / source), "", tmp_path / "elsewhere", silent)
    assert [file.path for file in found] == [tmp_path / name for name in of_user]
    assert len(require_source(str(tmp_path / source)).sizes) == len(of_user)


def test_a_source_with_parents_is_read_and_recorded_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one\n")
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


def test_a_remote_file_is_downloaded_once(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> None:
    remote.pipe({"/texts/a.txt": b"one\n", "/texts/b.jsonl.gz": gzip.compress(b'{"text": "two"}\n')})
    first = build("memory://texts/*", tmp_path)
    assert first.counts["passages"] == 2
    downloads = sorted((tmp_path / "root" / "cache").rglob("*.txt"))
    before = [path.stat().st_mtime_ns for path in downloads]
    assert build("memory://texts/*", tmp_path).reused
    assert [path.stat().st_mtime_ns for path in downloads] == before


def test_a_changed_remote_file_is_downloaded_again(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> None:
    remote.pipe("/texts/a.txt", b"one\n")
    first = build("memory://texts/a.txt", tmp_path)
    remote.pipe("/texts/a.txt", b"two\n")
    assert build("memory://texts/a.txt", tmp_path).fingerprint != first.fingerprint


def test_a_damaged_download_is_fetched_again(
    tmp_path: Path, remote: fsspec.AbstractFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    remote.pipe("/texts/a.txt", b"one\n")
    first = build("memory://texts/a.txt", tmp_path)
    (download,) = (tmp_path / "root" / "cache").rglob("a.txt")
    download.write_bytes(b"onf\n")
    with caplog.at_level(logging.WARNING):
        assert build("memory://texts/a.txt", tmp_path).fingerprint == first.fingerprint
    assert f"the download of {download} is damaged" in caplog.text
    assert download.read_bytes() == b"one\n"


@pytest.mark.parametrize("note", [b"", b"\xff\x00", b"{}", b'{"size": -1, "sha256": "0", "state": 1}'])
def test_a_damaged_download_record_is_written_again(
    tmp_path: Path, remote: fsspec.AbstractFileSystem, note: bytes
) -> None:
    remote.pipe("/texts/a.txt", b"one\n")
    first = build("memory://texts/a.txt", tmp_path)
    (kept,) = (tmp_path / "root" / "cache").rglob("*.download.json")
    kept.write_bytes(note)
    assert build("memory://texts/a.txt", tmp_path).fingerprint == first.fingerprint
    assert kept.read_bytes() != note


def test_temporary_files_of_a_killed_download_are_removed_by_the_next_one(
    tmp_path: Path, remote: fsspec.AbstractFileSystem
) -> None:
    remote.pipe("/texts/a.txt", b"one\n")
    build("memory://texts/a.txt", tmp_path)
    (download,) = (tmp_path / "root" / "cache").rglob("a.txt")
    leftovers = [download.with_name(".a.txt.0badcafe.tmp"), download.with_name(".b.txt.0badcafe.tmp")]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    build("memory://texts/a.txt", tmp_path)
    assert [leftover.exists() for leftover in leftovers] == [False, False]


def test_two_downloads_of_one_file_take_turns(
    tmp_path: Path, remote: fsspec.AbstractFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    remote.pipe("/texts/a.txt", b"one\n")
    build("memory://texts/a.txt", tmp_path)
    (download,) = (tmp_path / "root" / "cache").rglob("a.txt")
    other = os.open(download.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, (other,)).start()
    assert build("memory://texts/a.txt", tmp_path).reused
    assert "another process: waiting" in caplog.text


def test_a_named_pipe_in_a_text_folder_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    os.mkfifo(folder / "b.txt")
    (tmp_path / "other.txt").write_text("two\n")
    (folder / "c.txt").symlink_to("../other.txt")
    names = [file.source.name for file in read_segments(build(folder, tmp_path).path)]
    assert names == ["a.txt", "c.txt"]


def test_a_damaged_claim_file_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n")
    (build(text, tmp_path).path / ".claim").write_bytes(b"\xff" * 64)
    with pytest.raises(StorageError, match="other inputs or settings"):
        build(text, tmp_path)


def test_a_missing_protocol_package_is_named_without_the_user_of_the_url(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adlfs") as caught:
        build("abfs://somebody@account/a.txt", tmp_path)
    assert "somebody" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Protocol not known: nosuch"):
        build("nosuch://bucket/a.txt", tmp_path)


def test_the_url_of_a_corpus_is_never_written_to_disk(tmp_path: Path, remote: fsspec.AbstractFileSystem) -> None:
    assert redacted("s3://key:secret@bucket/x/*.txt?token=t#f") == "s3://bucket/x/*.txt"
    assert redacted("/data/a?.txt") == "/data/a?.txt"
    assert corpus_name(CorpusSpec(source="sftp://user@host/a b.txt")) == "a-b"
    remote.pipe("/texts/a.txt", b"one\n")
    build("memory://texts/a.txt", tmp_path)
    for path in tmp_path.rglob("*.json"):
        assert "memory://" not in path.read_text("utf-8")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("one\n")
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="not empty"):
        build_corpus(CorpusSpec(source=str(text)), tmp_path, out=out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_result_of_other_settings_is_not_overwritten(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("one\n")
    first = build_corpus(CorpusSpec(source=str(text)), tmp_path, out=out)
    text.write_text("two\n")
    with pytest.raises(StorageError, match="other inputs or settings"):
        build_corpus(CorpusSpec(source=str(text)), tmp_path, out=out)
    assert Corpus.load(out).fingerprint == first.fingerprint


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    text, root = tmp_path / "a.txt", tmp_path / "root"
    text.write_text("one\n")
    root.write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="cannot be written"):
        build_corpus(CorpusSpec(source=str(text)), root)
