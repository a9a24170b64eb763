"""From a checkpoint to a finished record of its weights, or nothing at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from t5train.atomic import sync_folder
from t5train.consolidate.checkpoint import OpenedCheckpoint, open_checkpoint, refusing_what_vanishes
from t5train.consolidate.layouts import plan_of
from t5train.consolidate.out_folder import new_folder, put_in_place, require_vacant
from t5train.consolidate.plan import Plan
from t5train.consolidate.stream import write_tensors
from t5train.fingerprint import fingerprint
from t5train.progress import Progress, silent
from t5train.records import FileDigest, Weights, reusable
from t5train.safetensors_digest import SafetensorsDigest
from t5train.sidecar import files_of

_MOMENTS = ("exp_avg", "exp_avg_sq")  # what every optimizer of Adam's kind calls them


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    tag: str | None = None,
    shard_bytes: int | None = None,
    moments: bool = False,
    progress: Progress = silent,
) -> Weights:
    """Write the fp32 weights of a DeepSpeed checkpoint into the folder ``out`` and return their record.

    ``checkpoint`` is a save folder with tags inside (the newest complete tag is taken, or ``tag``), or the folder
    of a tag. ``out`` gets ``model.safetensors`` (or files of at most ``shard_bytes``, and their index),
    ``model.tensors.json`` with the sha256 of each tensor's bytes, and ``manifest.json``. Floating-point tensors are
    fp32, whole numbers stay what they are; a tied parameter stands under its owner's name alone. With ``moments`` the
    optimizer's two moments of each trained parameter go beside them in the same way, as ``exp_avg.safetensors`` and
    ``exp_avg_sq.safetensors``. ZeRO 0 to 3, pipelines and mixtures of experts, in fp32, bf16 and fp16.

    ``out`` appears whole or not at all; one that holds the same weights already is verified and reused. Raises
    InputError (no such checkpoint or tag), IncompleteCheckpoint (missing, altered or mixed files),
    ConsolidationError (a hostile or contradictory file), UnknownLayout, and StorageError (``out`` holds something
    else, cannot be written, or is too small).
    """
    out = out.resolve()
    with refusing_what_vanishes(checkpoint.absolute()):
        opened = open_checkpoint(checkpoint, tag, progress)
        return _consolidate(opened, out, shard_bytes, _MOMENTS if moments else (), progress)


def _consolidate(
    opened: OpenedCheckpoint, out: Path, shard_bytes: int | None, moments: Sequence[str], progress: Progress
) -> Weights:
    recorded = _recorded_identity(opened, shard_bytes, moments)
    if recorded is not None and (there := reusable(Weights, out, recorded, progress)):
        return there
    require_vacant(out, recorded)
    plan = plan_of(opened, moments)
    with new_folder(out, plan.size) as folder:
        files: dict[str, FileDigest | SafetensorsDigest] = {}
        for stem, tensors in {"model": plan.tensors, **plan.moments}.items():
            files |= write_tensors(
                tensors, folder, stem, shard_bytes, has_digests=bool(opened.sidecars), progress=progress
            )
        identity = recorded or _content_identity(files)
        if there := reusable(Weights, out, identity, progress):
            return there
        require_vacant(out, identity)
        weights = _record(out, opened, plan, identity, files).commit(folder)
        sync_folder(folder)
        put_in_place(folder, out)
    return weights


def _recorded_identity(opened: OpenedCheckpoint, shard_bytes: int | None, moments: Sequence[str]) -> str | None:
    """Fingerprint of weights yet to be made: of the run, its step and the files' digests, where these are recorded."""
    if not opened.sidecars:
        return None
    first = opened.sidecars[0]
    digests = {name: digest.sha256 for name, digest in files_of(opened.sidecars).items()}
    identity = {"run": first.run_fingerprint, "step": first.step, "files": digests, "shard_bytes": shard_bytes}
    return fingerprint({**identity, "moments": list(moments)})


def _content_identity(files: Mapping[str, FileDigest | SafetensorsDigest]) -> str:
    """Fingerprint of weights of unknown origin: their own content."""
    return fingerprint({"files": {name: digest.model_dump() for name, digest in files.items()}})


def _record(
    out: Path, opened: OpenedCheckpoint, plan: Plan, identity: str, files: Mapping[str, FileDigest | SafetensorsDigest]
) -> Weights:
    return Weights(
        path=out,
        fingerprint=identity,
        inputs={"run": opened.sidecars[0].run_fingerprint} if opened.sidecars else {},
        files=files,
        counts={
            "parameters": plan.num_parameters,
            "tensors": len(plan.tensors),
            "bytes": plan.size,
            "step": plan.step,
        },
    )
