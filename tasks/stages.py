"""The stages as Prefect and the command line name them, and the decorator that makes a task of a stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from prefect import Task, task

from infra.head.launch import start_record
from t5train.errors import encodable
from t5train.files.os_errors import as_storage_errors
from t5train.report.failure_report import note_stage
from t5train.spec import RunSpec
from tasks.run_options import TASK_OPTIONS

P = ParamSpec("P")
R = TypeVar("R")


class Stage(NamedTuple):
    """A stage: the key of its artifacts, which must not change, and the title that people read."""

    key: str
    title: str


SERVER = Stage("server", "Start Prefect's server")
"""What `t5-pretrain run` does before the flow begins."""
CORPUS = Stage("corpus", "Get the text")
TOKENIZER = Stage("tokenizer", "Train the tokenizer")
SHARDS = Stage("shards", "Tokenise")
TRAIN = Stage("train", "Train")
CONSOLIDATE = Stage("consolidate", "Consolidate to fp32")
EXPORT = Stage("export", "Export to Hugging Face")
CERTIFY = Stage("certify", "Certify")
PUBLISH = Stage("publish", "Publish")
SUMMARY = Stage("summary", "Summary")
_NUMBERED = (SERVER, CORPUS, TOKENIZER, SHARDS, TRAIN, CONSOLIDATE, EXPORT, CERTIFY, PUBLISH)


def numbered(stage: Stage) -> str:
    """Return the title of a stage with its number, such as ``5/9 Train``."""
    return f"{_NUMBERED.index(stage) + 1}/{len(_NUMBERED)} {stage.title}"


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
