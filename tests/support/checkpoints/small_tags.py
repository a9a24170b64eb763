"""Small tags, with one file and one sidecar per rank."""

from pathlib import Path

from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.model.parameters import ParameterSlot
from t5train.records.best_so_far import BestSoFar
from t5train.records.digests import digest_files


def save(checkpoints: Path, at_step: int, ranks: int = 2, **changed: object) -> Path:
    """Save a tag with one small file per rank, and return its folder. ``changed`` goes into the last rank's sidecar."""
    folder = checkpoints / f"step-{at_step:08d}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"part{rank}.pt").write_bytes(bytes([rank, at_step % 256]) * 50)
        settings: dict[str, object] = {
            "run_fingerprint": "r" * 64,
            "step": at_step,
            "tag": folder.name,
            "rank": rank,
            "world_size": ranks,
            "layout": ParallelLayout(zero_stage=1, precision="bf16", data_parallel_rank=rank, data_parallel_size=ranks),
            "files": digest_files(folder, [f"part{rank}.pt"]),
            "groups": [[ParameterSlot.of("shared.weight", (4, 3), 0)]],
            "huggingface_config": {"model_type": "t5"},
            "data": DataState(samples_consumed=8 * at_step, shards_fingerprint="s" * 64),
        }
        if rank == ranks - 1:
            settings |= changed
        sidecar.write(folder, Sidecar.model_validate(settings))
    return folder


def save_judged(checkpoints: Path, at_step: int, best: int) -> Path:
    """Save a tag of a run whose result is the best checkpoint, which is that of step ``best`` as of this one."""
    return save(checkpoints, at_step, ranks=1, best=BestSoFar(step=best, value=1.0))
