"""Restore a run's newest intact checkpoint from a real S3 server."""

from pathlib import Path

import pytest

from t5train.checkpoint import tags
from t5train.errors import NothingVerifies, StorageError
from t5train.files.run_folder import CHECKPOINTS, METRICS, SET_ASIDE
from t5train.progress import silent
from t5train.release.checkpoint_store.bucket_checkpoints import restore_newest
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.verification import manifest_in
from tests.support.checkpoints import small_tags
from tests.support.checkpoints.stored_runs import claim, ledger_at, store
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow


@pytest.fixture
def stored(destination: str, tmp_path: Path) -> str:
    """The URL of a run with checkpoints of steps 100 and 200."""
    lost, this = tmp_path / "lost", claim(destination)
    lost.mkdir()
    (lost / METRICS).write_text('{"step": 100}\n')
    store(this, lost, 100)
    store(this, lost, 200)
    this.release()
    return destination


def restore(url: str, run_folder: Path, held: str | None = None) -> list[str]:
    """Restore a run, and return its complete checkpoints, whose files are verified."""
    run_folder.mkdir(exist_ok=True)
    restore_newest(BucketFolder(url), ledger_at(url), run_folder, held, silent)
    found = tags.complete_tags(run_folder / CHECKPOINTS)
    for tag in found:
        tags.require_complete(run_folder / CHECKPOINTS / tag)
    return found


def damage(reader: Reader, url: str, tag: str) -> None:
    name = next(name for name in reader.keys(url) if name.startswith(tag) and name.endswith("part0.pt"))
    reader.put(url, name, b"\x00" * 100)


def test_the_newest_checkpoint_is_restored_with_the_metrics(stored: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert restore(stored, run) == ["step-00000200"]
    assert not (run / SET_ASIDE).exists()
    assert (run / METRICS).read_text() == '{"step": 100}\n'
    assert {path.name for path in (run / CHECKPOINTS / "step-00000200").iterdir()} == {
        *("part0.pt", "part1.pt", "rank-00000.json", "rank-00001.json")
    }


def test_a_run_that_has_it_or_a_newer_one_restores_nothing(stored: str, tmp_path: Path) -> None:
    for held in ("step-00000200", "step-00000300"):
        assert restore(stored, tmp_path / held, held) == []


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    stored: str, tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    damage(reader, stored, "step-00000200")
    assert restore(stored, tmp_path / "run") == ["step-00000100"]
    assert "step-00000200 in s3://" in caplog.text


def test_if_all_are_damaged_the_run_does_not_begin_at_step_0(stored: str, tmp_path: Path, reader: Reader) -> None:
    for tag in ("step-00000100", "step-00000200"):
        damage(reader, stored, tag)
    with pytest.raises(NothingVerifies, match=r"step-00000200: .*; step-00000100: .*--begin-again"):
        restore(stored, tmp_path / "run")


def test_an_unfinished_checkpoint_in_the_way_is_set_aside(stored: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun = small_tags.save(run / CHECKPOINTS, 200)
    (begun / "rank-00001.json").unlink()
    assert restore(stored, run) == ["step-00000200"]
    assert next((run / SET_ASIDE).iterdir()).name.startswith("step-00000200")


def test_nothing_is_set_aside_for_a_checkpoint_whose_files_have_names_that_file_systems_confuse(
    stored: str, tmp_path: Path, reader: Reader
) -> None:
    run, folder = tmp_path / "run", ledger_at(stored).checkpoints[-1].folder
    record = manifest_in(BucketFolder(stored).below(folder))
    files = record.files | {"PART0.pt": record.files["part0.pt"]}
    manifest = record.model_copy(update={"files": files}).sealed().manifest_text()
    reader.put(stored, f"{folder}/manifest.json", manifest.encode())
    begun = small_tags.save(run / CHECKPOINTS, 200)
    (begun / "rank-00001.json").unlink()
    with pytest.raises(StorageError, match=r"names both 'part0\.pt' and 'PART0\.pt'"):
        restore(stored, run)
    assert begun.is_dir()
    assert not (run / SET_ASIDE).exists()


def test_an_interrupted_copy_continues(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = tmp_path / "run", list[tuple[str, int]]()
    chunks = BucketFolder.chunks

    def interrupted(self: BucketFolder, name: str, start: int = 0) -> object:
        read.append((name.rpartition("/")[2], start))
        if name.endswith("part1.pt"):
            raise KeyboardInterrupt
        return chunks(self, name, start)

    with monkeypatch.context() as patched:
        patched.setattr(BucketFolder, "chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore(stored, run)
    assert not tags.complete_tags(run / CHECKPOINTS)
    assert restore(stored, run) == ["step-00000200"]
