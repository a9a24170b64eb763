"""Consolidate a checkpoint into a folder of weights.

The folder appears complete or not at all, and never replaces other content.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from t5train.checkpoint.consolidate.layouts import plan_of
from t5train.checkpoint.consolidate.merging import merge, require_start
from t5train.checkpoint.consolidate.opened_checkpoint import (
    OpenedCheckpoint,
    naming_checkpoint,
    open_checkpoint,
    refusing_what_vanishes,
)
from t5train.checkpoint.consolidate.plan import Plan
from t5train.checkpoint.consolidate.tensor_writer import write_tensors
from t5train.checkpoint.sidecar import AdaptedModel
from t5train.checkpoint.tags import files_of
from t5train.errors import RecordError, StorageError
from t5train.files.atomic import partial_folder, rename_aside, sync_folder
from t5train.files.os_errors import explain, reason
from t5train.host_resources import require_free_space
from t5train.model.lora import ADAPTERS
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, SafetensorsDigest
from t5train.records.identity import fingerprint
from t5train.records.stage_records import MANIFEST, Weights, reusable

_log = logging.getLogger(__name__)
_SPARE_BYTES = 16 << 20


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Yield the ``partial_folder`` of ``out``, for the block to rename.

    Raises StorageError if ``size`` bytes do not fit, or if a write in the block fails.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out.parent} cannot be created: {reason(error, out.parent)}") from error
    try:
        require_free_space(out.parent, size + _SPARE_BYTES, f"the weights in {out}")
        with partial_folder(out) as folder:
            yield folder
    except FileNotFoundError:  # a run removed an old tag while it was read: the caller explains this
        raise
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {explain(error)}") from error


def require_vacant(out: Path, fingerprint: str | None) -> None:
    """Raise StorageError unless ``out`` is absent, empty, or holds only damaged weights with this fingerprint.

    Unrelated files beside damaged weights are refused, because they would be moved aside with them. If
    ``fingerprint`` is None, any weights are accepted.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        there = Weights.load(out)
    except RecordError as error:
        raise StorageError(
            f"{out} is not empty and holds no finished result of `consolidate` ({error}). Remove that folder, or "
            "choose another"
        ) from None
    if fingerprint is None:
        return
    if fingerprint != there.fingerprint:
        raise StorageError(
            f"{out} holds other weights, of another checkpoint or written with other options (fingerprint "
            f"{there.fingerprint[:12]}). Remove that folder, or choose another"
        )
    if strangers := sorted({path.name for path in out.iterdir()} - {*there.files, MANIFEST}):
        raise StorageError(
            f"{out} holds damaged weights and an unrelated file, {strangers[0]}. Move that file to another folder, "
            "then try again: the damaged weights are moved aside and written again"
        )


_MOMENTS = ("exp_avg", "exp_avg_sq")  # the names in every Adam-like optimizer


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    tag: str | None = None,
    shard_bytes: int | None = None,
    moments: bool = False,
    start_from: str | None = None,
    progress: Progress = silent,
) -> Weights:
    """Write the fp32 weights of a DeepSpeed checkpoint into a folder.

    Supports ZeRO 0 to 3, pipelines and mixtures of experts, in fp32, bf16 and fp16. The folder holds
    ``model.safetensors`` (or several files and their index), ``model.tensors.json`` with the sha256 of each tensor's
    bytes, and ``manifest.json``. Tensors have the shapes of the Hugging Face model. Floating-point tensors are fp32,
    and integer tensors keep their type. A tied parameter is stored only under its owner's name.

    A checkpoint of a run with LoRA holds adapters only. With ``start_from``, the result is the merged model, and
    ``adapters.safetensors`` has the factors of the adapters; without it, the result is the factors alone.

    Args:
        checkpoint: Folder with tags inside, or the folder of one tag.
        out: Output folder. It appears complete or not at all. The same weights in it are verified and reused.
        tag: The tag to consolidate; by default, the best one if the run chooses one, or the newest complete one.
        shard_bytes: Maximum size of a file in bytes; by default, all tensors are written to one file.
        moments: Whether to also write the optimizer's two moments of each trained parameter, in the same way, as
            ``exp_avg.safetensors`` and ``exp_avg_sq.safetensors``.
        start_from: The model that adapters are for (``model.start_from``). Other checkpoints do not need it.
        progress: Called with the number of bytes verified or written so far.

    Returns:
        The record of the weights.

    Raises:
        InputError: There is no such checkpoint or tag, or its adapters are for another model than ``start_from``.
        IncompleteCheckpoint: Files are missing, altered or from different checkpoints.
        ConsolidationError: Loading a file would run code, or files contradict each other.
        UnknownLayout: The checkpoint's layout is not supported.
        StorageError: ``out`` holds something else or cannot be written, or there is not enough disk space.

    """
    out = out.resolve()
    with refusing_what_vanishes(checkpoint.absolute()):
        opened = open_checkpoint(checkpoint, tag, progress)
        with naming_checkpoint(opened.folder):
            return _consolidate(opened, out, shard_bytes, _MOMENTS if moments else (), start_from, progress)


def _consolidate(
    opened: OpenedCheckpoint,
    out: Path,
    shard_bytes: int | None,
    moments: Sequence[str],
    start_from: str | None,
    progress: Progress,
) -> Weights:
    adapted = opened.sidecars[0].adapted if opened.sidecars else None
    start = require_start(opened, start_from, progress) if adapted and start_from is not None else None
    recorded = _recorded_identity(opened, shard_bytes, moments, adapted if start else None)
    if recorded is not None and (there := reusable(Weights, out, recorded, progress)):
        return there
    require_vacant(out, recorded)
    plan = plan_of(opened, moments)
    if adapted and start:
        plan = merge(plan, start, adapted.scaling)
    with new_folder(out, plan.size) as folder:
        files: dict[str, FileDigest | SafetensorsDigest] = {}
        for stem, tensors in plan.by_stem.items():
            most = None if stem == ADAPTERS else shard_bytes  # as in PEFT's format, adapters are in one file
            files |= write_tensors(tensors, folder, stem, most, has_digests=bool(opened.sidecars), progress=progress)
        # Weights of unknown origin are identified by their content.
        identity = recorded or fingerprint({"files": {name: digest.model_dump() for name, digest in files.items()}})
        if there := reusable(Weights, out, identity, progress):
            return there
        require_vacant(out, identity)
        weights = _record(out, opened, plan, identity, files).commit(folder)
        sync_folder(folder)
        if out.is_dir() and any(out.iterdir()):
            _log.warning("the weights in %s were damaged or changed. They were moved to %s", out, rename_aside(out))
        folder.rename(out)
        sync_folder(out.parent)
    return weights


def _recorded_identity(
    opened: OpenedCheckpoint, shard_bytes: int | None, moments: Sequence[str], merged: AdaptedModel | None
) -> str | None:
    """The fingerprint of the result, from the run, its step, the files' digests and the options.

    ``merged`` is the model that adapters are merged with. None without sidecars.
    """
    if not opened.sidecars:
        return None
    first = opened.sidecars[0]
    digests = {name: digest.sha256 for name, digest in files_of(opened.sidecars).items()}
    identity = {"run": first.run_fingerprint, "step": first.step, "files": digests, "shard_bytes": shard_bytes}
    start = {"merged_with": merged.model_dump(mode="json")} if merged else {}
    return fingerprint({**identity, "moments": list(moments), **start})


def _record(
    out: Path, opened: OpenedCheckpoint, plan: Plan, identity: str, files: Mapping[str, FileDigest | SafetensorsDigest]
) -> Weights:
    return Weights(
        path=out,
        fingerprint=identity,
        inputs={"run": opened.sidecars[0].run_fingerprint} if opened.sidecars else {},
        files=files,
        counts={"parameters": plan.num_parameters, "tensors": len(plan.tensors), "bytes": plan.size, "step": plan.step},
    )
