"""What the programs of ranks in tests have in common."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups

from t5train.spec import build
from t5train.spec.rank_job import TrainJob


def run(main: Callable[[Path], None]) -> NoReturn:
    """Run a program for the file that the command line names, and end this process at once.

    While an interpreter ends, torch's threads sometimes abort the process, whose results are written by then.
    """
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_jobs(report: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Write what ``report`` returns for each job of the JSON file to ``{name}.rank-{rank}.json`` beside it."""

    def main(jobs: Path) -> None:
        deepspeed.init_distributed()
        for entry in json.loads(jobs.read_text()):
            forget_groups()
            found = report(entry)
            jobs.with_name(f"{entry['name']}.rank-{comm.get_rank()}.json").write_text(json.dumps(found))
            comm.barrier()
        comm.destroy_process_group()

    run(main)


def forget_groups() -> None:
    """Make DeepSpeed forget the groups of earlier engines. It would use the largest, and the grid of a pipeline.

    It also numbers parameters from 0 again, as checkpoints of ZeRO 3 have these numbers.
    """
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups.mpu = None
    Init.param_id = 0


def job_of(entry: dict[str, Any], **more: Any) -> TrainJob:
    return TrainJob(
        spec=build(entry["spec"]),
        run_fingerprint="0" * 64,
        run_folder=entry["run_folder"],
        shards_folder=entry["shards"],
        **{"resume_tag": None} | more,
    )
