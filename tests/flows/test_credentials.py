"""A whole run that publishes to S3 leaves the credentials nowhere: in no argument, environment, file, object or log."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from infra.node.processes import RUN_ID_VARIABLE
from tests.support.generated_text import TINY, write_jsonl
from tests.support.object_server import ObjectServer
from tests.support.prefect_servers import PROGRAM
from tests.support.s3_reader import Reader

pytestmark = pytest.mark.slow

SETTINGS = TINY | {
    "optimizer.global_batch_sequences": 8,
    "optimizer.num_steps": 20,
    "layout.micro_batch_sequences": 8,
    "storage.checkpoint_every_steps": 10,
    "storage.validate_every_steps": 20,
    "cluster.ranks": 1,
}
POLL_SECONDS = 0.2
RUN_SECONDS = 900


class Processes:
    """What processes of this machine show to others while a run is going on."""

    def __init__(self, canary: bytes, folder: Path) -> None:
        """``folder`` is the run's, which distinguishes its ranks from those of other tests."""
        self._canary, self._folder = canary, bytes(folder)
        self.showing = set[bytes]()
        """Command lines that contain the canary, and those of processes of ranks that have it in their environment."""
        self.of_ranks = set[str]()
        """Ids of processes of ranks that were seen."""

    def look(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            is_of_rank = f"{RUN_ID_VARIABLE}=".encode() in environment and self._folder in command
            if is_of_rank:
                self.of_ranks.add(process.name)
            if self._canary in command or (is_of_rank and self._canary in environment):
                self.showing.add(command)


def files_with(content: bytes, folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if content in path.read_bytes()]


def test_a_published_run_leaves_its_credentials_nowhere(
    s3: ObjectServer, destination: str, reader: Reader, tmp_path: Path, new_home: Callable[[Path], Path]
) -> None:
    key, secret = (s3.environment[f"AWS_{name}"].encode() for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    root, prefect, temporary = (tmp_path / name for name in ("root", "prefect", "tmp"))
    for folder in (root, prefect, temporary):
        folder.mkdir()
    new_home(root / "prefect")
    changes = SETTINGS | {
        "corpus.source": str(write_jsonl(tmp_path / "text.jsonl", 400)),
        "storage.publish_to": f"{destination}/model",
        "storage.publish_checkpoints_under": f"{destination}/checkpoints",
    }
    options = [argument for name, value in changes.items() for argument in ("--set", f"{name}={value}")]
    command = [sys.executable, "-c", PROGRAM, "run", "smoke", "--root", str(root), "--name", "canary", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(prefect), "TMPDIR": str(temporary), "PREFECT_LOGGING_LEVEL": "DEBUG"}
    processes, output = Processes(secret, root), tmp_path / "output.log"
    with open(output, "wb") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as run:
        deadline = time.monotonic() + RUN_SECONDS
        while run.poll() is None:
            processes.look()
            if time.monotonic() > deadline:
                run.kill()
            with suppress(subprocess.TimeoutExpired):
                run.wait(POLL_SECONDS)
    assert run.returncode == 0, output.read_text()[-4000:]
    reader.require_only(f"{destination}/model")
    assert json.loads(reader.content(f"{destination}/checkpoints/canary", "run.json"))["checkpoints"]

    assert processes.of_ranks
    databases = [path for path in files_with(f"{destination}/model".encode(), tmp_path) if ".db" in path.name]
    assert databases, "the flow run's parameters should be in Prefect's database, or this test looks elsewhere"
    objects = {name: reader.content(destination, name) for name in reader.keys(destination)}
    found = {
        "processes": processes.showing,
        "files": [*files_with(secret, tmp_path), *files_with(key, tmp_path)],
        "objects": [name for name, content in objects.items() if secret in content or key in content],
    }
    assert not any(found.values()), found
