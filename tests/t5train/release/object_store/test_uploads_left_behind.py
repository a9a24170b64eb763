"""What uploads that did not win leave in a bucket: what is removed of it, and what never is."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from t5train.records.stage_records import Export, Publication
from t5train.release.object_store import bucket_publication
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.file_upload import FileUploads
from t5train.release.publication import publish
from tests.support.changed_answers import answering
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

MakeExport = Callable[..., Export]
SMALL = {"config.json": 700, "model.safetensors": 40_000, "tokenizer/spiece.model": 3_000}


def lose_machine(exported: Export, destination: str) -> None:
    """Upload an export, and lose it and its journal right before its manifest is written."""

    def lost(send: Callable[[], Any], name: str | None) -> Any:
        if name == "manifest.json":
            raise KeyboardInterrupt
        return send()

    with pytest.MonkeyPatch.context() as patch:
        answering(patch, "put_object", lost)
        with pytest.raises(KeyboardInterrupt):
            publish(exported, destination)
    shutil.rmtree(exported.path.parent)


def test_what_a_lost_machine_uploaded_is_removed_once_the_same_export_is_published_and_nothing_else(
    make_random_export: MakeExport, destination: str, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    lose_machine(make_random_export(sizes=SMALL), destination)
    (folder,) = {name.partition("/")[0] for name in reader.keys(destination)}
    others = {"0123456789ab-0123456789abcdef/model.safetensors", f"{folder[:12]}-notes/mine.txt", f"{folder}x/mine.txt"}
    for name in others:
        reader.put(destination, name, b"of somebody else")
    publish(make_random_export(sizes=SMALL), destination)  # its certificate is another one
    assert f"removing what uploads that were not published left in {destination}: {folder}" in caplog.text
    manifest = reader.require_all_or_nothing(destination)
    assert manifest is not None
    assert manifest["folder"] != folder
    published = {f"{manifest['folder']}/{name}" for name in manifest["files"]}
    assert reader.keys(destination) == {"manifest.json", *published, *others}


def test_nothing_of_others_is_removed_where_they_could_still_win(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_machine(make_random_export(sizes=SMALL), destination)
    left, call = reader.keys(destination), BucketFolder.call

    def unconditional(self: BucketFolder, sent: str, name: str | None = None, **arguments: Any) -> Any:
        return call(self, sent, name, **{key: value for key, value in arguments.items() if key != "IfNoneMatch"})

    with monkeypatch.context() as patch:
        patch.setattr(BucketFolder, "call", unconditional)
        publish(make_random_export(sizes=SMALL), destination)
    assert left < reader.keys(destination)

    def removed(send: Callable[[], Any], name: str | None) -> Any:
        if "/probe.txt" in str(name):
            reader.delete(destination, "manifest.json")
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "delete_object", removed)  # right before it would be decided what to remove
        publish(make_random_export("again", sizes=SMALL), destination)
    assert left < reader.keys(destination)


def test_an_upload_whose_objects_the_winner_removed_uses_the_publication_of_the_winner(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_random_export("first", sizes=SMALL), make_random_export("second", sizes=SMALL)
    winner = list[Publication]()

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        if name is not None and name.endswith("model.safetensors") and not winner:
            patch.undo()
            winner.append(publish(first, destination))
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "head_object", overtaken)  # the object was sent, and is looked up after it was removed
        published = publish(second, destination)
    assert published.reused
    assert published.folder == winner[0].folder
    reader.require_only(destination)


@pytest.mark.parametrize("moment", ["send_missing", "_commit"])
def test_what_another_process_removed_before_somebody_removed_its_publication_is_sent_again(
    make_random_export: MakeExport, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner = FileUploads if moment == "send_missing" else bucket_publication
    removed, then = list[str](), getattr(owner, moment)

    def remove_and(*arguments: Any) -> Any:
        if not removed:
            removed.extend(name for name in reader.keys(destination) if name.endswith("model.safetensors"))
            reader.delete(destination, removed[0])
        return then(*arguments)

    monkeypatch.setattr(owner, moment, remove_and)
    published = publish(make_random_export(sizes=SMALL), destination)
    assert removed == [f"{published.folder}/model.safetensors"]
    assert not published.reused
    reader.require_only(destination)
