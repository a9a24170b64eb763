"""What uploads that did not win leave in a bucket: what is removed of it, and what never is."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from t5train.records.stage_records import Export, Publication
from t5train.release.object_store import bucket_publication
from t5train.release.object_store.file_upload import FileUploads
from t5train.release.publication import publish
from tests.support.changed_answers import answering, killed_before_the_manifest, unconditional
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow


def lose_machine(exported: Export, destination: str) -> None:
    """Upload an export, and lose it and its journal right before its manifest is written."""
    killed_before_the_manifest(exported, destination)
    shutil.rmtree(exported.path.parent)


def test_what_a_lost_machine_uploaded_is_removed_once_the_same_export_is_published_and_nothing_else(
    make_random_export: Callable[..., Export], destination: str, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    lose_machine(make_random_export(), destination)
    (folder,) = {name.partition("/")[0] for name in reader.keys(destination)}
    others = {"0123456789ab-0123456789abcdef/model.safetensors", f"{folder[:12]}-notes/mine.txt", f"{folder}x/mine.txt"}
    for name in others:
        reader.put(destination, name, b"of somebody else")
    publish(make_random_export(), destination)  # its certificate is another one
    assert f"removing what uploads that were not published left in {destination}: {folder}" in caplog.text
    manifest = reader.require_all_or_nothing(destination)
    assert manifest["folder"] != folder
    published = {f"{manifest['folder']}/{name}" for name in manifest["files"]}
    assert reader.keys(destination) == {"manifest.json", *published, *others}


def test_nothing_of_others_is_removed_where_they_could_still_win(
    make_random_export: Callable[..., Export], destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(send: Callable[[], Any], name: str | None) -> Any:
        if "/probe.txt" in str(name):
            reader.delete(destination, "manifest.json")
        return send()

    lose_machine(make_random_export(), destination)
    left = reader.keys(destination)
    with monkeypatch.context() as patch:
        unconditional(patch)
        publish(make_random_export(), destination)
    assert left < reader.keys(destination)
    with monkeypatch.context() as patch:
        answering(patch, "delete_object", removed)  # right before it would be decided what to remove
        publish(make_random_export("again"), destination)
    assert left < reader.keys(destination)


def test_an_upload_whose_objects_the_winner_removed_uses_the_publication_of_the_winner(
    make_random_export: Callable[..., Export], destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, winner = make_random_export("first"), make_random_export("second"), list[Publication]()

    def overtaken(send: Callable[[], Any], name: str | None) -> Any:
        if name is not None and name.endswith("model.safetensors") and not winner:
            patch.undo()
            winner.append(publish(first, destination))
        return send()

    with monkeypatch.context() as patch:
        answering(patch, "head_object", overtaken)  # the object was sent, and is looked up after it was removed
        published = publish(second, destination)
    assert (published.reused, published.folder) == (True, winner[0].folder)
    reader.require_only(destination)


@pytest.mark.parametrize(("owner", "moment"), [(FileUploads, "send_missing"), (bucket_publication, "_commit")])
def test_what_another_process_removed_before_somebody_removed_its_publication_is_sent_again(
    small: Export, destination: str, reader: Reader, monkeypatch: pytest.MonkeyPatch, owner: Any, moment: str
) -> None:
    removed, then = list[str](), getattr(owner, moment)

    def remove_and(*arguments: Any) -> Any:
        if not removed:
            removed.extend(name for name in reader.keys(destination) if name.endswith("model.safetensors"))
            reader.delete(destination, removed[0])
        return then(*arguments)

    monkeypatch.setattr(owner, moment, remove_and)
    published = publish(small, destination)
    assert removed == [f"{published.folder}/model.safetensors"]
    assert not published.reused
    reader.require_only(destination)
