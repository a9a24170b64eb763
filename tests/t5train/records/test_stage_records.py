"""A record is reused only if it is finished, has the wanted fingerprint, and is undamaged."""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from t5train.errors import DigestMismatch, RecordError, UnknownVersion, Unreadable
from t5train.records.digests import FileDigest, digest_file, digest_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import MANIFEST, Corpus, Export, Publication, TokenShards, reusable
from t5train.release.verification import verify

FINGERPRINT = "f" * 64
Damage = Callable[[Path], object]


def finished(folder: Path) -> Corpus:
    """Make a finished corpus of two files, one of them in a subfolder."""
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "one.txt").write_text("first passage")
    (folder / "two.txt").write_text("second passage")
    files = digest_files(folder, ["parts/one.txt", "two.txt"])
    return Corpus(path=folder, fingerprint=FINGERPRINT, files=files, counts={"rows": 2, "words": 4}).commit()


def test_a_record_may_be_moved_with_its_folder(tmp_path: Path) -> None:
    corpus = finished(tmp_path / "here")
    assert Corpus.load(tmp_path / "here") == corpus
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Corpus.load(tmp_path / "there")
    assert moved == corpus.model_copy(update={"path": tmp_path / "there"})
    moved.verify()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_the_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["parts/one.txt", "two.txt"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "is missing"),
        (drop_the_last_byte, r"has \d+ bytes, but \d+ were recorded"),
        (flip_a_bit, "has sha256 [0-9a-f]{64}, but sha256 [0-9a-f]{64} was recorded"),
    ],
)
def test_a_damaged_file_is_named_and_the_record_is_not_reused(
    damage: Damage, words: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = finished(tmp_path / "corpus")
    damage(tmp_path / "corpus" / name)
    with pytest.raises(DigestMismatch, match=f"{name} {words}"):
        corpus.verify()
    with caplog.at_level(logging.WARNING):
        assert reusable(Corpus, tmp_path / "corpus", FINGERPRINT) is None
    assert name in caplog.text


def test_a_record_is_reused_only_for_an_equal_fingerprint(tmp_path: Path) -> None:
    corpus = finished(tmp_path / "corpus")
    assert reusable(Corpus, tmp_path / "corpus", "e" * 64) is None
    found = reusable(Corpus, tmp_path / "corpus", FINGERPRINT)
    assert found is not None
    assert found.reused
    assert found.files == corpus.files
    found.commit()
    assert not Corpus.load(tmp_path / "corpus").reused, "the manifest does not say so"


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", '{"kind": "corpus"}', "\x00"])
def test_a_missing_or_damaged_manifest_is_named(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("second passage")
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(RecordError, match=r"is not (the manifest of )?a finished corpus folder"):
        Corpus.load(tmp_path)
    assert reusable(Corpus, tmp_path, FINGERPRINT) is None


def test_a_number_altered_in_a_manifest_is_detected(tmp_path: Path) -> None:
    counts = {"first_sentinel_id": 32099, "rows": 2}
    made = finished(tmp_path / "corpus").model_copy(update={"counts": counts}).commit()
    assert Corpus.load(tmp_path / "corpus") == made
    manifest = tmp_path / "corpus" / MANIFEST
    manifest.write_text(manifest.read_text().replace("32099", "32098"))
    with pytest.raises(RecordError, match=f"{MANIFEST} is damaged"):
        Corpus.load(tmp_path / "corpus")
    assert reusable(Corpus, tmp_path / "corpus", FINGERPRINT) is None


def test_a_count_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"counts\.share"):
        Corpus.model_validate({"path": tmp_path, "fingerprint": FINGERPRINT, "files": {}, "counts": {"share": 0.25}})


def test_a_folder_in_place_of_a_file_counts_as_damage(tmp_path: Path) -> None:
    corpus = finished(tmp_path / "corpus")
    name, digest = next(iter(corpus.files.items()))
    (tmp_path / "corpus" / name).unlink()
    (tmp_path / "corpus" / name).mkdir()
    folder_sized = digest.model_copy(update={"size": (tmp_path / "corpus" / name).stat().st_size})
    unreadable = corpus.model_copy(update={"files": {name: folder_sized}}).commit()
    with pytest.raises(DigestMismatch, match=f"{name} is not a file"):
        unreadable.verify()
    assert reusable(Corpus, tmp_path / "corpus", FINGERPRINT) is None


def test_a_record_that_cannot_be_read_now_is_not_made_again(tmp_path: Path) -> None:
    corpus = finished(tmp_path / "corpus")
    for name in (*corpus.files, MANIFEST):
        path = corpus.path / name
        path.rename(tmp_path / "kept")
        path.symlink_to(path.name)  # it exists, but cannot be opened
        with pytest.raises(Unreadable, match=rf"{name} cannot be read now \(Too many levels of symbolic links\)"):
            reusable(Corpus, corpus.path, FINGERPRINT)
        path.unlink()
        (tmp_path / "kept").rename(path)
    assert reusable(Corpus, corpus.path, FINGERPRINT) is not None


@pytest.mark.parametrize("reason", [errno.EIO, errno.EACCES])
def test_a_manifest_or_file_that_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def fails(path: Path, *_: Any) -> Any:
        raise OSError(reason, os.strerror(reason), str(path))

    said = r" cannot be read now \(.*\): (check the disk|grant this user)"
    corpus = finished(tmp_path / "corpus")
    monkeypatch.setattr("t5train.records.digests.digest_file", fails)
    with pytest.raises(Unreadable, match=rf"one\.txt{said}"):
        corpus.verify()
    monkeypatch.setattr(Path, "read_bytes", fails)
    for read in (Corpus.load, verify):
        with pytest.raises(Unreadable, match=MANIFEST + said):
            read(corpus.path)


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "corpus")
    said = r"is not the manifest of a finished shards folder: its kind is 'corpus'$"
    with pytest.raises(RecordError, match=said):
        TokenShards.load(tmp_path / "corpus")


def test_a_publication_in_place_of_its_export_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    Publication(path=tmp_path, fingerprint=FINGERPRINT, files={}, url=str(tmp_path)).commit()
    with pytest.raises(
        RecordError, match=r"its kind is 'publication': name the folder `export` of its run, or .*verify`"
    ):
        Export.load(tmp_path)


def test_an_intact_manifest_of_another_version_is_refused_and_not_made_again(tmp_path: Path) -> None:
    finished(tmp_path / "corpus")
    manifest = tmp_path / "corpus" / MANIFEST
    document = json.loads(manifest.read_text()) | {"schema_version": 2, "languages": ["en"]}
    del document["seal"]
    manifest.write_text(json.dumps(document | {"seal": fingerprint(document)}))
    for look in (lambda: Corpus.load(manifest.parent), lambda: reusable(Corpus, manifest.parent, FINGERPRINT)):
        with pytest.raises(UnknownVersion, match=r"does not know its schema_version, languages 2"):
            look()
    with pytest.raises(RecordError, match="is not the manifest of a finished shards folder"):
        TokenShards.load(manifest.parent)


def test_progress_is_reported_in_bytes_up_to_the_total(tmp_path: Path) -> None:
    corpus = finished(tmp_path / "corpus")
    reported: list[tuple[int, int | None]] = []
    corpus.verify(lambda _, done, total: reported.append((done, total)))
    total = sum(digest.size for digest in corpus.files.values())
    assert reported[-1] == (total, total)
    assert reported == sorted(reported)


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1])
def test_a_file_of_any_size_is_digested_completely(size: int, tmp_path: Path) -> None:
    content = bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == FileDigest(size=size, sha256=hashlib.sha256(content).hexdigest())
