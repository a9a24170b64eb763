"""The stages as Prefect and the command line name them, the options of flows and tasks, and what makes tasks of stages.

Prefect takes options that are left out from the user's settings or the server's. A user may want other flows to be
retried, or to store their results. Here, a failure is final unless the library says that it is transient, and results
are verified files of the library.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from infra.head.launch import start_record
from t5train.errors import encodable
from t5train.files.os_errors import as_storage_errors
from t5train.report.failure_report import note_stage
from t5train.spec import RunSpec

P = ParamSpec("P")
R = TypeVar("R")

_OF_BOTH: dict[str, Any] = {
    "retries": 0,
    "retry_delay_seconds": 0,
    "log_prints": False,
    "persist_result": False,
    # Nothing is stored. Without a place, Prefect would look for the user's and the server's default place, and fail if
    # that block does not exist.
    "result_storage": Path(os.devnull),
    "result_serializer": "pickle",
    "cache_result_in_memory": True,
    "timeout_seconds": None,
}

FLOW_OPTIONS: dict[str, Any] = _OF_BOTH | {"validate_parameters": True}
TASK_OPTIONS: dict[str, Any] = _OF_BOTH | {"cache_policy": NO_CACHE, "refresh_cache": False}


class Stage(NamedTuple):
    """A stage: the key of its artifacts, which must not change, and the title that people read."""

    key: str
    title: str


SERVER = Stage("server", "Start Prefect's server")
"""What `t5-pretrain run` and `finetune` do before the flow begins."""
CORPUS = Stage("corpus", "Get the text")
PAIRS = Stage("pairs", "Get the pairs")
TOKENIZER = Stage("tokenizer", "Train the tokenizer")
SHARDS = Stage("shards", "Tokenise")
PAIR_SHARDS = Stage("pair-shards", "Tokenise and pack")
TRAIN = Stage("train", "Train")
CONSOLIDATE = Stage("consolidate", "Consolidate to fp32")
EXPORT = Stage("export", "Export to Hugging Face")
EVALUATE = Stage("evaluate", "Evaluate on held-out pairs")
CERTIFY = Stage("certify", "Certify")
PUBLISH = Stage("publish", "Publish")
SUMMARY = Stage("summary", "Summary")
_OF_MODEL = (TRAIN, CONSOLIDATE, EXPORT, EVALUATE, CERTIFY, PUBLISH)
_PRETRAINING = (SERVER, CORPUS, TOKENIZER, SHARDS, *_OF_MODEL)
_FINE_TUNING = (SERVER, PAIRS, TOKENIZER, PAIR_SHARDS, *_OF_MODEL)


def numbered(stage: Stage, *, predicts: bool) -> str:
    """Return the title of a stage with its number, such as ``5/9 Train``.

    ``predicts`` is whether the run is evaluated on held-out pairs, ``RunSpec.predicts_held_out``.
    """
    every = _PRETRAINING if stage in _PRETRAINING else _FINE_TUNING  # what both have is at the same place
    of_flow = [each for each in every if predicts or each != EVALUATE]
    return f"{of_flow.index(stage) + 1}/{len(of_flow)} {stage.title}"


def stage_task(stage: Stage, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a task of a function. Its errors name the stage, and file system errors become StorageErrors.

    The record of the run's start names the stage, if an argument is the run's spec. Prefect neither caches nor stores
    the task's result; ``options`` are further options of the task.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        guarded = _naming_stage(stage)(as_storage_errors()(_recording(stage, function)))
        names = {"name": stage.title, "task_run_name": stage.title}
        return task(**TASK_OPTIONS | names | options)(guarded)

    return decorate


def _recording(stage: Stage, function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        for spec in (each for each in (*args, *kwargs.values()) if isinstance(each, RunSpec)):
            start_record.note_stage(spec.run_folder, stage.title)
        return function(*args, **kwargs)

    return recorded


@contextmanager
def _naming_stage(stage: Stage) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        note_stage(error, stage.title)
        # Prefect cannot send a state whose message has bytes that are not UTF-8, and shows the task as running.
        error.args = tuple(encodable(each) if isinstance(each, str) else each for each in error.args)
        raise
