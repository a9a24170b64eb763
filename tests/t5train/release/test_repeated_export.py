"""What happens to the folder of an earlier export: it is reused, made again or moved aside, and nothing is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import StorageError
from t5train.records.changed_files import changed_files
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export, set_damaged_aside
from t5train.release.export import export

MakeTrained = Callable[..., Any]


def test_an_export_is_reused_while_its_inputs_are_the_same(make_trained: MakeTrained, tmp_path: Path) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    assert not made.reused
    assert Export.load(tmp_path / "out") == made
    assert str(tmp_path / "out") in (tmp_path / "out/manifest.json").read_text()
    assert export(*trained, tmp_path / "out").reused


def test_an_export_with_the_card_of_another_version_is_made_again_unless_it_is_certified(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    card = made.path / "README.md"
    card.write_text(card.read_text().replace("## Verify", "## Check"))
    older = made.model_copy(update={"files": made.files | digest_files(made.path, ["README.md"])}).commit()
    (made.path / "certificate.json").write_text("{}")
    older.model_copy(update={"files": older.files | digest_files(made.path, ["certificate.json"])}).commit()
    assert export(*trained, tmp_path / "out").reused
    older.commit()
    (made.path / "certificate.json").unlink()
    assert not export(*trained, tmp_path / "out").reused
    assert "## Verify" in card.read_text()


@pytest.mark.parametrize("name", ["evaluation.json", "README.md", "results/mmlu.json"])
def test_files_that_somebody_added_or_edited_are_never_removed(
    make_trained: MakeTrained, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    trained = make_trained()
    out = export(*trained, tmp_path / "out").path
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    changed = trained._replace(weights=trained.weights.model_copy(update={"fingerprint": "f" * 64}))
    export(*changed, out).verify()
    assert (tmp_path / "out.aside-1" / name).read_text() == "mine"
    moved = f"was moved to {tmp_path / 'out.aside-1'}, because files in the folder were added or changed: {name}"
    assert moved in caplog.text
    assert not changed_files(Export.load(out))


def test_a_damaged_export_is_made_again_and_folders_that_were_moved_aside_are_not_overwritten(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    for number in (1, 2):
        (export(*trained, tmp_path / "out").path / "config.json").write_text(str(number))
    again = export(*trained, tmp_path / "out")
    assert not again.reused
    again.verify()
    assert [(tmp_path / f"out.aside-{number}/config.json").read_text() for number in (1, 2)] == ["1", "2"]


def test_an_export_without_a_readable_manifest_is_moved_aside_whole(make_trained: MakeTrained, tmp_path: Path) -> None:
    out = export(*make_trained(), tmp_path / "out").path
    (out / "notes.txt").write_text("mine")
    (out / "manifest.json").write_text("{")
    set_damaged_aside(out)
    assert (tmp_path / "out.aside-1/notes.txt").read_text() == "mine"
    assert not out.exists()


def test_an_export_of_another_run_is_left_alone_and_both_runs_are_named(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    theirs = export(*trained, tmp_path / "out")
    trained.change_witness(run_fingerprint="9" * 64)
    weights = trained.weights.model_copy(update={"inputs": {"run": "9" * 64}})
    with pytest.raises(StorageError, match=r"of run 333333333333 .*the new export is of run 999999999999"):
        export(*trained._replace(weights=weights), tmp_path / "out")
    assert Export.load(tmp_path / "out") == theirs
    theirs.verify()
    export(*trained._replace(weights=weights), tmp_path / "other")


def test_an_export_of_other_weights_replaces_the_old_one_also_after_a_killed_removal(
    make_trained: MakeTrained, tmp_path: Path
) -> None:
    trained = make_trained()
    made = export(*trained, tmp_path / "out")
    made.path.rename(tmp_path / ".out.discarded")  # what a killed removal leaves
    export(*trained, tmp_path / "out")
    changed = trained._replace(weights=trained.weights.model_copy(update={"fingerprint": "f" * 64}))
    export(*changed, tmp_path / "out").verify()
    assert Export.load(tmp_path / "out").inputs["weights"] == "f" * 64
    assert not (tmp_path / ".out.discarded").exists()


def test_a_folder_that_is_not_an_export_is_left_alone(make_trained: MakeTrained, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="in the way"):
        export(*make_trained(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
