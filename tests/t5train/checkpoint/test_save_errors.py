"""If torch cannot write a checkpoint, the error names the path and the disk's reason."""

import json
from pathlib import Path

import pytest

from t5train.checkpoint.archive_writing import naming_folder
from t5train.errors import DiskFailed, DiskFull, T5TrainError
from t5train.files import error_report
from tests.support.small_disk import run_with_disk

SAVE = """
import subprocess, sys
from pathlib import Path
import torch
from t5train.files.error_report import report
from t5train.checkpoint.archive_writing import naming_folder

folder, rank_files, read_only = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "read-only"
if read_only:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
try:
    with naming_folder(folder):
        torch.save(torch.zeros(1 << 20), folder / "x.pt")
except Exception as error:
    report(rank_files, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk", "kind", "words"),
    [
        ("full", DiskFull, "No space left on device; free some space there"),
        ("read-only", DiskFailed, "Read-only file system; check `dmesg` for a disk error"),
    ],
)
def test_the_report_names_the_folder_and_the_reason(
    tmp_path: Path, disk: str, kind: type[T5TrainError], words: str
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    ended = run_with_disk(folder, "1m", SAVE, str(folder), str(tmp_path / "rank-00000"), disk)
    assert ended.returncode == 0, ended.stderr
    reported = error_report.read(tmp_path / "rank-00000")
    assert type(reported) is kind, json.loads((tmp_path / "rank-00000.error.json").read_text())
    assert str(reported).startswith(f"{folder}: {words}")


def test_a_transient_disk_error_is_reported_with_torchs_message(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFailed, match=r"torch could not write.*unexpected pos 704.*can be written now"),
        naming_folder(tmp_path),
    ):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with pytest.raises(RuntimeError, match="Connection closed"), naming_folder(tmp_path):
        raise RuntimeError("Connection closed by peer")
