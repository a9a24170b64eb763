"""A file is there whole or not at all, even when the writer is killed."""

import errno
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.errors import StorageError
from t5train.files.atomic import replacing, write_json, write_text

RunPython = Callable[..., subprocess.CompletedProcess[str]]

KILLED_AT = """
import os, pathlib, signal, sys
from t5train.files import atomic

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

place, path = sys.argv[1], pathlib.Path(sys.argv[2])
if place == "fsync":
    os.fsync = die
elif place == "rename":
    pathlib.Path.replace = die
elif place == "after rename":
    atomic.sync_folder = die
with atomic.replacing(path) as file:
    file.write(b"new" * 100_000)
    if place == "half-way":
        die()
"""


@pytest.mark.parametrize(
    ("killed_at", "found"),
    [("half-way", b"old"), ("fsync", b"old"), ("rename", b"old"), ("after rename", b"new" * 100_000)],
)
def test_a_writer_killed_at_any_step_leaves_a_complete_file(
    killed_at: str, found: bytes, tmp_path: Path, run_python: RunPython
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    result = run_python(KILLED_AT, killed_at, str(path))
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert path.read_bytes() == found


def test_an_error_while_writing_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_written_unchanged(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "file"
    write_text(path, text)
    assert path.read_bytes() == text.encode("utf-8")


def test_a_value_that_is_not_json_compliant_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"b": 1, "a": "ü"})
    assert json.loads(path.read_text("utf-8")) == {"a": "ü", "b": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": math.nan})
    assert json.loads(path.read_text("utf-8")) == {"a": "ü", "b": 1}


def test_a_full_disk_is_reported_with_a_remedy_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="file: No space left on device; free some space"):
        write_text(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
