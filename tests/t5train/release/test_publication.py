"""Publishing to folders and stores."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5train.errors import DigestMismatch, InputError, PublicationError, StorageError
from t5train.files.atomic import filling
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export, Publication
from t5train.release.fetching import fetch
from t5train.release.publication import check_destination, publish
from t5train.release.verification import verify
from tests.support.certified_exports import make_certified, make_forged

MakeExport = Callable[..., Export]
STORE = "memory://bucket/models/t5"


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "store"])
def destination(request: pytest.FixtureRequest, tmp_path: Path, store: MemoryFileSystem) -> str:
    """A local folder, and a store."""
    return str(tmp_path / "published/t5") if request.param == "folder" else STORE


@pytest.fixture
def exported(make_export: MakeExport) -> Export:
    return make_export()


def names(destination: str) -> set[str]:
    filesystem, path = fsspec.core.url_to_fs(destination)
    return {Path(name).name for name in filesystem.find(path)}


def test_a_publication_is_the_certified_files_and_a_manifest_and_is_reused(
    exported: Export, destination: str, tmp_path: Path
) -> None:
    seen: dict[str, tuple[int, int | None]] = {}
    published = publish(exported, destination, lambda what, done, total: seen.update({what: (done, total)}))
    moved = [at for what, at in seen.items() if "published" in what or "sent" in what]
    assert moved
    assert all(done == total for done, total in moved), moved
    assert names(destination) == {*exported.files, "manifest.json"}
    filesystem, path = fsspec.core.url_to_fs(destination)
    assert str(tmp_path) not in filesystem.cat_file(f"{path}/manifest.json").decode()
    verified = verify(destination)
    assert isinstance(verified, Publication)
    assert verified.files == exported.files
    assert (verified.inputs["export"], verified.inputs["run"]) == (exported.fingerprint, exported.inputs["run"])
    again = publish(exported, destination)
    assert again.reused
    assert again.url == published.url == destination


def without_certificate(exported: Export) -> Export:
    files = {name: digest for name, digest in exported.files.items() if name != "certificate.json"}
    return exported.model_copy(update={"files": files}).commit()


def rewritten(exported: Export, name: str, content: str) -> Export:
    """Change a file and the manifest, but not the certificate."""
    (exported.path / name).write_text(content)
    return exported.model_copy(update={"files": exported.files | digest_files(exported.path, [name])}).commit()


def with_failed_certificate(exported: Export) -> Export:
    certificate = json.loads((exported.path / "certificate.json").read_text())
    return rewritten(exported, "certificate.json", json.dumps(certificate | {"passed": False, "differences": ["all"]}))


def with_changed_weights(exported: Export) -> Export:
    with open(exported.path / "model.safetensors", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01")
    return exported


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_certificate, "no certificate"),
        (lambda exported: rewritten(exported, "README.md", "else"), r"does not certify the present README\.md"),
        (with_failed_certificate, "has not passed: all"),
        (with_changed_weights, r"model\.safetensors has sha256"),
    ],
)
def test_what_no_passing_certificate_vouches_for_is_not_published(
    exported: Export, destination: str, change: Callable[[Export], Export], problem: str
) -> None:
    with pytest.raises(PublicationError, match=problem):
        publish(change(exported), destination)
    assert not names(destination)


def test_another_publication_is_left_alone(exported: Export, destination: str) -> None:
    first = publish(exported, destination)
    filesystem, path = fsspec.core.url_to_fs(destination)
    other = first.model_copy(update={"path": Path(), "url": ".", "fingerprint": "e" * 64}).sealed()
    filesystem.pipe_file(f"{path}/manifest.json", (other.model_dump_json(indent=1) + "\n").encode())
    with pytest.raises(PublicationError, match=r"another publication .eeeeeeeeeeee.*publish to another destination"):
        publish(exported, destination)


def _replace_bytes(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(bytes(700)) and None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_replace_bytes("model.safetensors"), r"its model\.safetensors has sha256 \w{64}, but sha256 \w{64} is to be"),
        (_replace_bytes("adapter_config.json"), r"its adapter_config\.json is not to be published"),
        (lambda folder: (folder / "spiece.model").unlink(), r"its spiece\.model is missing"),
    ],
)
def test_a_publication_of_other_files_under_the_same_fingerprint_is_not_reused(
    tmp_path: Path, destination: str, change: Callable[[Path], None], named: str
) -> None:
    exported = make_certified(tmp_path / "export", {"model.safetensors": 700, "README.md": 80, "spiece.model": 90})
    forged = make_forged(tmp_path / "forged", exported, change)
    publish(forged, destination)
    with pytest.raises(PublicationError, match=f"with the same fingerprint and other content: {named}"):
        publish(exported, destination)
    assert verify(destination).files == forged.files


def test_where_only_the_card_differs_the_error_says_that_the_model_is_the_same(
    tmp_path: Path, destination: str
) -> None:
    exported = make_certified(tmp_path / "export", {"model.safetensors": 700, "README.md": 80, "loss_curve.png": 90})
    other_card = make_forged(tmp_path / "card", exported, _replace_bytes("README.md"))
    publish(other_card, destination)
    with pytest.raises(
        PublicationError,
        match=r"holds this model with another card \(README\.md\).*need not be published again.*another destination",
    ):
        publish(exported, destination)
    model_too = make_forged(tmp_path / "model", other_card, _replace_bytes("model.safetensors"))
    with pytest.raises(PublicationError, match=r"other content: its model\.safetensors has"):
        publish(model_too, destination)
    assert verify(destination).files == other_card.files


def test_a_publication_that_states_other_inputs_is_not_reused(tmp_path: Path, destination: str) -> None:
    exported = make_certified(tmp_path / "export", {"model.safetensors": 700})
    publish(exported.model_copy(update={"inputs": exported.inputs | {"run": "9" * 64}}), destination)
    with pytest.raises(PublicationError, match="other content: its inputs differ"):
        publish(exported, destination)


def test_a_publication_with_another_certificate_of_the_same_files_is_reused(tmp_path: Path, destination: str) -> None:
    exported = make_certified(tmp_path / "export", {"model.safetensors": 700})
    path = exported.path / "certificate.json"
    again = json.loads(path.read_text()) | {"num_threads": 7}
    publish(exported, destination)
    path.write_text(json.dumps(again))
    files = exported.files | digest_files(exported.path, ["certificate.json"])
    assert publish(exported.model_copy(update={"files": files}).commit(), destination).reused


def test_a_damaged_publication_is_refused_and_not_overwritten(exported: Export, destination: str) -> None:
    publish(exported, destination)
    filesystem, path = fsspec.core.url_to_fs(destination)
    filesystem.pipe_file(f"{path}/config.json", b"{}")
    with pytest.raises(PublicationError, match=r"damaged copy of this publication: .*config\.json"):
        publish(exported, destination)
    assert filesystem.cat_file(f"{path}/config.json") == b"{}"


def test_files_of_others_at_the_destination_are_never_overwritten(exported: Export, destination: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(destination)
    filesystem.makedirs(path, exist_ok=True)
    filesystem.pipe_file(f"{path}/config.json", b"mine")
    for attempt in (check_destination, lambda url: publish(exported, url)):
        with pytest.raises(PublicationError, match=r"not a publication .*publish to another|no publication \(config"):
            attempt(destination)
    assert names(destination) == {"config.json"}
    assert filesystem.cat_file(f"{path}/config.json") == b"mine"


@pytest.mark.parametrize("survivors", range(6))
def test_an_upload_interrupted_at_any_file_can_be_completed(
    exported: Export, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, survivors: int
) -> None:
    put_file, sent = MemoryFileSystem.put_file, []

    def cut_off(self: MemoryFileSystem, local: str, remote: str, **settings: Any) -> None:
        if len(sent) == survivors:
            raise ConnectionError("cable pulled")
        sent.append(remote)
        put_file(self, local, remote, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", cut_off)
        with pytest.raises(PublicationError, match="cannot be written: the connection failed: cable pulled"):
            publish(exported, STORE)
    assert len(names(STORE)) == 1 + survivors
    assert "certificate.json" in names(STORE)
    check_destination(STORE)
    publish(exported, STORE)
    verify(STORE)


def after_each_file(monkeypatch: pytest.MonkeyPatch, then: Callable[[MemoryFileSystem, str], Any]) -> None:
    """Have the store do something after it has received a file."""
    put_file = MemoryFileSystem.put_file

    def received(self: MemoryFileSystem, local: str, remote: str, **settings: Any) -> None:
        put_file(self, local, remote, **settings)
        then(self, remote)

    monkeypatch.setattr(MemoryFileSystem, "put_file", received)


def test_an_unfinished_upload_of_another_export_is_left_alone(exported: Export, store: MemoryFileSystem) -> None:
    store.pipe_file("/bucket/models/t5/certificate.json", (exported.path / "certificate.json").read_bytes() + b" ")
    with pytest.raises(PublicationError, match=r"holds no publication \(certificate\.json\)"):
        publish(exported, STORE)


def test_a_manifest_that_appears_during_the_upload_is_not_overwritten(
    exported: Export, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_each_file(monkeypatch, lambda self, _: self.pipe_file("/bucket/models/t5/manifest.json", b"theirs"))
    with pytest.raises(PublicationError, match=r"manifest\.json is not what was uploaded: another process"):
        publish(exported, STORE)
    assert store.cat_file("/bucket/models/t5/manifest.json") == b"theirs"


def test_a_store_that_corrupts_files_is_detected_before_the_manifest_is_written(
    exported: Export, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(self: MemoryFileSystem, remote: str) -> None:
        if remote.endswith("config.json"):
            self.pipe_file(remote, b"garbled")

    after_each_file(monkeypatch, corrupt)
    with pytest.raises(DigestMismatch, match=r"config\.json has 7 bytes"):
        publish(exported, STORE)
    assert "manifest.json" not in names(STORE)


def test_of_two_publishers_at_once_the_second_is_refused(exported: Export, tmp_path: Path) -> None:
    with filling(tmp_path / "published"), pytest.raises(StorageError, match="another process"):
        publish(exported, str(tmp_path / "published"))


def test_files_left_by_a_killed_publication_are_removed(exported: Export, tmp_path: Path) -> None:
    (tmp_path / ".published.partial").mkdir()
    (tmp_path / ".published.partial/config.json").write_text("half")
    publish(exported, str(tmp_path / "published"))
    verify(tmp_path / "published")
    assert not (tmp_path / ".published.partial").exists()


def run_full(*_: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("copy", "error", "said"),
    [
        (run_full, PublicationError, "No space left"),
        (lambda _, target: target.write_text("garbled"), DigestMismatch, "has 7 bytes"),
    ],
)
def test_a_copy_that_fails_or_is_corrupted_leaves_no_files(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    copy: Callable[..., Any], error: type[Exception], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("t5train.release.publication.copy_durably", copy)
    with pytest.raises(error, match=said):
        publish(exported, str(tmp_path / "there/published"))
    assert not list((tmp_path / "there").iterdir())


def test_secrets_of_a_url_are_in_no_log_manifest_or_error(
    exported: Export, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: MemoryFileSystem, path: str) -> bool:
        raise OSError(f"no access to {path} or {url}")

    url = "memory://user:hunter2@bucket/t5?token=xyzzy"
    with caplog.at_level(logging.DEBUG, "t5train"):
        published = publish(exported, url)
    assert published.url == "memory://bucket/t5"
    output = caplog.text + store.cat_file("/user:hunter2@bucket/t5?token=xyzzy/manifest.json").decode()
    monkeypatch.setattr(MemoryFileSystem, "exists", fails)
    with pytest.raises(PublicationError) as caught:
        publish(exported, url)
    output += str(caught.value)
    assert "hunter2" not in output
    assert "xyzzy" not in output
    assert caught.value.__suppress_context__


class TestCheckDestination:
    """What ``check_destination`` refuses before anything is trained."""

    def test_a_free_destination_passes_and_stays_unchanged(self, destination: str) -> None:
        check_destination(destination)
        assert not names(destination)
        assert not names(os.path.dirname(destination))  # noqa: PTH120 - also of URLs

    def test_a_publication_of_the_same_spec_passes_and_one_of_another_does_not(
        self, exported: Export, destination: str
    ) -> None:
        publish(exported, destination)
        check_destination(destination, spec_fingerprint=exported.inputs["spec"])
        with pytest.raises(PublicationError, match="another publication"):
            check_destination(destination, spec_fingerprint="f" * 64)

    @pytest.mark.parametrize(
        ("url", "remedy"), [("s3://bucket/t5", "pip install 'boto3>="), ("gs://bucket/t5", "pip install gcsfs")]
    )
    def test_a_missing_package_is_named(self, url: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(url: str) -> None:
            raise ImportError("Install it")

        monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
        monkeypatch.setitem(sys.modules, "boto3.session", None)
        with pytest.raises(PublicationError, match=remedy):
            check_destination(url)

    def test_a_store_that_cannot_guarantee_all_or_nothing_is_warned_of(
        self, store: MemoryFileSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert not store.store
        check_destination(str(tmp_path / "published"))
        assert not caplog.records
        check_destination(STORE)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"{STORE} is not in S3" in caplog.text

    def test_an_unknown_protocol_is_refused(self) -> None:
        with pytest.raises(PublicationError, match=r"nowhere://a/b .*Protocol not known: nowhere"):
            check_destination("nowhere://a/b")

    @pytest.mark.parametrize(
        ("path", "problem"),
        [
            ("file", "is not a publication"),
            ("file/t5", "not writable"),
            ("link", "is a symbolic link or a mount point"),
            ("dangling", "is a symbolic link or a mount point"),
            ("/proc/self/t5", "not writable"),
        ],
    )
    def test_a_path_where_no_folder_can_appear_is_refused(self, tmp_path: Path, path: str, problem: str) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "empty")
        (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
        with pytest.raises(PublicationError, match=problem):
            check_destination(str(tmp_path / path))

    def test_a_store_that_cannot_be_written_is_refused(self, store: MemoryFileSystem) -> None:
        store.pipe_file("/bucket", b"a file where a folder would have to be")
        with pytest.raises(PublicationError, match="cannot be written"):
            check_destination(STORE)

    def test_too_little_disk_space_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="needs 1,000,000,000,000,000,000 bytes"):
            check_destination(str(tmp_path / "t5"), needed_bytes=10**18)


@pytest.mark.parametrize("location", ["s3:/bucket/t5", "S3://bucket/t5", ""])
def test_a_mistyped_url_is_never_taken_for_a_folder(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for use in (check_destination, verify, lambda url: publish(exported, url), lambda url: fetch(url, tmp_path / "to")):
        with pytest.raises(InputError, match=r"a URL does not begin with|the path or URL is empty"):
            use(location)
    assert sorted(tmp_path.rglob("*")) == before
