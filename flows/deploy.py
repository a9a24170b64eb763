"""Creates the work pool and the deployments. Safe to repeat."""

import asyncio
import os
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.prefect_server import NEUTRAL_FOLDER
from t5train.errors import LaunchError

POOL, QUEUE = "t5-pretrain", "training"
ROOT_VARIABLE = "T5_PRETRAIN_ROOT"
_NOT_FROM_OUTSIDE = ("command", "env", "working_dir")
"""Removed from both parts of the job template, because a run could set them to execute its own code."""

RUNS_AT_A_TIME = 1
"""Limit of the queue. A deployment's limit is a lease, which a long run loses when the server restarts."""


def deploy(root: Path) -> None:
    """Create pool, queue, and the deployments of ``deployments/prefect.yaml``, whose runs use ``root``."""
    asyncio.run(_make_pool())
    with as_file(files("deployments") / "prefect.yaml") as declared:
        command = [
            sys.executable,
            "-P",
            "-m",
            "prefect",
            "--no-prompt",
            "deploy",
            "--all",
            "--prefect-file",
            str(declared),
        ]
        environment = os.environ | {ROOT_VARIABLE: str(root.absolute())}
        result = subprocess.run(
            command, env=environment, cwd=NEUTRAL_FOLDER, capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise LaunchError(f"Prefect could not create the deployments:\n{_end(result.stdout + result.stderr)}")


async def _make_pool() -> None:
    async with get_client() as client:
        await client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=_job_template()), overwrite=True
        )
        await _limit_queue(client)


async def _limit_queue(client: PrefectClient) -> None:
    try:
        queue = await client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        await client.create_work_queue(QUEUE, concurrency_limit=RUNS_AT_A_TIME, work_pool_name=POOL)
    else:
        await client.update_work_queue(queue.id, concurrency_limit=RUNS_AT_A_TIME)


def _job_template() -> dict[str, object]:
    """Return Prefect's default without settings that change the program.

    Output is not streamed through the worker, because a run would die with the worker.
    """
    template = ProcessWorker.get_default_base_job_template()
    for name in _NOT_FROM_OUTSIDE:
        del template["variables"]["properties"][name]
        del template["job_configuration"][name]
    template["variables"]["properties"]["stream_output"]["default"] = False
    return template


def _end(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-15:])
