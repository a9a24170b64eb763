"""The peer: a fixed training loop of plain PyTorch and transformers. The step times of a case are ratios to its own.

``python -m t5train.regression.peer_loop JOB`` is one rank; JOB is a file with the JSON of a PeerJob. Rank 0 writes the
times of the steps, as the JSON of a StepTimes, to ``times.json`` beside it.

It imports nothing else of this project, so that a slower model, engine or data loader does not slow the peer as well.
Do not improve it: every change makes the ratios of all recorded baselines meaningless.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_STEPS = 10
TIMES_FILE = "times.json"


class PeerJob(NamedTuple):
    """What the peer trains."""

    config: dict[str, Any]
    """``config.json`` of a T5."""
    sequences: int
    """Sequences for each rank and step; one pass."""
    input_tokens: int
    target_tokens: int
    steps: int
    """How many steps are timed, after WARM_UP_STEPS."""


class StepTimes(NamedTuple):
    """Wall time and CPU time of each step, on rank 0."""

    seconds: list[float]
    cpu_seconds: list[float]


def train(job: PeerJob) -> StepTimes:
    """Train on the same random ids in every step, so that only arithmetic is measured. A collective of all ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from transformers import T5Config, T5ForConditionalGeneration

    generator = torch.Generator().manual_seed(0)
    shapes = {"input_ids": job.input_tokens, "labels": job.target_tokens}
    top = int(job.config["vocab_size"])
    batch = {name: torch.randint(2, top, (job.sequences, size), generator=generator) for name, size in shapes.items()}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**job.config))
    replica, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)

    times = StepTimes([], [])
    for _ in range(WARM_UP_STEPS + job.steps):
        started, computed = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = replica(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())
        times.seconds.append(time.perf_counter() - started)
        times.cpu_seconds.append(time.process_time() - computed)
    return StepTimes(*(taken[WARM_UP_STEPS:] for taken in times))


def main() -> None:
    """Run one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are environment variables."""
    from torch import distributed

    path = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    times = train(PeerJob(**json.loads(path.read_text("utf-8"))))
    if os.environ["RANK"] == "0":
        path.with_name(TIMES_FILE).write_text(json.dumps(times._asdict()), "utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
