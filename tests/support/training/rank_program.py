"""The program that ranks run in training tests: many small trainings per launch, as a launch takes seconds.

``python rank_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "shards", "run_folder", "stop_at",
"resume_tag", "start_fingerprint", "killed", "fault", "other_layout", "other_tag", "scores", "sigterm_at",
"vocabulary"}]``, and writes ``{name}.rank-{rank}.json`` beside it for each job.

- ``killed`` is the folder of a run. Its checkpoint ``resume_tag`` and its metrics are copied, as if it had been killed
  some steps after it saved.
- ``other_layout`` is the folder of a run in another layout. Its checkpoint ``other_tag`` is consolidated, and training
  starts from the result. Training that starts from another layout or from ``model.start_from`` saves a checkpoint
  before its first step.
- With ``is_fused``, weights are updated by the fused update.
- ``dispatch`` is how tokens get to their experts, as on a GPU.
- ``scores`` is the token accuracy that validations find instead of the real one, by step.
- ``vocabulary`` is the content of ``spiece.model``, in Base64.
- ``sigterm_at`` is the step during which the ranks are asked to stop.
- With ``ranks_a_node``, each node has its own folder within the run folder.
- ``brought_from`` is the folder of a run on such nodes. Its checkpoint is gathered, and each node gets the files that
  its ranks read. The node ``intact`` gets its own files as well.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from deepspeed import comm

from t5train.checkpoint import host_copies, saving, sidecar, state_loading
from t5train.checkpoint.reshard import consolidated_for
from t5train.checkpoint.state_loading import StoredState
from t5train.checkpoint.tags import files_read_by
from t5train.data.samples.loader import Batch, Samples
from t5train.engine import collectives, deepspeed_config, engine, forward_backward
from t5train.engine.optimizer import AdamWRms
from t5train.engine.partitions import inner_optimizer
from t5train.errors import T5TrainError
from t5train.files.run_folder import tag_of
from t5train.model.t5 import T5, RMSNorm
from t5train.progress import silent
from t5train.spec import RunSpec, build
from t5train.spec.rank_job import Consolidated, TrainJob
from t5train.train import loop, sanity_checks, wandb_sync
from t5train.train.witness_recording import full_masters
from tests.support.training import rank_main
from tests.support.training.fused_ranks import fused
from tests.support.training.late_writes import late_writes
from tests.support.training.little_memory import too_little_memory_to_predict


def _run(entry: dict[str, Any]) -> dict[str, Any]:
    deepspeed_config.SUB_GROUP_ELEMENTS = 20_000  # so that ZeRO 3 has several sub-groups, as in a large model
    if "ranks_a_node" in entry:
        _enter_node(entry)
    if "killed" in entry:
        _copy_killed(Path(entry["killed"]), Path(entry["run_folder"]), entry["resume_tag"])
    job = rank_main.job_of(
        entry,
        node_local="ranks_a_node" in entry,
        resume_tag=entry.get("resume_tag"),
        vocabulary=entry.get("vocabulary"),
        consolidated=_consolidated(entry),
        start_fingerprint=entry.get("start_fingerprint", "5" * 64) if entry["spec"]["model"]["start_from"] else None,
    )
    found: dict[str, Any] = {}
    try:
        update = fused() if entry.get("is_fused") else contextlib.nullcontext()
        late_writing = late_writes(rank_1_waits=entry.get("rank_1_waits", False))
        with FAULTS[entry.get("fault")](), update, _dispatching(entry.get("dispatch")), late_writing as late:
            _OPENED.clear()
            found["late"] = late
            trainer = loop.Trainer(job)
            found["phases"] = _recorded_phases(trainer)
            if "brought_from" in entry:
                found["opened"] = sorted({path.name for path in map(Path, _OPENED) if path.suffix == ".pt"})
            if job.consolidated or (job.start_fingerprint and job.resume_tag is None):
                found["begun"] = _digests(trainer)
                described = saving.Described({}, trainer.shards.fingerprint)
                saving.begin(trainer.engine, job, trainer.step, described)()
                comm.barrier()
                saving.note_saved(job, trainer.step)
            if "scores" in entry:
                _find_scores(trainer, {int(step): score for step, score in entry["scores"].items()})
            if "sigterm_at" in entry:
                trainer.is_stop_requested = lambda: trainer.step == entry["sigterm_at"]
            if "stop_at" in entry:
                _stop_after(trainer, entry["stop_at"])
            trainer.run()
    except T5TrainError as error:
        return found | {"error": type(error).__name__, "message": str(error)}
    return found | {"step": trainer.step, "masters": _digests(trainer), "not_decayed": _not_decayed(trainer.engine)}


def _copy_killed(run: Path, into: Path, tag: str) -> None:
    """Copy what a run would have left if it had been killed between its checkpoint ``tag`` and the next one."""
    if comm.get_rank() == 0:
        best = sidecar.read(run / "checkpoints" / tag, 0).best_step
        for name in {tag, tag_of(best) if best else tag}:
            shutil.copytree(run / "checkpoints" / name, into / "checkpoints" / name)
        shutil.copyfile(run / "metrics.jsonl", into / "metrics.jsonl")
    comm.barrier()


def _enter_node(entry: dict[str, Any]) -> None:
    """Make this process a rank of a node with its own folder. With ``brought_from``, copy checkpoint files to it."""
    run, (node, local_rank) = Path(entry["run_folder"]), divmod(comm.get_rank(), entry["ranks_a_node"])
    os.environ["LOCAL_RANK"] = str(local_rank)
    entry["run_folder"] = run / f"node-{node}"
    if "brought_from" in entry:
        source, tag = Path(entry["brought_from"]), Path("checkpoints", entry["resume_tag"])
        if comm.get_rank() == 0:
            _gather(source)
        comm.barrier()
        if local_rank == 0:
            _restore(source / tag, entry["run_folder"] / tag, entry["ranks_a_node"])
            if node == entry["intact"]:
                shutil.copytree(source / f"node-{node}" / tag, entry["run_folder"] / tag, dirs_exist_ok=True)
    comm.barrier()


def _gather(run: Path) -> None:
    """Copy the files that the ranks of all nodes recorded to where they would be if the nodes shared a disk."""
    for folder in run.glob("node-*/checkpoints/*"):
        into = run / "checkpoints" / folder.name
        into.mkdir(parents=True, exist_ok=True)
        for one in sidecar.read_all(folder):
            for name in (*one.files, sidecar.sidecar_name(one.rank)):
                shutil.copyfile(folder / name, into / name)


def _restore(gathered: Path, into: Path, ranks_a_node: int) -> None:
    """Copy to a node's folder the files that its ranks read, and nothing else."""
    into.mkdir(parents=True)
    for rank in range(comm.get_rank(), comm.get_rank() + ranks_a_node):
        for name in (*files_read_by(rank, sidecar.read_all(gathered)), sidecar.sidecar_name(rank)):
            shutil.copyfile(gathered / name, into / name)


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: record every file that Python opens."""
    if event == "open" and isinstance(arguments[0], str):
        _OPENED.append(arguments[0])


def _not_decayed(engine: Any) -> list[str]:
    """Names of the parameters, over all ranks, with parts that weight decay leaves alone."""
    attached = inner_optimizer(engine)._partitions
    found = {
        name
        for flat, parts in state_loading._held(engine)
        for (name, _), segment in zip(parts, attached[flat].segments, strict=True)
        if not segment.is_decayed
    }
    return sorted({name for of_rank in collectives.gather_objects(sorted(found)) for name in of_rank})


def _digests(trainer: loop.Trainer) -> dict[str, int]:
    return {name: collectives.digest64(master.numpy().tobytes()) for name, master in full_masters(trainer.engine)}


def _consolidated(entry: dict[str, Any]) -> Consolidated | None:
    """Consolidate ``other_tag`` on rank 0 as the head of a run would, and give all ranks the result."""
    if "other_layout" not in entry:
        return None
    folder = Path(entry["other_layout"])
    spec = build(entry["spec"]).with_settings({"storage.root": str(folder.parent.parent), "name": folder.name})
    result_file = folder / "told.json"
    if comm.get_rank() == 0:
        found = consolidated_for(spec, entry["other_tag"], silent)
        assert found is not None
        result_file.write_text(found.model_dump_json())
    comm.barrier()
    return Consolidated.model_validate_json(result_file.read_text())


def _recorded_phases(trainer: loop.Trainer) -> list[tuple[str, int]]:
    """Return a list that gets each phase that the rank enters, and its step."""
    phases = list[tuple[str, int]]()
    trainer.heart.enter = lambda *phase: phases.append(phase)  # nobody reads heartbeats
    return phases


def _stop_after(trainer: loop.Trainer, step: int) -> None:
    """End training after ``step``, as a kill between two steps would."""
    take_step = trainer._take_step

    def wrapped(*arguments: Any) -> Any:
        if trainer.step == step:
            trainer.step = trainer.spec.optimizer.num_steps
            raise StopTraining("the test ends it here")
        return take_step(*arguments)

    trainer._take_step = wrapped  # type: ignore[method-assign] - this is how a test stops it


def _find_scores(trainer: loop.Trainer, scores: dict[int, float]) -> None:
    """Make validations of a step find these token accuracies."""
    validate = trainer.dataset.validate

    def wrapped(passes: Any) -> Any:
        found = validate(passes)
        score: dict[str, Any] = {"validation_token_accuracy": scores[trainer.step]}
        return found._replace(values={**found.values, **score})

    trainer.dataset.validate = wrapped  # type: ignore[method-assign]  # scores that the test chooses


class StopTraining(T5TrainError):
    """Raised to end training early."""


@contextlib.contextmanager
def _dispatching(dispatch: str | None) -> Iterator[None]:
    def use_kernels(model: T5, *_settings: Any) -> None:
        for _, layer in model.sparse_layers():
            layer.dispatch = dispatch

    with mock.patch.object(engine, "_use_kernels", use_kernels) if dispatch else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _no_fault() -> Iterator[None]:
    yield


class _NanGradients(torch.autograd.Function):
    """The identity, with gradients that are NaN."""

    @staticmethod
    def forward(_context: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradients[0], torch.nan)


@contextlib.contextmanager
def _gradients_of_step_3_become_nan() -> Iterator[None]:
    """Make gradients in the layer norms of rank 0 NaN at step 3, while the loss stays finite."""
    take_step, norm, steps = loop.Trainer._take_step, RMSNorm.forward, []

    def counted(self: loop.Trainer, batches: Any) -> Any:
        steps.append(self.step + 1)
        return take_step(self, batches)

    def spoiled(self: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        normed = norm(self, hidden)
        return _NanGradients.apply(normed) if steps[-1] == 3 and comm.get_rank() == 0 else normed

    with mock.patch.object(loop.Trainer, "_take_step", counted), mock.patch.object(RMSNorm, "forward", spoiled):
        yield


@contextlib.contextmanager
def _last_update_spoils_the_weights() -> Iterator[None]:
    original = loop.Trainer._conclude

    def conclude(self: loop.Trainer, metrics: Any) -> None:
        with torch.no_grad():
            next(self.engine.module.parameters()).fill_(torch.nan)
        original(self, metrics)

    with mock.patch.object(loop.Trainer, "_conclude", conclude):
        yield


@contextlib.contextmanager
def _ranks_read_the_same_samples() -> Iterator[None]:
    original = Samples.batch

    def batch(self: Samples, start: int, count: int) -> Any:
        return original(self, start - start % (2 * count), count)

    with mock.patch.object(Samples, "batch", batch):
        yield


@contextlib.contextmanager
def _all_passes_of_a_step_take_one_batch() -> Iterator[None]:
    """Give all passes of a step the same batch, so that a step has the gradient of a single pass."""

    def micro_batches(samples: Samples, spec: RunSpec, step: int) -> Iterator[Batch]:
        size = spec.layout.micro_batch_sequences
        for done in range(step, spec.optimizer.num_steps):
            first = (done * spec.data_parallel_size + collectives.data_rank(spec)) * size
            for _ in range(spec.gradient_accumulation):
                yield samples.batch(first, size)

    with mock.patch.object(loop, "micro_batches", micro_batches):
        yield


@contextlib.contextmanager
def _epochs_of_three_samples() -> Iterator[None]:
    with mock.patch.object(Samples, "num_samples", 3):
        yield


@contextlib.contextmanager
def _optimizer_does_nothing() -> Iterator[None]:
    with mock.patch.object(AdamWRms, "_update"):
        yield


@contextlib.contextmanager
def _rank_0_has_only_unused_rows() -> Iterator[None]:
    """Zero the gradients of rank 0. With five or more ranks, a partition can consist of unused embedding rows only."""
    update = AdamWRms._update

    def without_gradient(self: AdamWRms, flat: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        update(self, flat, gradient.zero_() if comm.get_rank() == 0 else gradient, group)

    with mock.patch.object(AdamWRms, "_update", without_gradient):
        yield


@contextlib.contextmanager
def _every_step_is_skipped() -> Iterator[None]:
    """Count every step as skipped, as DeepSpeed's fp16 engine does when gradients overflow. Three may be skipped."""
    original = forward_backward.update

    def update(engine: Any) -> float | None:
        engine.skipped_steps += engine.is_gradient_accumulation_boundary()
        return original(engine)

    few = mock.patch.object(sanity_checks, "SKIPS_WHILE_SCALING", 3)
    with few, mock.patch.object(forward_backward, "update", update):
        yield


@contextlib.contextmanager
def _host_memory_is_short() -> Iterator[None]:
    with mock.patch.object(host_copies, "host_memory_bytes", return_value=1 << 60):  # of which a tenth must stay free
        yield


@contextlib.contextmanager
def _rank_one_has_no_resume_tag() -> Iterator[None]:
    original = saving.resume

    def resume(engine: Any, job: TrainJob, stored: StoredState | None) -> int:
        own_job = job if comm.get_rank() == 0 else job.model_copy(update={"resume_tag": None})
        return original(engine, own_job, stored)

    with mock.patch.object(saving, "resume", resume):
        yield


_OPENED: list[str] = []
FAULTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    None: _no_fault,
    "nan-gradients": _gradients_of_step_3_become_nan,
    "nan-at-the-end": _last_update_spoils_the_weights,
    "duplicate": _ranks_read_the_same_samples,
    "one-batch": _all_passes_of_a_step_take_one_batch,
    "short-epochs": _epochs_of_three_samples,
    "frozen": _optimizer_does_nothing,
    "unused": _rank_0_has_only_unused_rows,
    "skipped": _every_step_is_skipped,
    "disagree": _rank_one_has_no_resume_tag,
    "too little memory to predict": too_little_memory_to_predict,
    "short-memory": _host_memory_is_short,
}

if __name__ == "__main__":
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    torch.manual_seed(0)
    np.random.seed(0)
    sys.addaudithook(_note_opened)
    # On a busy machine, W&B's process takes longer to start than these trainings take.
    wandb_sync.SECONDS_TO_END = wandb_sync.SECONDS_AFTER_ERROR = 300.0
    rank_main.run_jobs(_run)
