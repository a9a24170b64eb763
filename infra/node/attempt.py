"""An attempt's folder on a machine of the run: made before ranks start, packed and removed after they have ended."""

import gzip
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

from infra import processes
from infra.attempts import attempt, lease
from infra.environment import ENVIRONMENT
from infra.node.end import MEETING, remove_segments
from infra.node_folder import attempt_folder
from infra.node_store.ownership import require_owner_of
from t5train.atomic import write_json, write_text
from t5train.errors import StorageError
from t5train.run_files import ATTEMPT_SPEC

_KEPT_BYTES = 32 << 20
"""Of a log that is longer, the end is gathered."""


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Make the folder of attempt ``run_id``, with what guard and ranks are to know; it must not be there yet.

    ``attempt``, ``environment`` and ``meeting`` are JSON, ``files`` are texts by name. ``owner`` is the unique id of
    the run, if its ranks write on this machine's own disk; RunOwned is raised if another head has the run there by now.
    """
    _require_own_run(request)
    folder = attempt_folder(request["run_id"])
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise StorageError(f"{folder} is there already: another head prepared this very attempt") from None
    write_json(folder / ENVIRONMENT, request["environment"])
    write_json(folder / MEETING, request["meeting"])
    for name, text in request["files"].items():
        write_text(folder / Path(name).name, text)
    attempt.of_facts(folder, request["attempt"]).write()
    remove_segments(folder)  # nothing listens there, so what lies there is a dead run's
    lease.begin(folder)
    return {"folder": str(folder), "boot_id": processes.boot_id()}


def _require_own_run(request: dict[str, Any]) -> None:
    if request["owner"] is not None:
        job = json.loads(request["files"][ATTEMPT_SPEC])
        require_owner_of(Path(job["run_folder"]), request["owner"])


def logs(request: dict[str, Any]) -> None:
    """Write the files of attempt ``run_id`` to stdout, as a gzipped tar; its environment stays here."""
    folder = attempt_folder(request["run_id"])
    with (
        gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", compresslevel=1) as stdout,
        tarfile.open(fileobj=stdout, mode="w|") as packed,
    ):
        for path in sorted(folder.glob("*")):
            if path.name != ENVIRONMENT:
                _pack(packed, path)


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the folder of attempt ``run_id``, if it is there."""
    folder = attempt_folder(request["run_id"])
    if folder.exists():
        shutil.rmtree(folder)
    return {}


def _pack(packed: tarfile.TarFile, path: Path) -> None:
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _KEPT_BYTES))
        content = file.read(_KEPT_BYTES)  # read before it is told how long it is: a log may still grow
    member = tarfile.TarInfo(path.name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(path.stat().st_mtime)
    packed.addfile(member, io.BytesIO(content))
