"""The peer: a fixed training loop of plain PyTorch and transformers. The step times of a case are ratios to its own.

``python -m t5train.regression.peer_loop JOB`` is one rank; JOB is the JSON of a PeerJob. For every line ``STEPS`` on
standard input, the peer takes that many optimizer steps, and rank 0 answers with one line of JSON on standard output:
``{"seconds": [...], "cpu_seconds": [...]}``, one number for each step. It ends when standard input ends.

It imports nothing else of this project, so that a slower model, engine or data loader does not slow the peer as well.
Do not improve it: every change makes the ratios of all recorded baselines meaningless.
"""

import json
import os
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration


class PeerJob(NamedTuple):
    """What the peer trains."""

    config: dict[str, Any]
    """``config.json`` of a T5."""
    sequences: int
    """Sequences for each rank and step; one pass."""
    input_tokens: int
    target_tokens: int


def batch_of(job: PeerJob) -> dict[str, torch.Tensor]:
    """Return random ids. Every step trains on the same ones, so that only arithmetic is measured."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"input_ids": job.input_tokens, "labels": job.target_tokens}
    top = int(job.config["vocab_size"])
    return {name: torch.randint(2, top, (job.sequences, size), generator=generator) for name, size in shapes.items()}


class Peer:
    """A model, its replicas on the other ranks, and an optimizer."""

    def __init__(self, job: PeerJob) -> None:
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**job.config))
        self._model = DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._batch = batch_of(job)

    def step(self) -> None:
        """Take one optimizer step."""
        self._optimizer.zero_grad()
        loss = self._model(**self._batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        float(loss.detach())

    def timed(self, steps: int) -> dict[str, list[float]]:
        """Take steps; return the wall time and the CPU time of each, in seconds."""
        times: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
        for _ in range(steps):
            started, computed = time.perf_counter(), time.process_time()
            self.step()
            times["seconds"].append(time.perf_counter() - started)
            times["cpu_seconds"].append(time.process_time() - computed)
        return times


def main() -> None:
    """Run one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are environment variables."""
    distributed.init_process_group("gloo")
    peer = Peer(PeerJob(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        times = peer.timed(int(line))
        if os.environ["RANK"] == "0":
            sys.stdout.write(json.dumps(times) + "\n")
            sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
