"""Reshard a run's checkpoint for ranks of another layout: consolidate it, with its moments, in the run's folder.

Any layout can begin from the consolidated checkpoint. It is needed only until the new layout has saved its first
checkpoint. DeepSpeed's universal checkpoint is not used, because its converter unpickles every file without restriction
and verifies no digest. torch is imported only if there is something to consolidate.
"""

import logging
import re
from pathlib import Path

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.sidecar import Sidecar
from t5train.files.atomic import discard
from t5train.files.run_folder import CHECKPOINTS, RESHARDED
from t5train.host_resources import require_space
from t5train.progress import Progress
from t5train.records.identity import differences, fingerprint
from t5train.records.stage_records import set_damaged_aside
from t5train.spec import RunSpec
from t5train.spec.rank_job import Consolidated, TrainingProgress

_log = logging.getLogger(__name__)


def consolidated_for(spec: RunSpec, tag: str, progress: Progress) -> Consolidated | None:
    """Consolidate checkpoint ``tag`` if it was written in another layout than the spec's; None if it was not.

    A result that an earlier, killed attempt left is verified and reused. Raises StorageError if there is not enough
    disk space.
    """
    folder = spec.run_folder / CHECKPOINTS / tag
    sidecars = sidecar.read_all(folder)
    changed = _changed(sidecars[0], spec)
    if not changed:
        discard_consolidated(spec.run_folder)
        return None
    _log.info("%s was written in another layout (%s): consolidating it first", folder, "; ".join(changed))
    files = tags.files_of(sidecars)
    out = _only(spec.run_folder / RESHARDED, f"{tag}-{fingerprint({n: d.sha256 for n, d in files.items()})[:12]}")
    if not out.exists():
        size = sum(digest.size for digest in files.values())
        require_space(
            spec.run_folder, 2 * size, f"consolidating {tag} of run {spec.run_name!r} and saving the next one"
        )
    from t5train.checkpoint.consolidate import consolidate  # imports torch

    first = sidecars[0]
    clock = TrainingProgress(
        step=first.step, skipped_steps=first.skipped_steps, loss_scaler=first.loss_scaler, best=first.best
    )
    weights = consolidate(folder, out, moments=clock.has_moments, progress=progress)
    return Consolidated(folder=out.resolve(), fingerprint=weights.fingerprint, clock=clock)


def discard_consolidated(run_folder: Path) -> None:
    """Remove the consolidated checkpoint, once the newest checkpoint has the layout of the run."""
    discard(run_folder / RESHARDED)


def _changed(written: Sidecar, spec: RunSpec) -> list[str]:
    """The layout settings in which the spec differs from the checkpoint."""
    found_and_asked = {
        "cluster.ranks": (written.world_size, spec.cluster.ranks),
        "layout.zero_stage": (written.layout.zero_stage, spec.layout.zero_stage),
        "layout.expert_parallel_size": (written.layout.expert_size, spec.layout.expert_parallel_size),
        "layout.pipeline_stages": (written.layout.pipeline_size, spec.layout.pipeline_stages),
    }
    found = {name: value for name, (value, _) in found_and_asked.items()}
    return differences(found, {name: value for name, (_, value) in found_and_asked.items()})


def _only(folder: Path, name: str) -> Path:
    """The path ``folder / name``, after removing results of other checkpoints and moving a damaged result aside."""
    own = re.compile(rf"{name}|\.{name}\.partial|{name}\.aside-.*")
    if folder.exists() and not all(own.fullmatch(each.name) for each in folder.iterdir()):
        discard(folder)
    set_damaged_aside(folder / name)
    return folder / name
