"""What ``verify`` accepts, and which damage it detects."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from t5train.errors import DigestMismatch, PublicationError, RecordError, T5TrainError
from t5train.records.digests import FileDigest, digest_file, digest_files
from t5train.records.stage_records import Corpus, Export, Publication
from t5train.release.publication import publish
from t5train.release.verification import verify

MakeExport = Callable[..., Export]


@pytest.fixture
def published(make_export: MakeExport, tmp_path: Path) -> Path:
    return publish(make_export(), str(tmp_path / "published")).path


def as_url(folder: Path) -> str:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    for path in folder.rglob("*.*"):
        filesystem.pipe_file(f"/verified/{path.relative_to(folder)}", path.read_bytes())
    return "memory://verified"


def locations_of(folder: Path) -> list[str]:
    return [str(folder), as_url(folder)]


def forge(published: Path, files: dict[str, FileDigest]) -> None:
    forged = Publication.load(published).model_copy(update={"path": Path(), "files": files}).sealed()
    (published / "manifest.json").write_text(forged.manifest_text())


def test_an_unchanged_publication_verifies_after_it_was_moved(published: Path, tmp_path: Path) -> None:
    moved = published.rename(tmp_path / "moved")
    for location in locations_of(moved):
        record = verify(location)
        assert getattr(record, "url") == location  # noqa: B009 - only publications have one


def test_any_flipped_bit_is_detected_and_its_file_named(published: Path) -> None:
    rng = random.Random(0)
    for path in sorted(published.iterdir()):
        content = path.read_bytes()
        for at in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))}:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            for location in locations_of(published):
                with pytest.raises((DigestMismatch, RecordError), match=path.name):
                    verify(location)
        path.write_bytes(content)
    verify(published)


def test_missing_truncated_and_foreign_files_are_all_named(published: Path) -> None:
    size = (published / "model.safetensors").stat().st_size
    (published / "config.json").unlink()
    os.truncate(published / "model.safetensors", size - 1)
    (published / "notes.txt").touch()
    for location in locations_of(published):
        with pytest.raises(DigestMismatch) as caught:
            verify(location)
        said = str(caught.value)
        assert said.startswith(f"{location} has 3 faults: ")
        assert "config.json is missing" in said
        assert f"model.safetensors has {size - 1:,} bytes" in said
        assert "also holds files that were not published: notes.txt" in said


@pytest.mark.parametrize("location", ["folder", "store"])
def test_in_a_copy_of_a_publication_in_s3_a_file_beside_the_manifest_or_a_changed_one_is_an_error(
    published: Path, location: str
) -> None:
    attempt = published / f"{'0' * 12}-{'0' * 16}"
    record = Publication.load(published).model_copy(update={"folder": attempt.name}).sealed()
    attempt.mkdir()
    for name in record.files:
        (published / name).rename(attempt / name)
    (published / "manifest.json").write_text(record.manifest_text())
    earlier = published / f"{'1' * 12}-{'1' * 16}"  # what an interrupted upload has left, as in S3
    earlier.mkdir()
    (earlier / "config.json").touch()
    verify(published if location == "folder" else as_url(published))
    (published / "adapter_config.json").touch()
    with pytest.raises(PublicationError, match=r"(pub|ver)\w+ also holds .*not published: adapter_config\.json"):
        verify(published if location == "folder" else as_url(published))
    (published / "adapter_config.json").unlink()
    (attempt / "config.json").write_text("changed")
    with pytest.raises(DigestMismatch, match=r"config\.json has 7 bytes"):
        verify(published if location == "folder" else as_url(published))


def test_what_git_and_the_hub_add_is_not_looked_at_but_a_link_to_a_folder_is_refused(
    published: Path, tmp_path: Path
) -> None:
    for name in (".git/HEAD", ".gitattributes", ".cache/huggingface/download/config.json.metadata"):
        (published / name).parent.mkdir(parents=True, exist_ok=True)
        (published / name).write_text("x")
    verify(published)
    (tmp_path / "templates").mkdir()
    (published / "additional_chat_templates").symlink_to(tmp_path / "templates")  # transformers would read it
    with pytest.raises(PublicationError, match="files that were not published: additional_chat_templates"):
        verify(published)


def test_a_manifest_forged_to_match_a_changed_file_or_without_the_certificate_is_refused(published: Path) -> None:
    files = Publication.load(published).files
    card = (published / "README.md").read_bytes()
    (published / "README.md").write_text("The best model there is.")
    forge(published, files | digest_files(published, ["README.md"]))
    for location in locations_of(published):
        with pytest.raises(PublicationError, match=r"does not certify the present README\.md"):
            verify(location)
    (published / "README.md").write_bytes(card)
    (published / "certificate.json").unlink()
    forge(published, {name: digest for name, digest in files.items() if name != "certificate.json"})
    for location in locations_of(published):
        with pytest.raises(PublicationError, match=r"lists no certificate\.json"):
            verify(location)


def test_the_result_of_any_stage_can_be_verified(make_export: MakeExport, tmp_path: Path) -> None:
    exported = make_export()
    assert isinstance(verify(exported.path), Export)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "text.txt").write_text("used in place")
    files = {str(tmp_path / "text.txt"): digest_files(tmp_path, ["text.txt"])["text.txt"]}
    Corpus(path=tmp_path / "corpus", fingerprint="0" * 64, files=files).commit()
    assert isinstance(verify(tmp_path / "corpus"), Corpus)
    (tmp_path / "text.txt").write_text("changed")
    with pytest.raises(DigestMismatch, match=r"text\.txt"):
        verify(tmp_path / "corpus")


def test_a_location_without_a_finished_result_is_refused(tmp_path: Path) -> None:
    for location in (str(tmp_path), str(tmp_path / "nowhere"), "memory://nothing"):
        with pytest.raises(RecordError, match=r"manifest\.json"):
            verify(location)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b"[" * 100_000, b'{"kind": "corpus"}', b'{"kind": "soup", "path": ".", "files": {}}'],
)
def test_a_file_that_is_not_a_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"manifest\.json") as caught:
        verify(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("location", ["folder", "store"])
@pytest.mark.parametrize("name", ["../secret.txt", "{tmp_path}/secret.txt", "a/../../secret.txt"])
def test_a_manifest_cannot_name_files_outside_its_folder(
    published: Path, tmp_path: Path, location: str, name: str
) -> None:
    (tmp_path / "secret.txt").write_text("not published")
    outside = {name.format(tmp_path=tmp_path): digest_file(tmp_path / "secret.txt")}
    forge(published, Publication.load(published).files | outside)
    with pytest.raises(RecordError, match=r"names .*, which (leads out of its folder|is not a relative path)"):
        verify(published if location == "folder" else as_url(published))


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/hostname"])
def test_a_remote_corpus_cannot_name_local_text(name: str) -> None:
    files = {name: FileDigest(size=1, sha256="0" * 64)}
    record = Corpus(path=Path(), fingerprint="0" * 64, files={}).model_copy(update={"files": files})
    fsspec.filesystem("memory").pipe_file("/afar/manifest.json", record.sealed().manifest_text().encode())
    with pytest.raises(RecordError, match=r"names .*, which (leads out of its folder|is not a relative path)"):
        verify("memory://afar")


def test_files_of_a_url_are_streamed_with_progress(published: Path) -> None:
    seen: dict[str, Any] = {}
    verify(as_url(published), lambda what, done, total: seen.update({what: (done, total)}))
    assert seen["bytes of model.safetensors verified"] == ((published / "model.safetensors").stat().st_size,) * 2


def test_every_refusal_is_an_error_of_this_project(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(T5TrainError):
        verify(tmp_path)
