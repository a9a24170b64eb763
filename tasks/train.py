"""Training as a Prefect task: tried again when what failed can pass, and resumed where it stood."""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from t5train.errors import T5TrainError
from t5train.os_errors import as_storage_errors
from t5train.records import Checkpoint, TokenShards
from t5train.spec import RunSpec
from tasks.stage_progress import StageProgress
from tasks.training_run import train_run

SECONDS_BEFORE_RETRY = 5


def can_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the failure is one that trying the same thing again can mend."""
    error = state.data
    return isinstance(error, T5TrainError) and error.retryable


@task(name="train", cache_policy=NO_CACHE, retry_delay_seconds=SECONDS_BEFORE_RETRY, retry_condition_fn=can_pass)
@as_storage_errors()
def train(spec: RunSpec, shards: TokenShards, adopt: bool = False) -> Checkpoint:
    """Train to the last step, from the newest complete checkpoint on; the caller holds the run's lock."""
    return train_run(spec, shards, StageProgress("train"), adopt=adopt)
