"""Real errors of the operating system are reported in one line that names the path and the remedy."""

import errno
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.errors import DigestMismatch, StorageError
from t5train.files.atomic import remove_folder, write_text
from t5train.files.os_errors import as_storage_errors, cause_of, explain, in_one_line, library_errors, naming, reason
from t5train.records.digests import digest_file, digest_safetensors
from tests.support.small_disk import run_with_disk


def _read_bad_sector(_: Path) -> None:
    """Address 0 of this process is not mapped, so the kernel answers a read with EIO."""
    with open("/proc/self/mem", "rb") as memory:
        memory.read(1)


def _copy_to_a_full_disk(folder: Path) -> None:
    (folder / "source").write_bytes(bytes(1 << 20))
    with open(folder / "source", "rb") as source, open("/dev/full", "wb") as disk:
        shutil.copyfileobj(source, disk)


def _loop(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "loop").read_text()


def _rename_over_folder(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "full" / "entry").mkdir(parents=True)
    (folder / "file").replace(folder / "full")


def _too_many_files(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 2, limits[1]))
    try:
        files = [open(folder / f"{number}", "w") for number in range(1000)]  # noqa: SIM115 - the last one fails
        assert not files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("act", "path", "words"),
    [
        (_read_bad_sector, "/proc/self/mem", "Input/output error; the disk or its connection fails: see `dmesg`"),
        (_copy_to_a_full_disk, "/dev/full", "No space left on device; free some space there"),
        (_loop, "loop", "Too many levels of symbolic links; the path's symbolic links form a loop"),
        (lambda folder: (folder / ("n" * 300)).read_text(), "nnnn", "File name too long; use a shorter path"),
        (lambda folder: folder.read_text(), "", "Is a directory; a file is expected there"),
        (_rename_over_folder, "file -> ", "Is a directory"),
        (_too_many_files, "", "Too many open files; this process may not open more files: raise the limit"),
        (lambda folder: (folder / "absent").read_text(), "absent", "No such file or directory; check the path"),
    ],
)
def test_an_error_is_reported_with_path_and_remedy(
    tmp_path: Path, act: Callable[[Path], object], path: str, words: str
) -> None:
    with pytest.raises(StorageError) as caught, as_storage_errors():
        act(tmp_path)
    line = str(caught.value)
    assert path in line
    assert words in line
    assert "/" in line.partition(":")[0]
    assert "\n" not in line
    cause = cause_of(caught.value)
    assert cause is not None
    assert explain(cause) == line


def test_a_file_system_without_free_inodes_is_told_apart_from_a_full_one(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from t5train.files.os_errors import explain\n"
        "try:\n    [(Path(sys.argv[1]) / str(n)).touch() for n in range(99)]\n"
        "except OSError as error:\n    print(explain(error))"
    )
    result = run_with_disk(tmp_path, "1m,nr_inodes=9", program, str(tmp_path))
    assert re.match(f"{tmp_path}/\\d+: No space left on device; the disk has no free inodes", result.stdout)


def test_the_remedy_for_a_disk_that_fails_is_not_to_free_space(tmp_path: Path) -> None:
    for number in (errno.EIO, errno.EROFS):
        assert "free" not in reason(OSError(number, os.strerror(number)), tmp_path)


def test_a_file_that_cannot_be_replaced_is_named_instead_of_its_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder" / "entry").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path / "folder", "text")
    assert explain(caught.value).startswith(f"{tmp_path / 'folder'}: Is a directory; ")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_network_error_is_not_reported_as_a_storage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionRefusedError) as caught, as_storage_errors():
        socket.create_connection(address)
    assert explain(caught.value) == "Connection refused"
    assert explain(OSError('Not found: "x":\n No such thing')) == 'Not found: "x": No such thing', "of a library"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("All connection attempts\nfailed"), "All connection attempts failed"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (StorageError("full"), "full"),
        (KeyError("a b"), "KeyError: 'a b'"),
        (ValueError("loss"), "ValueError: loss"),
        (AssertionError(), "AssertionError"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_class_of_an_error_is_named_only_if_its_message_says_nothing(error: Exception, said: str) -> None:
    assert in_one_line(error) == said


def test_a_failed_read_names_the_file_unless_the_error_names_another(tmp_path: Path) -> None:
    memory = Path("/proc/self/mem")
    for digest in (digest_file, digest_safetensors):
        with pytest.raises(OSError, match="Input/output error") as caught:
            digest(memory)
        assert caught.value.filename == str(memory)
    with pytest.raises(FileNotFoundError) as missing, naming(tmp_path / "this"):
        (tmp_path / "other").read_text()
    assert missing.value.filename == str(tmp_path / "other")


def test_an_error_of_a_library_about_its_files_names_their_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=rf"{tmp_path}: tokenizers failed.*\(Stale file handle"),
        library_errors("tokenizers", tmp_path),
    ):
        raise Exception("Stale file handle (os error 116)")  # noqa: TRY002 - as tokenizers does
    with pytest.raises(DigestMismatch, match="it differs"), library_errors("tokenizers", tmp_path):
        raise DigestMismatch("it differs")


def test_a_file_that_cannot_be_removed_is_named_with_its_full_path() -> None:
    """procfs lets nobody remove anything, not even root."""
    with pytest.raises(PermissionError) as caught:
        remove_folder(Path("/proc/self/fdinfo"))
    assert Path(caught.value.filename).parent == Path("/proc/self/fdinfo")


def test_a_file_of_a_finished_stage_that_is_gone_is_made_again(tmp_path: Path) -> None:
    (tmp_path / ".claim").touch()
    with pytest.raises(FileNotFoundError) as gone:
        (tmp_path / "tokens-00000.bin").read_bytes()
    assert explain(gone.value).endswith("; check the path"), "the stage has not finished"
    (tmp_path / "manifest.json").touch()
    assert explain(gone.value) == (
        f"{tmp_path}/tokens-00000.bin: No such file or directory; a finished stage has lost this file: "
        "`t5-pretrain run` with the same settings makes it again"
    )
    (tmp_path / ".claim").unlink()
    assert explain(gone.value).endswith("; check the path")
