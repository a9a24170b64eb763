"""Runs the ranks of a benchmark on this machine, in a temporary folder."""

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from infra.head.launch.local_launch import LaunchSpec, launch
from infra.head.plain_ranks import run_ranks
from infra.head.preflight.launch_requirements import operators_of
from infra.head.preflight.run_checks import require_capable, require_free, require_model
from infra.head.progress_report import before_first_step
from infra.node.attempts.run_lock import run_lock
from t5train.data.vocabulary.tokenizer import expected_vocab_size
from t5train.errors import OutOfMemory
from t5train.progress import Progress
from t5train.spec import RunSpec
from t5train.spec.rank_job import load_shards
from t5train.train.step_benchmark import STEPS_FILE, BenchmarkJob, Measured
from t5train.train.trainer_benchmark import MeasuredSteps, TrainerJob

TRAINER_PROGRAM = "t5train.train.trainer_benchmark"


class TrainerMeasured(NamedTuple):
    """What was measured of Hugging Face's Trainer, and with which micro-batch."""

    micro_batch_sequences: int
    measured: MeasuredSteps


def benchmark_trainer(spec: RunSpec, steps: int, shards: Path | None = None) -> TrainerMeasured | None:
    """Measure Hugging Face's Trainer on random tokens, with the vocabulary of the shards if they are given.

    It needs the package accelerate, and trains in bf16 or fp32.
    If a micro-batch does not fit into memory, the next one is half of it. Returns None if none fits. Raises LaunchError
    if a rank fails.
    """
    size = spec.layout.micro_batch_sequences
    while True:
        folder = Path(mkdtemp(prefix="t5-bench-trainer-"))
        trained = spec.with_settings({"layout.pipeline_stages": 1, "layout.micro_batch_sequences": size})
        try:
            job = TrainerJob(spec=trained, vocab_size=_vocab_size(spec, shards), steps=steps)
            measured = measure_ranks(TRAINER_PROGRAM, job, folder)
        except OutOfMemory:
            shutil.rmtree(folder)
            if size % 2:
                return None
            size //= 2
            continue
        shutil.rmtree(folder)
        return TrainerMeasured(size, measured)


def measure_ranks(program: str, job: TrainerJob, folder: Path) -> MeasuredSteps:
    """Run the ranks of a program that measures a job. ``folder`` is for the job, the result and logs.

    Raises OutOfMemory if a rank ran out of memory, otherwise LaunchError if one failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, cluster = folder / "job.json", job.spec.cluster
    path.write_text(job.model_dump_json(), "utf-8")
    run_ranks(("-m", program, str(path)), cluster.ranks, cluster.accelerator, folder)
    return MeasuredSteps.model_validate_json(path.with_name("measured.json").read_text("utf-8"))


def benchmark(spec: RunSpec, steps: int, progress: Progress, shards: Path | None = None) -> Measured:
    """Measure ``steps`` training steps of a recipe on this machine, on random tokens or on those of token shards.

    Raises SpecError if this machine cannot train it, or the error of a rank.
    """
    shape = require_model(spec)
    folder_of_shards = shards and shards.absolute()
    job = BenchmarkJob(spec=spec, vocab_size=_vocab_size(spec, shards), steps=steps, shards_folder=folder_of_shards)
    require_capable(spec, shape)
    require_free(spec)
    # Kept if a rank fails, as the error names its log.
    folder = Path(mkdtemp(prefix="t5-bench-"))
    run_folder, path = folder / "run", folder / "job.json"
    run_folder.mkdir()
    path.write_text(job.model_dump_json(), "utf-8")

    def tell() -> None:
        taken = steps_taken(path.with_name(STEPS_FILE))
        progress(_doing(job, taken), taken, job.all_steps)

    with run_lock(run_folder):
        launch(
            LaunchSpec(
                program=lambda _folder: ("-m", "t5train.train.step_benchmark", "--job", str(path)),
                run_folder=run_folder,
                num_ranks=spec.cluster.ranks,
                accelerator=spec.cluster.accelerator,
                master_port=spec.cluster.master_port,
                grace_seconds=spec.cluster.grace_seconds,
                operators=operators_of(spec),
            ),
            on_tick=tell,
        )
    measured = Measured.model_validate_json(path.with_name("measured.json").read_text("utf-8"))
    shutil.rmtree(folder)
    return measured


def _vocab_size(spec: RunSpec, shards: Path | None) -> int:
    return int(load_shards(spec, shards).counts["vocab_size"]) if shards else expected_vocab_size(spec.tokenizer)


def _doing(job: BenchmarkJob, taken: int) -> str:
    """Return what ranks do when they have taken so many steps."""
    if taken == job.all_steps:
        return "steps, reading the profile of the last ones"
    return "steps" if taken else f"steps, {before_first_step(job.spec)}"


def steps_taken(file: Path) -> int:
    """Return the number of steps in the file that rank 0 writes; zero before the first, and during a write."""
    return int((file.read_text("utf-8") if file.exists() else "") or 0)
