"""The stages as Prefect and the command line name them, and the decorator that makes a task of a stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from t5train.files.os_errors import as_storage_errors
from t5train.report.failure_report import note_stage

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

    Prefect neither caches nor stores its result; ``options`` are further options of the task.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        guarded = _naming_stage(stage)(as_storage_errors()(function))
        return task(name=stage.title, task_run_name=stage.title, cache_policy=NO_CACHE, **options)(guarded)

    return decorate


@contextmanager
def _naming_stage(stage: Stage) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        note_stage(error, stage.title)
        raise
