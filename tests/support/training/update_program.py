"""The program that ranks run in test_fused_update.py: the same step with DeepSpeed's update and with the fused one.

``python update_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "shards", "run_folder"}]``, and writes
``{name}.rank-{rank}.json`` beside it for each job: relative distances by name.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.utils import groups
from torch import Tensor

from t5train.data.loader import Prefetched
from t5train.engine.partitions import inner_optimizer, masters_of
from t5train.spec import build
from t5train.spec.rank_job import TrainJob
from t5train.train import loop
from tests.support.training.fused_ranks import fused


def main(jobs: Path) -> None:
    deepspeed.init_distributed()
    for entry in json.loads(jobs.read_text()):
        expected, found = (_after_a_step(entry, is_fused) for is_fused in (False, True))
        distances = {name: _distance(found[name], expected[name]) for name in expected}
        jobs.with_name(f"{entry['name']}.rank-{comm.get_rank()}.json").write_text(json.dumps(distances))
        comm.barrier()
    comm.destroy_process_group()


def _after_a_step(entry: dict[str, Any], is_fused: bool) -> dict[str, Tensor]:
    """The gradient norm, and the optimizer's tensors on this rank."""
    groups._EXPERT_PARALLEL_GROUP.clear()  # DeepSpeed keeps groups of earlier engines, and would use the largest
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups.mpu = None  # otherwise DeepSpeed keeps the grid of an earlier pipeline
    job = TrainJob(
        spec=build(entry["spec"]),
        run_fingerprint="0" * 64,
        run_folder=entry["run_folder"],
        shards_folder=entry["shards"],
        resume_tag=None,
    )
    with fused() if is_fused else nullcontext():
        trainer = loop.Trainer(job)
        with Prefetched(loop.micro_batches(trainer.train_samples, trainer.spec, 0), 1) as batches:
            values, _ = trainer._take_step(batches)
    found = {"gradient norm": torch.tensor(values["gradient_norm"])}
    optimizer = inner_optimizer(trainer.engine)
    for number, master in enumerate(masters_of(trainer.engine)):
        state = optimizer.state_of(master)
        found |= {f"weights {number}": master.detach(), f"first moments {number}": state["exp_avg"]}
        found |= {f"second moments {number}": state["exp_avg_sq"], f"steps {number}": state["step"]}
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.engine.module.parameters()])
    return found | {"the model's weights": weights}


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
