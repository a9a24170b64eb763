"""Files that belong to a user, because no manifest lists them with their content."""

from pathlib import Path

import pytest

from t5train.errors import StorageError
from t5train.files.atomic import rename_aside
from t5train.files.output_folder import making
from t5train.records.changed_files import changed_files, keep_changed_files, unlisted_files
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("one", "two"):
        (out / name).write_text(name)
    Export(path=out, fingerprint="e" * 64, files=digest_files(out, ["one", "two"])).commit()
    return out


def test_added_edited_and_linked_files_count_as_changed_and_unchanged_ones_do_not(folder: Path) -> None:
    assert not changed_files(Export.load(folder))
    (folder / "one").write_text("edited")
    (folder / "results").mkdir()
    (folder / "results/mine").write_text("mine")
    (folder / "broken").symlink_to("nowhere")
    (folder / "two").unlink()  # nothing is left to keep
    assert changed_files(Export.load(folder)) == ["broken", "one", "results/mine"]
    assert unlisted_files(Export.load(folder)) == ["broken", "results/mine"]


def test_an_edited_file_is_moved_aside_before_its_stage_writes_it_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        (folder / "one").write_text(f"edited {number}")
        keep_changed_files(folder)
        assert (folder / f"one.aside-{number}").read_text() == f"edited {number}"
        assert f"{folder / 'one'} was changed: it was moved to {folder / f'one.aside-{number}'}" in caplog.text
        (folder / "one").write_text("one")
    keep_changed_files(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "one", "one.aside-1", "one.aside-2", "two"]


def test_a_file_that_cannot_be_moved_aside_is_an_error_that_names_both_paths(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone cannot be moved to .*gone\.aside-1: .*move .*gone .* yourself"):
        rename_aside(tmp_path / "gone")


def test_a_stage_removes_only_its_own_temporary_files(tmp_path: Path) -> None:
    with making(tmp_path / "stage", "f"):
        for name in (".shard.bin.0badcafe.tmp", ".notes.tmp"):
            (tmp_path / "stage" / name).touch()
    with making(tmp_path / "stage", "f"):
        assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == [".claim", ".notes.tmp"]
