"""Publishing to folders and stores."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5train.errors import DigestMismatch, PublicationError, StorageError
from t5train.files.atomic import filling
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export, Publication
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify

MakeExport = Callable[..., Export]
STORE = "memory://bucket/models/t5"


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    """An empty store."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, store: MemoryFileSystem) -> str:
    """A local folder, and a store."""
    return str(tmp_path / "published/t5") if request.param == "folder" else STORE


def certified(exported: Export, witness: Path) -> Export:
    certify(exported.path, witness)
    files = exported.files | digest_files(exported.path, ["certificate.json"])
    return exported.model_copy(update={"files": files}).commit()


def names(place: str) -> set[str]:
    filesystem, path = fsspec.core.url_to_fs(place)
    return {Path(name).name for name in filesystem.find(path)}


def test_what_is_published_is_the_certified_files_and_a_manifest(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    published = publish(exported, place)
    assert names(place) == {*exported.files, "manifest.json"}
    assert published.url == place
    verified = verify(place)
    assert isinstance(verified, Publication)
    assert verified.files == exported.files
    assert verified.inputs["export"] == exported.fingerprint
    assert verified.inputs["run"] == exported.inputs["run"]


def test_publishing_again_verifies_and_reuses(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    publish(exported, place)
    again = publish(exported, place)
    assert again.reused
    assert again.url == place


def test_the_manifest_names_no_place_on_this_machine(make_export: MakeExport, tmp_path: Path) -> None:
    publish(make_export(), str(tmp_path / "published"))
    assert str(tmp_path) not in (tmp_path / "published/manifest.json").read_text()


def test_an_export_without_certificate_is_not_published(make_export: MakeExport, place: str) -> None:
    with pytest.raises(PublicationError, match="no certificate"):
        publish(make_export(certified=False), place)
    assert not names(place)


def test_a_certificate_for_other_files_does_not_open_the_way(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    (exported.path / "README.md").write_text("something else")
    changed = exported.files | digest_files(exported.path, ["README.md"])
    with pytest.raises(PublicationError, match=r"does not certify the present README\.md"):
        publish(exported.model_copy(update={"files": changed}).commit(), place)
    assert not names(place)


def test_a_failed_certificate_does_not_open_the_way(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    path = exported.path / "certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"passed": False, "differences": ["all"]}))
    changed = exported.files | digest_files(exported.path, ["certificate.json"])
    with pytest.raises(PublicationError, match="has not passed: all"):
        publish(exported.model_copy(update={"files": changed}).commit(), place)
    assert not names(place)


def test_a_file_changed_after_certification_is_not_published(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    with open(exported.path / "model.safetensors", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(PublicationError, match=r"model\.safetensors has sha256"):
        publish(exported, place)
    assert not names(place)


@pytest.mark.parametrize("name", ["README.md", "certificate.json", "manifest.json"])
def test_a_file_of_an_older_export_in_the_place_of_the_newer_is_named(
    make_trained: Callable[..., Any], tmp_path: Path, place: str, name: str
) -> None:
    trained = make_trained()
    weights = trained.weights.model_copy(update={"fingerprint": "f" * 64})
    older = certified(export(*trained, tmp_path / "older"), trained.witness)
    newer = certified(export(*trained._replace(weights=weights), tmp_path / "newer"), trained.witness)
    (newer.path / name).write_bytes((older.path / name).read_bytes())
    with pytest.raises(PublicationError, match="README.md" if name == "manifest.json" else name):
        publish(Export.load(newer.path), place)
    assert not names(place)


def test_another_publication_is_left_alone(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    first = publish(exported, place)
    filesystem, path = fsspec.core.url_to_fs(place)
    other = first.model_copy(update={"path": Path(), "url": ".", "fingerprint": "e" * 64}).sealed()
    filesystem.pipe_file(f"{path}/manifest.json", (other.model_dump_json(indent=1) + "\n").encode())
    with pytest.raises(PublicationError, match=r"another publication .eeeeeeeeeeee.*publish to another destination"):
        publish(exported, place)


def test_a_damaged_publication_is_named_and_left_for_the_user(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    publish(exported, place)
    filesystem, path = fsspec.core.url_to_fs(place)
    filesystem.pipe_file(f"{path}/config.json", b"{}")
    with pytest.raises(PublicationError, match=r"damaged copy of this publication: .*config\.json"):
        publish(exported, place)
    assert filesystem.cat_file(f"{path}/config.json") == b"{}"


def test_what_somebody_else_put_there_is_never_overwritten(make_export: MakeExport, place: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(place)
    filesystem.makedirs(path, exist_ok=True)
    filesystem.pipe_file(f"{path}/config.json", b"mine")
    with pytest.raises(PublicationError, match="publish to another"):
        publish(make_export(), place)
    assert names(place) == {"config.json"}
    assert filesystem.cat_file(f"{path}/config.json") == b"mine"


@pytest.mark.parametrize("survivors", range(6))
def test_an_upload_cut_off_anywhere_is_completed(
    make_export: MakeExport, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, survivors: int
) -> None:
    exported = make_export()
    put_file, sent = MemoryFileSystem.put_file, []

    def cut_off(self: MemoryFileSystem, local: str, remote: str, **settings: Any) -> None:
        if len(sent) == survivors:
            raise ConnectionError("cable pulled")
        sent.append(remote)
        put_file(self, local, remote, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", cut_off)
        with pytest.raises(PublicationError, match="ConnectionError: cable pulled"):
            publish(exported, STORE)
    assert len(names(STORE)) == 1 + survivors
    assert "certificate.json" in names(STORE)
    publish(exported, STORE)
    verify(STORE)


def test_an_unfinished_upload_of_another_export_is_left_alone(make_export: MakeExport, store: MemoryFileSystem) -> None:
    exported = make_export()
    store.pipe_file("/bucket/models/t5/certificate.json", (exported.path / "certificate.json").read_bytes() + b" ")
    with pytest.raises(PublicationError, match=r"holds no publication \(certificate\.json\)"):
        publish(exported, STORE)


def test_a_manifest_that_appears_meanwhile_is_not_overwritten(
    make_export: MakeExport, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = MemoryFileSystem.put_file

    def overtaken(self: MemoryFileSystem, local: str, remote: str, **settings: Any) -> None:
        put_file(self, local, remote, **settings)
        self.pipe_file("/bucket/models/t5/manifest.json", b"theirs")

    monkeypatch.setattr(MemoryFileSystem, "put_file", overtaken)
    with pytest.raises(PublicationError, match=r"manifest\.json is not what was uploaded: another process"):
        publish(make_export(), STORE)
    assert store.cat_file("/bucket/models/t5/manifest.json") == b"theirs"


def test_a_store_that_garbles_is_found_out_before_the_manifest(
    make_export: MakeExport, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = MemoryFileSystem.put_file

    def garble(self: MemoryFileSystem, local: str, remote: str, **settings: Any) -> None:
        put_file(self, local, remote, **settings)
        if remote.endswith("config.json"):
            self.pipe_file(remote, b"garbled")

    monkeypatch.setattr(MemoryFileSystem, "put_file", garble)
    with pytest.raises(DigestMismatch, match=r"config\.json has 7 bytes"):
        publish(make_export(), STORE)
    assert "manifest.json" not in names(STORE)


def test_of_two_at_once_the_second_is_refused(make_export: MakeExport, tmp_path: Path) -> None:
    exported = make_export()
    with filling(tmp_path / "published"), pytest.raises(StorageError, match="another process"):
        publish(exported, str(tmp_path / "published"))


def test_what_a_killed_publication_left_is_cleared(make_export: MakeExport, tmp_path: Path) -> None:
    (tmp_path / ".published.partial").mkdir()
    (tmp_path / ".published.partial/config.json").write_text("half")
    publish(make_export(), str(tmp_path / "published"))
    verify(tmp_path / "published")
    assert not (tmp_path / ".published.partial").exists()


def test_a_failed_copy_leaves_nothing(make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    exported = make_export()
    monkeypatch.setattr("t5train.release.publication.copy_durably", full)
    with pytest.raises(PublicationError, match="No space left"):
        publish(exported, str(tmp_path / "there/published"))
    assert not list((tmp_path / "there").iterdir())


def test_a_disk_that_garbles_is_found_out_before_the_folder_appears(
    make_export: MakeExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garble(_: Path, target: Path) -> None:
        target.write_text("garbled")

    exported = make_export()
    monkeypatch.setattr("t5train.release.publication.copy_durably", garble)
    with pytest.raises(DigestMismatch, match="has 7 bytes"):
        publish(exported, str(tmp_path / "published"))
    assert not (tmp_path / "published").exists()


def test_secrets_of_a_url_appear_nowhere(
    make_export: MakeExport, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: MemoryFileSystem, path: str) -> bool:
        raise OSError(f"no access to {path} or {url}")

    url = "memory://user:hunter2@bucket/t5?token=xyzzy"
    exported = make_export()
    with caplog.at_level(logging.DEBUG, "t5train"):
        published = publish(exported, url)
    assert published.url == "memory://bucket/t5"
    said = caplog.text + store.cat_file("/user:hunter2@bucket/t5?token=xyzzy/manifest.json").decode()
    monkeypatch.setattr(MemoryFileSystem, "exists", fails)
    with pytest.raises(PublicationError) as caught:
        publish(exported, url)
    said += str(caught.value)
    assert "hunter2" not in said
    assert "xyzzy" not in said
    assert caught.value.__suppress_context__


def test_progress_counts_bytes(make_export: MakeExport, place: str) -> None:
    exported = make_export()
    seen: dict[str, tuple[int, int | None]] = {}
    publish(exported, place, lambda what, done, total: seen.update({what: (done, total)}))
    moved = {what: at for what, at in seen.items() if "published" in what or "sent" in what}
    assert moved
    assert all(done == total for done, total in moved.values()), moved


class TestCheckDestination:
    """What ``check_destination`` refuses before anything is trained."""

    def test_a_free_place_passes_and_is_left_as_it_was(self, place: str) -> None:
        check_destination(place)
        assert not names(place)
        assert not names(os.path.dirname(place))  # noqa: PTH120 - also of URLs

    def test_a_publication_of_the_same_spec_passes_and_of_another_does_not(
        self, make_export: MakeExport, place: str
    ) -> None:
        exported = make_export()
        publish(exported, place)
        check_destination(place, spec_fingerprint=exported.inputs["spec"])
        with pytest.raises(PublicationError, match="another publication"):
            check_destination(place, spec_fingerprint="f" * 64)

    @pytest.mark.parametrize(
        ("url", "remedy"), [("s3://bucket/t5", "pip install 's3fs>="), ("gs://bucket/t5", "pip install gcsfs")]
    )
    def test_a_missing_package_is_named(self, url: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(url: str) -> None:
            raise ImportError("Install it")

        monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
        with pytest.raises(PublicationError, match=remedy):
            check_destination(url)

    def test_an_unknown_protocol_is_refused(self) -> None:
        with pytest.raises(PublicationError, match=r"nowhere://a/b .*Protocol not known: nowhere"):
            check_destination("nowhere://a/b")

    def test_a_folder_in_use_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(PublicationError, match="not a publication"):
            check_destination(str(tmp_path))

    def test_a_store_that_holds_something_else_is_refused(self, store: MemoryFileSystem) -> None:
        store.pipe_file("/bucket/models/t5/thesis.txt", b"mine")
        with pytest.raises(PublicationError, match=r"holds no publication \(thesis\.txt"):
            check_destination(STORE)

    def test_an_upload_that_was_cut_off_is_no_obstacle(self, make_export: MakeExport, store: MemoryFileSystem) -> None:
        publish(make_export(), STORE)
        store.rm_file("/bucket/models/t5/manifest.json")
        check_destination(STORE)

    def test_a_file_in_the_way_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for inside in ("file", "file/t5"):
            with pytest.raises(PublicationError):
                check_destination(str(tmp_path / inside))

    @pytest.mark.parametrize("target", ["empty", "nothing"])
    def test_a_link_is_refused_as_nothing_can_take_its_place(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / target)
        with pytest.raises(PublicationError, match="is a symbolic link or a mount point"):
            check_destination(str(tmp_path / "link"))

    def test_a_place_that_cannot_be_written_is_refused(self, store: MemoryFileSystem) -> None:
        with pytest.raises(PublicationError, match="not writable"):
            check_destination("/proc/self/t5")
        store.pipe_file("/bucket", b"a file where a folder would have to be")
        with pytest.raises(PublicationError, match="cannot be written"):
            check_destination(STORE)

    def test_too_small_a_disk_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="needs 1,000,000,000,000,000,000 bytes"):
            check_destination(str(tmp_path / "t5"), needed_bytes=10**18)
