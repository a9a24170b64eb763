"""What hosts do in place of predicting. Hosts are folders of this machine, whose names are in the path of a job."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from t5train.data.worker_processes import Advance, Json
from t5train.errors import InputError
from t5train.inference.predict.prediction_worker import part_name
from tests.support.waiting import await_that

ROWS_OF_PART = 10
GIVEN_UP = "given-up"
"""The name of the file that a test makes beside the hosts when the head has given one up."""


def write(job: Json, advance: Advance) -> dict[str, Any]:
    """Write each part: the rows and a file of the model, as this host has them, and its device."""
    folder = Path(job["folder"])
    read = [(folder / "rows.jsonl").read_text(), (Path(job["model"]) / "config.json").read_text(), job["device"]]
    for part in job["parts"]:
        advance(ROWS_OF_PART)
        (folder / part_name(part)).write_text(f"{part} {' '.join(read)}")
    return {}


def die_on_b(job: Json, advance: Advance) -> dict[str, Any]:
    """Kill the process on the host b, when it has reported some rows. The others wait until b is given up."""
    if _host(job).name == "b":
        advance(ROWS_OF_PART // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    await_that((_host(job).parent / GIVEN_UP).exists)
    return write(job, advance)


def hang_on_b(job: Json, advance: Advance) -> dict[str, Any]:
    """Never end on the host b. The others wait until b has begun."""
    begun = _host(job).parent / "begun"
    if _host(job).name == "b":
        begun.touch()
        threading.Event().wait()
    await_that(begun.exists)
    return write(job, advance)


def _host(job: Json) -> Path:
    return Path(job["folder"]).parents[3]


def refuse(job: Json, advance: Advance) -> dict[str, Any]:
    """Fail as a batch does that is too large."""
    raise InputError("cuda:0 has too little memory. Set a lower --batch-tokens")
