"""Which checkpoints are complete, and which rank wrote and reads each of DeepSpeed's files.

A checkpoint (DeepSpeed calls its folder a *tag*) is complete when the sidecars of every rank, of one run, step and
layout, are present and their files verify. This decides what may be resumed or consolidated; DeepSpeed's file
``latest`` does not.

There are three answers: yes; no, because a file is missing or its content differs (IncompleteCheckpoint); or unknown
for now, because a file cannot be read (Unreadable), a sidecar is of another version (UnknownVersion), or the tag holds
a file that no rank recorded (UnlistedFile).

On hosts that do not share a disk, a file is on the host that wrote it, which is not always the host that reads it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from t5train.checkpoint.sidecar import Sidecar, read_all, sidecar_name
from t5train.errors import DigestMismatch, IncompleteCheckpoint
from t5train.files.presence import file_size, is_folder, names_in
from t5train.files.run_folder import require_listed, tag_of
from t5train.host_resources import num_cores
from t5train.progress import Progress, adding, relayed, silent
from t5train.records.digests import FileDigest, verify_file
from t5train.records.witness import WITNESS_FILES

_SAME_ON_EVERY_RANK = (
    "run_fingerprint", "step", "tag", "saving", "world_size", "aliases", "expert_layers", "model_prefix",
    "pipeline_layers", "huggingface_config", "skipped_steps", "loss_scaler", "best", "adapted",
    "data",
)  # fmt: skip


def require_complete(folder: Path, progress: Progress = silent) -> list[Sidecar]:
    """Verify every file against its digest, and return the sidecars of all ranks, sorted by rank.

    Raises IncompleteCheckpoint, naming the rank or file, if one is missing, altered, or of another run, step or layout;
    Unreadable if a file cannot be read now; UnknownVersion if a sidecar is of another version; and UnlistedFile if
    there is a pickle that no rank wrote, because DeepSpeed finds files by pattern and would unpickle it.
    """
    sidecars = require_agreement(read_all(folder), folder)
    files = files_of(sidecars)
    require_listed(f"checkpoint {folder}", names_in(folder), files)
    try:
        _verify(folder, files, progress)
    except DigestMismatch as error:
        raise IncompleteCheckpoint(f"checkpoint {folder}: {error}") from error
    return sidecars


def require_best(checkpoints: Path, of: Sidecar, progress: Progress = silent) -> None:
    """Verify the checkpoint that was the best when ``of`` was saved, if another one was.

    Training that resumes without it could not give its result. Raises the errors of ``require_complete``.
    """
    if of.best_step not in (None, of.step):
        try:
            require_complete(checkpoints / tag_of(of.best_step), progress)
        except IncompleteCheckpoint as error:
            raise IncompleteCheckpoint(
                f"{checkpoints / of.tag} lacks the best checkpoint before it: {error}"
            ) from error


def _verify(folder: Path, files: Mapping[str, FileDigest], progress: Progress) -> None:
    """Verify files against their digests, one file per core at a time.

    An exception that a signal or ``progress`` raises ends this at once, however large the files are.
    """

    def verify(told: Progress) -> None:
        advance = adding(told, "checkpoint bytes verified", sum(digest.size for digest in files.values()))
        with ThreadPoolExecutor(num_cores()) as threads:
            for _ in threads.map(lambda name: verify_file(folder / name, files[name], advance), files):
                pass

    relayed(verify, progress, "verifying a checkpoint")


def complete_tags(checkpoints: Path) -> list[str]:
    """Names of the complete tags in a DeepSpeed save folder, the newest step first.

    This compares only sidecars and file sizes; use ``require_complete`` to verify the digests of the chosen tag. A
    renamed tag does not count: a run renames a tag before it removes it, and may be killed in between. Raises
    Unreadable and UnknownVersion if it cannot be determined whether a tag is complete, because an older one must not be
    used in its place.
    """
    found: list[tuple[int, str]] = []
    for name in names_in(checkpoints):
        folder = checkpoints / name
        sidecars = _if_complete(folder) if is_folder(folder) else None
        if sidecars is not None:
            found.append((sidecars[0].step, name))
    return [name for _, name in sorted(found, reverse=True)]


def is_complete(folder: Path) -> bool:
    """Whether a tag is complete, by its sidecars and file sizes, as ``complete_tags`` compares them."""
    return _if_complete(folder) is not None


def files_of(sidecars: Sequence[Sidecar]) -> dict[str, FileDigest]:
    """The files of all ranks. Raises IncompleteCheckpoint if two ranks recorded different digests of one file."""
    files: dict[str, FileDigest] = {}
    for sidecar in sidecars:
        for name, digest in sidecar.files.items():
            if files.setdefault(name, digest) != digest:
                raise IncompleteCheckpoint(
                    f"tag {sidecar.tag} mixes sidecars of different checkpoints: rank {sidecar.rank} and a lower rank "
                    f"recorded different digests of {name}. Choose another tag"
                )
    return files


def _if_complete(folder: Path) -> list[Sidecar] | None:
    try:
        sidecars = require_agreement(read_all(folder), folder)
        files = files_of(sidecars)
    except IncompleteCheckpoint:
        return None
    whole = all(file_size(folder / name) == digest.size for name, digest in files.items())
    return sidecars if whole and sidecars[0].tag == folder.name else None


def require_agreement(sidecars: list[Sidecar], where: Path | str) -> list[Sidecar]:
    """Return the sidecars if they are those of all ranks of one checkpoint; else raise IncompleteCheckpoint."""
    if not sidecars:
        raise IncompleteCheckpoint(f"{where} has no sidecar {sidecar_name(0)}: it was never finished")
    first = sidecars[0]
    for sidecar in sidecars:
        _require_same(where, first, sidecar)
    missing = sorted(set(range(first.world_size)) - {sidecar.rank for sidecar in sidecars})
    if missing:
        raise IncompleteCheckpoint(
            f"{where} lacks {sidecar_name(missing[0])} (ranks {missing} of {first.world_size} have no sidecar). "
            "Choose another tag"
        )
    return sidecars


def _require_same(where: Path | str, first: Sidecar, other: Sidecar) -> None:
    differing = [name for name in _SAME_ON_EVERY_RANK if getattr(first, name) != getattr(other, name)]
    if first.layout.shape() != other.layout.shape():
        differing.append("layout")
    if differing:
        raise IncompleteCheckpoint(
            f"{where} mixes sidecars of different checkpoints: {sidecar_name(other.rank)} and "
            f"{sidecar_name(first.rank)} differ in {', '.join(differing)}. Choose another tag"
        )


_PARTITION = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_")
_EXPERT = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_")
_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
_STAGE = re.compile(r"mp_rank_(\d+)_")


@dataclass(frozen=True)
class Writers:
    """Which rank writes each file. A model without pipeline parallelism has one stage, with all ranks."""

    ranks_a_stage: int
    experts_a_rank: int = 0
    stage_of_layer: Callable[[int], int] | None = None

    def of(self, name: str) -> int:
        """The rank that wrote the file ``name``; if several did or could have, the first."""
        if match := _EXPERT.search(name):
            return int(match[1]) // self.experts_a_rank
        if self.stage_of_layer and (match := _LAYER.match(name)):
            return self.stage_of_layer(int(match[1])) * self.ranks_a_stage
        stage, partition = _STAGE.search(name), _PARTITION.search(name)
        return int(stage[1] if stage else 0) * self.ranks_a_stage + int(partition[1] if partition else 0)


def files_read_by(rank: int, sidecars: Sequence[Sidecar]) -> list[str]:
    """The names of the files that DeepSpeed needs on the node of ``rank`` to resume there, sorted.

    ``sidecars`` are those of all ranks of the checkpoint. Raises IncompleteCheckpoint if that of ``rank`` is missing.
    """
    own = next((one for one in sidecars if one.rank == rank), None)
    if own is None:
        raise IncompleteCheckpoint(
            f"rank {rank} has no sidecar among the {len(sidecars)} found, so it is unknown which files that rank "
            "needs. Gather the sidecars of all ranks first"
        )
    return sorted(name for writer in sidecars for name in writer.files if _reads(own, writer, name))


def _reads(reader: Sidecar, writer: Sidecar, name: str) -> bool:
    if _PARTITION.search(name) or name in WITNESS_FILES:
        return reader.rank == writer.rank
    if _EXPERT.match(name):
        return reader.layout.expert_rank == writer.layout.expert_rank
    if _LAYER.match(name):
        return reader.layout.pipeline_rank == writer.layout.pipeline_rank
    # DeepSpeed reads the model states of the first stage and the reader's own, and counts all of them: all must exist.
    return True
