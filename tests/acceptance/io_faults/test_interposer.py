"""The library makes every kind of system call fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.io_faults import interposer
from tests.acceptance.io_faults.traced_calls import normalised

PROGRAM = """
import errno, json, mmap, os, pickle, shutil, sys
from pathlib import Path
from tests.acceptance.io_faults.interposer import Call, Fault
from tests.acceptance.io_faults.trial import Trials

class Everything:
    name = "everything"
    def set_up(self, folder):
        return lambda: self.work(folder)
    def problems(self, folder, ending, failed):
        return []
    def work(self, folder):
        with open(folder / "file", "r+b") as file:
            file.read()
            file.write(b"more")
            file.flush()
            os.fsync(file.fileno())
            os.ftruncate(file.fileno(), 3)
            mmap.mmap(file.fileno(), 0).close()
        (folder / "made").mkdir()
        (folder / "file").rename(folder / "made" / "file")
        os.link(folder / "made" / "file", folder / "link")
        (folder / "made" / "file").stat()
        os.listdir(folder / "made")
        os.utime(folder / "link")
        os.chmod(folder / "link", 0o600)
        shutil.disk_usage(folder)
        (folder / "link").unlink()
        descriptor = os.open(folder, os.O_RDONLY)
        os.unlink("made/file", dir_fd=descriptor)
        os.rmdir("made", dir_fd=descriptor)
        os.close(descriptor)

template, folder = map(Path, sys.argv[1:])
trials = Trials(Everything(), template, folder)
calls, found = trials.calls(), []
for call in calls:
    for mode in ("once", "permanently"):
        outcome = trials.outcome(Fault(call, errno.EIO, mode))
        found.append([str(call), mode, outcome["fired"], outcome["error"], "Input/output error" in outcome["text"]])
print(json.dumps(found))
"""
KINDS = {
    "open", "read", "write", "fsync", "truncate", "mmap", "mkdir", "rename", "link", "stat", "readdir", "utime",
    "chmod", "statfs", "unlink", "rmdir",
}  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return interposer.build(tmp_path)


def test_each_call_fails_in_turn_with_the_injected_error(library: Path, tmp_path: Path) -> None:
    for name in ("template", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "template" / "file").write_bytes(b"content")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "template"), str(tmp_path / "folder")]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300).stdout
    found = json.loads(output)
    assert {call.split(" ")[0] for call, *_ in found} == KINDS
    for call, mode, fired, error, is_errno in found:
        assert fired >= 1, f"{call} {mode} was not reached"
        if not call.startswith("stat "):  # Python ignores some errors of its own stat calls
            assert (error, is_errno) == ("OSError", True), (
                f"{call} {mode} did not raise OSError with the injected error"
            )
    assert {call.split(" ")[0] for call, _, _, error, _ in found if error} == KINDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "replaced"),
    [
        (".", "."),
        ("runs/small/.run.json.1a2b3c4d.tmp", "runs/small/.run.json.*.tmp"),
        ("checkpoints/removed-0123abcd/x", "checkpoints/removed-*/x"),
        ("checkpoints/step-00000004/x", "checkpoints/step-00000004/x"),
        ("runs/.metrics-abcdefgh", "runs/.metrics-*"),
        ("runs/.metrics-abcdefgh/.metrics.jsonl.part", "runs/.metrics-*/.metrics.jsonl.part"),
        ("checkpoints/#742", "checkpoints/#*"),
        ("export/model.safetensors", "export/model.safetensors"),
        ("smoke-f00df00df00d/notes-fourteen", "smoke-f00df00df00d/notes-fourteen"),
    ],
)
def test_random_parts_of_a_path_are_replaced_by_asterisks(
    library: Path, tmp_path: Path, path: str, replaced: str
) -> None:
    code = "import os, sys; from pathlib import Path; from tests.acceptance.io_faults.interposer import *; " + (
        "region = Region(Path(sys.argv[1], 'region'), Path(sys.argv[1])); region.record(); attach(region.path); "
        "os.path.exists(os.path.join(sys.argv[1], sys.argv[2])); detach(); print(*[c.path for c in region.calls()])"
    )
    environment = os.environ | {"LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", code, str(tmp_path), path]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout
    assert output.split() == [replaced]
    assert normalised(str(tmp_path / path), tmp_path) == replaced, "strace's calls could not be compared"
