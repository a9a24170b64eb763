"""Train one run after the other in one launch, because every launch takes ten seconds. For ``layout_equality.py``.

``python layout_ranks.py JOBS`` reads the JSON file JOBS, a list of ``{"spec", "shards", "run_folder"}``.
"""

import json
from pathlib import Path

import deepspeed
from deepspeed import comm
from deepspeed.utils import groups

from t5train.spec import build
from t5train.spec.rank_job import TrainJob
from t5train.train.loop import Trainer
from tests.support.training import rank_main


def main(jobs: Path) -> None:
    deepspeed.init_distributed()
    for entry in json.loads(jobs.read_text("utf-8")):
        groups.mpu = None  # otherwise, DeepSpeed still uses the groups of a previous pipeline
        folder = Path(entry["run_folder"])
        job = TrainJob(
            spec=build(entry["spec"]),
            run_fingerprint="0" * 64,
            run_folder=folder,
            shards_folder=Path(entry["shards"]),
            resume_tag=None,
        )
        Trainer(job).run()
        comm.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    rank_main.run(main)
