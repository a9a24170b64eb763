"""Save checkpoints that can be verified, resume from one if all ranks agree on it, and prune old ones."""

import base64
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from t5train.checkpoint import resume_point, sidecar, tags
from t5train.checkpoint.archive_writing import fill_in, naming_folder, no_checksums
from t5train.checkpoint.host_copies import SavedFiles
from t5train.checkpoint.reshard import discard_consolidated
from t5train.checkpoint.resume_point import is_unfinished
from t5train.checkpoint.retention import kept
from t5train.checkpoint.sidecar import AdaptedModel, DataState, ParallelLayout, Sidecar
from t5train.checkpoint.state_loading import StoredState, named_groups, require_replaced
from t5train.checkpoint.tags import Writers
from t5train.engine.collectives import (
    barrier,
    data_rank,
    digest64,
    expert_rank,
    gather,
    rank,
    ranks_of_node,
    world_size,
)
from t5train.engine.engine import model_of
from t5train.engine.parameter_layout import expert_layers
from t5train.errors import RanksDisagree, StorageError, UnknownVersion
from t5train.files.atomic import remove_folder, set_aside, sync_folder
from t5train.files.os_errors import explain, naming
from t5train.files.presence import file_size, is_folder, is_there, names_in, reading
from t5train.files.run_folder import SET_ASIDE, is_tag_or_removed, name_while_removed, step_of, tag_of
from t5train.records.best_so_far import BestSoFar
from t5train.records.digests import FileDigest, digest_files
from t5train.records.identity import current_provenance
from t5train.records.witness import WITNESS_FILES
from t5train.spec.rank_job import TrainJob

_log = logging.getLogger(__name__)
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Described(NamedTuple):
    """What a checkpoint's sidecars record of a run that neither its engine nor its job has.

    ``best`` is the best checkpoint so far.
    """

    huggingface_config: dict[str, Any]
    shards_fingerprint: str
    best: BestSoFar | None = None


def begin(
    engine: Any,
    job: TrainJob,
    step: int,
    described: Described,
    record_witness: Callable[[Path], None] | None = None,
    *,
    is_copied: bool = False,
) -> Callable[[], None]:
    """Begin the checkpoint of ``step`` on all ranks. Returns the function that writes the rest of this rank's part.

    That function uses no collective. With ``is_copied``, training may go on before it is called: this rank's state is
    copied to host memory, and the files are written from there. The checkpoint is complete when all ranks have written
    their parts; then call ``note_saved``.

    If this is the best checkpoint so far, ``record_witness`` writes the witness of the weights into the folder that it
    is given, as a part of the checkpoint.

    On nodes that do not share a disk, the checkpoint consists of the folders of all nodes.
    """
    tag = tag_of(step)
    folder = job.checkpoints_folder / tag
    sharers = ranks_of_node() if job.node_local else list(range(world_size()))
    if rank() == sharers[0]:
        _discard(folder)
        folder.mkdir(parents=True)
    if job.node_local and engine.pipeline_parallelism:
        _save_every_stage(engine, sharers[0])
    barrier()
    saved = _save_or_copy(engine, job, tag, is_copied)
    if record_witness:
        record_witness(folder)
    describe = partial(
        Sidecar,
        run_fingerprint=job.run_fingerprint,
        step=step,
        tag=tag,
        saving=f"{gather([secrets.randbits(32)])[0][0]:08x}",  # drawn by rank 0
        rank=rank(),
        world_size=world_size(),
        layout=_layout(job),
        groups=named_groups(engine),
        expert_layers=expert_layers(model_of(engine)),
        huggingface_config=described.huggingface_config,
        pipeline_layers=dict(model_of(engine).pipeline_layers),
        skipped_steps=int(engine.skipped_steps),
        loss_scaler=_loss_scaler(engine),
        best=described.best,
        adapted=_adapted(job),
        data=DataState(
            samples_consumed=step * job.spec.optimizer.global_batch_sequences,
            shards_fingerprint=described.shards_fingerprint,
        ),
        generator_states=_generator_states(),
        versions=current_provenance().versions,
    )
    writers = Writers(
        ranks_a_stage=job.spec.data_parallel_size,
        experts_a_rank=job.spec.model.moe.num_experts // job.spec.layout.expert_parallel_size,
        stage_of_layer=engine.module.stage_owner if engine.pipeline_parallelism else None,
    )
    return partial(_write, folder, saved, writers, describe)


def note_saved(job: TrainJob, step: int) -> None:
    """On rank 0, record that the checkpoint of ``step`` is complete. If hosts do not share a disk, the head does it."""
    if rank() == 0 and not job.node_local:
        resume_point.note_complete(job.run_folder, tag_of(step))


def _save_or_copy(engine: Any, job: TrainJob, tag: str, is_copied: bool) -> SavedFiles:
    """Let DeepSpeed save: to its files or, if ``is_copied``, to copies that are written later. A collective."""
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = saved = SavedFiles(writer, is_deferred=is_copied)
    try:
        with no_checksums(), naming_folder(job.checkpoints_folder / tag):
            engine.save_checkpoint(
                str(job.checkpoints_folder),
                tag=tag,
                save_latest=False,
                exclude_frozen_parameters=job.spec.finetune.lora.rank is not None,
            )
    finally:
        engine.checkpoint_engine = writer
    return saved


def _write(folder: Path, saved: SavedFiles, writers: Writers, describe: Callable[..., Sidecar]) -> None:
    """Write this rank's part: the files that were copied and, when all its files are on disk, its sidecar.

    Each rank records the files that it wrote. On nodes that do not share a disk, some are replicas of files that ranks
    of other folders wrote.
    """
    with no_checksums(), naming_folder(folder):
        saved.write()
    names = sorted(saved.names) + [name for name in WITNESS_FILES if rank() == 0 and is_there(folder / name)]
    is_own = {name: writers.of(name) == rank() for name in names}
    digests = _durable_digests(folder, names)
    sidecar.write(
        folder,
        describe(
            files={name: digest for name, digest in digests.items() if is_own[name]},
            replicas={name: digest for name, digest in digests.items() if not is_own[name]},
        ),
    )


def resume(engine: Any, job: TrainJob, stored: StoredState | None) -> int:
    """Load the job's tag, or the ``stored`` state, on every rank, and return its step; 0 without either.

    Raises Unreadable, IncompleteCheckpoint if a weight was not loaded, and RanksDisagree unless all ranks have the same
    job and loaded the same step and run.
    """
    consolidated = job.consolidated.fingerprint if job.consolidated else None
    _require_consensus("resume tag", str(job.resume_tag or consolidated or job.start_fingerprint))
    if job.resume_tag is None:
        return _begin(engine, job, stored) if stored else 0
    step, folder = step_of(job.resume_tag), job.checkpoints_folder / job.resume_tag
    own = sidecar.read(folder, rank())
    with reading(folder):
        # The weights that adapters are for are not in the checkpoint.
        is_whole = job.spec.finetune.lora.rank is None
        path, _ = engine.load_checkpoint(str(job.checkpoints_folder), tag=job.resume_tag, load_module_strict=is_whole)
    loaded = f"{Path(path or 'nothing').parent.name} of run {own.run_fingerprint}, step {own.step}, saving {own.saving}"
    _require_consensus("loaded checkpoint", loaded)
    if path is None or not engine.global_steps == own.step == step or own.run_fingerprint != job.run_fingerprint:
        raise RanksDisagree(
            f"cannot resume from {folder}: the files there belong to another run or step. DeepSpeed loaded "
            f"{path or 'nothing'} at step {engine.global_steps}, but step {step} was expected. Move that folder to "
            "another place to resume from an older checkpoint"
        )
    require_replaced(engine, folder)
    _restore_generators(own.generator_states)
    return step


def best_so_far(job: TrainJob) -> BestSoFar:
    """Return which checkpoint was the best when the one was saved that the job resumes from."""
    if job.consolidated:
        found = job.consolidated.clock.best
    else:
        tag = job.resume_tag
        found = sidecar.read(job.checkpoints_folder / tag, rank()).best if tag else None
    return found or BestSoFar()


def _begin(engine: Any, job: TrainJob, stored: StoredState) -> int:
    """Restore the state, and reseed dropout by step and rank, as generator states are valid for one layout only."""
    stored.restore(engine)
    torch.manual_seed(digest64(f"{job.spec.optimizer.seed}|{stored.clock.step}|{rank()}"))
    return stored.clock.step


def prune(job: TrainJob, newest_step: int) -> None:
    """On rank 0, remove all checkpoints except those that are ``kept``; incomplete ones are removed too.

    A damaged checkpoint that is newer than the one this attempt began from is moved aside instead. A folder whose name
    is not a tag's belongs to the user and stays. The checkpoint that was consolidated for this layout is no longer
    needed and is removed. On nodes that do not share a disk, no rank can see whether a checkpoint is complete, so the
    head prunes them. If a file cannot be read or removed now, only a warning is logged: the error must not end a run
    that has just saved.
    """
    if rank() != 0 or job.node_local:
        return
    try:
        _prune(job, newest_step)
        discard_consolidated(job.run_folder)
    except (StorageError, UnknownVersion) as error:
        _log.warning("old checkpoints are kept for now: %s", error)


def _prune(job: TrainJob, newest_step: int) -> None:
    begun_at = job.consolidated.clock.step if job.consolidated else step_of(job.resume_tag or tag_of(0))
    checkpoints, begun_from = job.checkpoints_folder, tag_of(begun_at)
    complete = [tag for tag in tags.complete_tags(checkpoints) if step_of(tag) <= newest_step]
    if tag_of(newest_step) not in complete:  # a network file system may show late what other hosts wrote
        raise StorageError(f"{checkpoints / tag_of(newest_step)} was saved, but not all of it can be seen here yet")
    keep = _kept(job, complete)
    for name in names_in(checkpoints):
        folder = checkpoints / name
        if name in keep or not is_tag_or_removed(name) or not is_folder(folder):
            continue
        if name not in complete and name.startswith("step-") and name > begun_from and not is_unfinished(folder):
            why = f"it is damaged, or newer than step {newest_step} of an attempt that began from {begun_from}"
            set_aside(folder, job.run_folder / SET_ASIDE, why)
        else:
            _log.info("removing checkpoint %s", name)
            _discard(folder)


def _kept(job: TrainJob, complete: list[str]) -> set[str]:
    folders = [job.checkpoints_folder / tag for tag in complete]
    bests = {step_of(folder.name): sidecar.read(folder, 0).best_step for folder in folders}
    sizes = {
        step_of(folder.name): sum(file_size(folder / name) or 0 for name in names_in(folder)) for folder in folders
    }
    storage = job.spec.storage
    steps = kept(sizes, storage.keep_last, storage.keep_every_steps, storage.checkpoint_bytes, bests)
    return {tag_of(step) for step in steps}


def _discard(folder: Path) -> None:
    """Remove a tag. It is renamed first, so that it no longer counts as complete. Raises StorageError."""
    if not is_there(folder):
        return
    doomed = folder.with_name(name_while_removed(secrets.token_hex(4)))
    try:
        folder.rename(doomed)
        sync_folder(folder.parent)
        remove_folder(doomed)
    except OSError as error:
        raise StorageError(f"{folder} cannot be removed: {explain(error)}") from error


def _loss_scaler(engine: Any) -> dict[str, int | float]:
    """The state of the fp16 loss scaler, by attribute; empty in any other precision."""
    if not engine.fp16_enabled():
        return {}
    return {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALER}


def _save_every_stage(engine: Any, first_of_node: int) -> None:
    """Make DeepSpeed save each stage's model states once per node, not only those of the node's first rank."""
    first_of_stage = engine.stage_id * engine.dp_world_size
    engine.save_non_zero_checkpoint = rank() == max(first_of_stage, first_of_node)


def _durable_digests(folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    for name in names:
        if name not in WITNESS_FILES:
            fill_in(folder / name)
        with naming(folder / name), open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return digest_files(folder, names)


def _layout(job: TrainJob) -> ParallelLayout:
    layout, models = job.spec.layout, job.spec.data_parallel_size
    places: dict[str, int] = {}
    if layout.pipeline_stages > 1:
        places = {"pipeline_rank": rank() // models, "pipeline_size": layout.pipeline_stages}
    if job.spec.model.moe.num_experts:
        size = layout.expert_parallel_size
        places = {"expert_rank": expert_rank(size), "expert_size": size}
        places |= {"expert_data_rank": rank() // size, "expert_data_size": world_size() // size}
    return ParallelLayout(
        zero_stage=layout.zero_stage,
        precision=job.spec.optimizer.precision,
        data_parallel_rank=data_rank(job.spec),
        data_parallel_size=models,
        **places,
    )


def _adapted(job: TrainJob) -> AdaptedModel | None:
    """The model that the run's adapters are for; None if it trains all weights."""
    if job.spec.finetune.lora.rank is None:
        return None
    return AdaptedModel(start_fingerprint=str(job.start_fingerprint), scaling=job.spec.finetune.lora.scaling)


def _require_consensus(what: str, value: str) -> None:
    everybody = gather([digest64(value)])
    if len({row[0] for row in everybody}) > 1:
        raise RanksDisagree(
            f"the {what} differs between ranks: rank {rank()} has {value!r}, and another rank something else. Start "
            "the run again. If this happens again, please report it"
        )


def _generator_states() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state(), "accelerator": get_accelerator().get_rng_state()}
    return {name: base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii") for name, state in states.items()}


def _restore_generators(states: dict[str, str]) -> None:
    tensors = {
        name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for name, state in states.items()
    }
    torch.set_rng_state(tensors["cpu"])
    get_accelerator().set_rng_state(tensors["accelerator"])
