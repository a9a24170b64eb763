"""Measures training steps: the program that the ranks of ``t5-pretrain bench`` run.

It builds the same engine as training, and takes the same steps, on random tokens or on those of shards, which are
read as in training. Saving and validation are left out. Rank 0 writes the number of steps taken, and the result,
beside the job.
"""

import argparse
import faulthandler
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from t5train.data.samples.loader import PREFETCHED_BATCHES, Batch, Prefetched, Segments
from t5train.data.samples.span_corruption import row_lengths
from t5train.errors import T5TrainError
from t5train.files.atomic import write_json
from t5train.files.error_report import report
from t5train.files.heartbeat import Heartbeat
from t5train.files.run_folder import RANK_FILES
from t5train.spec import RunSpec
from t5train.train.step_profile import recorded_activities

WARM_UP_STEPS = 5
"""They include compilation, and CUDA graphs are recorded in the second and third."""
PROFILED_STEPS = 2
STEPS_FILE = "steps"
OTHER = "other"
IDLE = "accelerator idle"
_BATCHES = 4
_PAIRS_A_ROW = 8
_KINDS = {
    "optimizer update": ("update_chunks", "squares_of", "multi_tensor", "adam"),
    "communication": ("nccldev", "gloo", "allreduce", "all_gather"),
    "attention": ("queries_", "keys_backward", "bias_tiles", "bias_diagonals", "sdpa", "flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitkreduce", "mm", "linear"),
    "copies": ("memcpy", "memset", "copy_", "direct_copy"),
}
"""Kinds of work, and parts of the names of kernels (on the CPU, operators) that do it; the first that fits counts."""
_log = logging.getLogger(__name__)


class BenchmarkJob(BaseModel):
    """What to measure."""

    spec: RunSpec
    vocab_size: int
    steps: int
    shards_folder: Path | None = None
    """Token shards to read; None for random tokens."""

    @property
    def all_steps(self) -> int:
        """How many steps are taken in all."""
        return WARM_UP_STEPS + self.steps + PROFILED_STEPS


class Measured(BaseModel):
    """The result of rank 0."""

    device: str
    step_seconds: list[float]
    """Wall time of each step, without those before everything was compiled."""
    data_wait_seconds: list[float] | None
    """How much of it was spent waiting for data; None if none was read."""
    tokens_a_step: int
    mfu: float | None
    """Share of the peak that the median step used; None if the peak is not known."""
    memory_bytes: int
    """Peak memory of rank 0's tensors on its accelerator, from the start; on the CPU, of its process."""
    reserved_bytes: int
    """Peak memory that its allocator has taken from the accelerator, which includes unused parts."""
    host_memory_bytes: int
    """Peak memory of its process in host memory."""
    seconds_by_kind: dict[str, float]
    """Where a step's time went."""


def main() -> int:
    """Measure, and write ``measured.json`` beside the job."""
    parser = argparse.ArgumentParser(prog="python -m t5train.train.step_benchmark", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="JSON file of a BenchmarkJob")
    path = parser.parse_args().job
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1)  # the guard sends it to a rank that hangs, to get its traceback into the log
    job = BenchmarkJob.model_validate_json(path.read_text("utf-8"))
    try:
        with Heartbeat.of_rank(dict(job.spec.cluster.deadlines)) as heart:
            _measure_and_write(job, path.with_name("measured.json"), heart)
    except T5TrainError as error:
        if rank_files := os.environ.get(RANK_FILES):
            report(Path(rank_files), error)
        raise
    return 0


def _measure_and_write(job: BenchmarkJob, into: Path, heart: Heartbeat) -> None:
    import deepspeed
    from deepspeed import comm

    deepspeed.init_distributed()
    measured = measure(job, into.with_name(STEPS_FILE), heart)
    if comm.get_rank() == 0:
        write_json(into, measured.model_dump())
    comm.barrier()
    comm.destroy_process_group()


def measure(job: BenchmarkJob, steps_file: Path, heart: Heartbeat | None = None) -> Measured:
    """Take the steps; rank 0 writes the number of those taken to ``steps_file``. A collective of all ranks.

    ``heart`` reports the phases of the work.
    """
    from t5train.engine.engine import accelerator_memory_bytes, accelerator_reserved_bytes, peak_host_memory_bytes
    from t5train.model.model_shape import resolve
    from t5train.train.peak_flops import accelerator_name, accelerator_peak_flops, utilization

    spec, shape = job.spec, resolve(job.spec.model, job.vocab_size)
    heart = heart or Heartbeat(None, dict(spec.cluster.deadlines))
    with closing(_steps(job, steps_file, heart)) as steps:
        for number in range(WARM_UP_STEPS):
            _log.info("step %d: %.2f s", number + 1, next(steps).seconds)
        taken = [next(steps) for _ in range(job.steps)]
        memory, reserved = accelerator_memory_bytes(), accelerator_reserved_bytes()  # before the profiler takes some
        median = statistics.median(step.seconds for step in taken)
        profiled = _profile(steps, median)
    return Measured(
        device=accelerator_name() or "CPU",
        step_seconds=[step.seconds for step in taken],
        data_wait_seconds=None if job.shards_folder is None else [step.waited_seconds for step in taken],
        tokens_a_step=tokens_a_step(spec),
        mfu=utilization(spec, shape, median, accelerator_peak_flops(spec.optimizer.precision)),
        memory_bytes=memory,
        reserved_bytes=reserved,
        host_memory_bytes=peak_host_memory_bytes(),
        seconds_by_kind=profiled,
    )


def tokens_a_step(spec: RunSpec) -> int:
    """Return the tokens of encoder and decoder that all ranks train on in a step."""
    return spec.optimizer.global_batch_sequences * sum(row_lengths(spec))


class StepTime(NamedTuple):
    """How long a step took, and how much of that it waited for data."""

    seconds: float
    waited_seconds: float


class _Drawn(Iterator[Batch]):
    """Random micro-batches, which are drawn before and repeat."""

    waited_seconds = 0.0

    def __init__(self, job: BenchmarkJob, rank: int) -> None:
        self._batches = cycle([random_batch(job, seed=rank * _BATCHES + number) for number in range(_BATCHES)])

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Nothing runs in the background."""


def _batches(job: BenchmarkJob, rank: int) -> _Drawn | Prefetched:
    """Return this rank's micro-batches: random ones, or those of shards, prepared in the background."""
    if job.shards_folder is None:
        return _Drawn(job, rank)
    from t5train.train.datasets.opening import open_dataset
    from t5train.train.loop import micro_batches

    spec = job.spec.with_settings({"optimizer.num_steps": max(job.spec.optimizer.num_steps, job.all_steps)})
    return Prefetched(micro_batches(open_dataset(spec, job.shards_folder).train, spec, 0), PREFETCHED_BATCHES)


def _steps(job: BenchmarkJob, steps_file: Path, heart: Heartbeat) -> Generator[StepTime, None, None]:
    """Take one step after the other, and yield how long each took."""
    from functools import partial

    from t5train.engine.collectives import rank
    from t5train.engine.engine import build_engine, model_of, set_learning_rate
    from t5train.engine.expert_routing import Routing
    from t5train.engine.forward_backward import passes_of
    from t5train.model.initialization import initialise
    from t5train.model.model_shape import resolve

    spec, shape = job.spec, resolve(job.spec.model, job.vocab_size)
    heart.enter("compile", 0)
    engine = build_engine(spec, shape, 0, partial(initialise, shape=shape, seed=spec.optimizer.seed), node_local=False)
    routing = Routing(model_of(engine))
    passes = passes_of(engine, spec, routing)
    number = 0
    with closing(_batches(job, rank())) as batches:
        while True:
            number += 1
            heart.enter("step", number)
            started, waited = time.perf_counter(), batches.waited_seconds
            set_learning_rate(engine, spec.optimizer.final_learning_rate)
            result = passes.step(islice(batches, spec.gradient_accumulation))
            routing.of_step(result.router_loss)
            seconds = time.perf_counter() - started
            if rank() == 0:
                steps_file.write_text(str(number), "utf-8")
            if number == job.all_steps:
                heart.enter("save", number)  # reading the profile may take longer than a step
            yield StepTime(seconds, batches.waited_seconds - waited)


def random_batch(job: BenchmarkJob, seed: int) -> Batch:
    """Draw a micro-batch. Frequent tokens are drawn often, as in text, so that experts get unequal shares.

    Each row of pairs has as many of equal lengths.
    """
    lengths, size = row_lengths(job.spec), job.spec.layout.micro_batch_sequences
    generator = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return (job.vocab_size * generator.power(0.3, (size, length))).astype(np.int32)

    def side(length: int) -> tuple[np.ndarray, np.ndarray | None]:
        segments = 1 + _PAIRS_A_ROW * np.arange(length, dtype=np.int32) // length
        keys = generator.integers(1 << 62, size=(size, length)) if job.spec.has_dropout else None
        return np.tile(segments, (size, 1)), keys

    segments = None
    if job.spec.is_fine_tuning:
        (inputs, input_keys), (targets, target_keys) = map(side, lengths)
        total = job.spec.optimizer.global_batch_sequences * lengths.target_tokens
        segments = Segments(inputs, targets, input_keys, target_keys, total)
    tokens = ids(lengths.input_tokens), ids(lengths.target_tokens)
    return Batch(np.arange(size), np.zeros(size, np.int64), *tokens, segments)


def _profile(steps: Iterator[StepTime], median: float) -> dict[str, float]:
    """Return the seconds of a step by kind of work. What the accelerator does not work of ``median`` is idle.

    Only rank 0 records, and on GPUs only kernels: the operators of a model that is not compiled, in many passes, are a
    million events, which take minutes to read. Other accelerators may need those of the host, too.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.profiler import ProfilerActivity, profile

    from t5train.engine.collectives import rank

    device = get_accelerator().device_name()
    on_accelerator = device != "cpu"
    activities = [ProfilerActivity.CUDA] if device == "cuda" else recorded_activities()
    with profile(activities=activities) if rank() == 0 else nullcontext() as run:
        for _ in range(PROFILED_STEPS):
            next(steps)
    if run is None:
        return {}
    found: dict[str, float] = {}
    for event in run.events() or []:
        if (event.device_type.name != "CPU") == on_accelerator:
            taken = event.device_time if on_accelerator else event.self_cpu_time_total
            kind = kind_of(event.name)
            found[kind] = found.get(kind, 0.0) + taken / 1e6 / PROFILED_STEPS
    if on_accelerator:
        found[IDLE] = max(0.0, median - sum(found.values()))
    return found


def kind_of(name: str) -> str:
    """Return the kind of work that a kernel or an operator of this name does."""
    lowered = name.lower()
    if lowered.startswith("triton_") or "gelu" in lowered:
        return "norms, activations, loss"
    return next((kind for kind, parts in _KINDS.items() if any(part in lowered for part in parts)), OTHER)


if __name__ == "__main__":
    sys.exit(main())
