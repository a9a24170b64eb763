"""A run's folder on the head: the identity it was begun with, whether it has finished, and the next attempt's job.

Nothing here imports torch.
"""

import json
import logging
import secrets
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.continuation import later_ends, name_of_version, refuse_changes, require_effect, with_ends_of
from t5train.checkpoint.reshard import consolidated_for, discard_consolidated
from t5train.checkpoint.resume_point import is_asked_to_begin_again, resume_tag, tags_in
from t5train.data.samples.loader import ORDER_VERSION
from t5train.data.vocabulary.tokenizer import stored_spiece
from t5train.errors import IncompleteCheckpoint, LaunchError, RecordError, RunChanged, SpecError
from t5train.files.atomic import replacing, write_json, write_text
from t5train.files.presence import ABSENT, is_there, reading
from t5train.files.run_folder import ATTEMPT_SPEC, CHECKPOINTS, CONFIG, RUN, WITNESS_FOLDER, tag_of
from t5train.model.starting_model import require_fit, require_vocabulary, start_fingerprint, start_name
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, digest_files
from t5train.records.identity import differences, fingerprint
from t5train.records.stage_records import MANIFEST, Checkpoint, reusable
from t5train.records.start_copy import origin
from t5train.records.witness import WITNESS_FILES
from t5train.spec import RunSpec, build
from t5train.spec.config_file import run_text
from t5train.spec.rank_job import Shards, TrainJob

_WITNESS_FILES = tuple(f"{WITNESS_FOLDER}/{name}" for name in WITNESS_FILES)
_DECAYED = "matrices"
"""What weight decay shrinks in new runs (t5train.model.parameters.is_decayed), as part of a run's identity."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def run_fingerprint(spec: RunSpec, shards: Shards) -> str:
    """The fingerprint of a run's identity: of its settings and its inputs."""
    return fingerprint(run_identity(spec, shards))


def run_identity(spec: RunSpec, shards: Shards) -> dict[str, Any]:
    """The settings, the order of samples and the rule of weight decay that training depends on, and its inputs.

    The inputs are the fingerprints of the shards and, if there are any, of the weights that training starts from. A run
    that is continued keeps the number of steps that it was begun with.
    """
    start, is_decayed = start_fingerprint(spec.model), spec.optimizer.weight_decay > 0
    identity = (
        spec.training_settings()  # the fingerprint of the shards covers those of the data
        | {"order_version": ORDER_VERSION, "shards": shards.fingerprint}
        | ({"start_from": start} if start else {})
        | ({"decayed": _DECAYED} if is_decayed and not decays_all(spec) else {})
    )
    path = spec.run_folder / RUN
    return _begun(path, lambda begun: with_ends_of(begun["identity"], identity)) if is_there(path) else identity


def decays_all(spec: RunSpec) -> bool:
    """Whether the run was begun by a version whose weight decay also shrinks norms and position biases.

    Such a run keeps this rule. Its run file does not record what is decayed.
    """
    path = spec.run_folder / RUN
    return (
        spec.optimizer.weight_decay > 0
        and is_there(path)
        and _begun(path, lambda begun: "decayed" not in begun["identity"])
    )


def open_run(spec: RunSpec, shards: Shards, progress: Progress = silent) -> None:
    """Create the run's folder, or check that the existing one was begun with the same identity.

    Raises RunChanged, naming every field that differs with both values, if it was begun with another identity; the
    folder stays unchanged. Raises the errors of ``require_fit`` if the model to start from does not fit the spec.
    """
    path = spec.run_folder / RUN
    if start_fingerprint(spec.model, progress):
        require_fit(spec.model, int(shards.counts["vocab_size"]))
        require_vocabulary(spec.model, shards.inputs["vocabulary"])
    if not is_there(path):
        identity = run_identity(spec, shards)
        spec.run_folder.mkdir(parents=True, exist_ok=True)
        begun = {"fingerprint": fingerprint(identity), "identity": identity, "spec": spec.model_dump(mode="json")}
        write_json(path, begun | {"unique_id": secrets.token_hex(16)})
        write_text(spec.run_folder / CONFIG, config_text(spec))
        return
    require_same_settings(spec)
    require_same(spec.run_name, path, run_identity(spec, shards))
    if unique_id(spec.run_folder) is None:  # begun by a version without unique ids
        write_json(path, json.loads(path.read_text("utf-8")) | {"unique_id": secrets.token_hex(16)})


def _continue(spec: RunSpec) -> None:
    """Record when training ends now, once the checkpoint that it resumes from is on this machine and verified.

    Without its manifest, a run that has ended goes on. Raises RunChanged if more training would not continue the run.
    """
    path, begun = spec.run_folder / RUN, load_run_spec(spec.run_folder)
    require_effect(begun, spec)
    (spec.run_folder / MANIFEST).unlink(missing_ok=True)  # first, as the run would otherwise count as longer and ended
    run = _begun(path, dict)
    for part, name in later_ends(begun, spec):
        run["spec"][part][name] = getattr(getattr(spec, part), name)
    write_json(path, run)


def _is_continued(spec: RunSpec) -> bool:
    folder = spec.run_folder
    return is_there(folder / RUN) and any(later_ends(load_run_spec(folder), spec))


def published_name(spec: RunSpec) -> str:
    """Return the name of the folder to publish a run to. A run that was continued has one beside the earlier."""
    path = spec.run_folder / RUN
    if not is_there(path):
        return spec.run_name
    return _begun(path, lambda begun: name_of_version(spec.run_name, begun["identity"], spec))


def config_text(spec: RunSpec) -> str:
    """Return a configuration file with the settings of this start, which may differ from the first start's in where.

    A copy of a model to start from is named by its origin, so that the file can be used under another root.
    """
    start = spec.model.start_from
    if start is not None and (source := origin(Path(start))) is not None:
        own = {"path": None} if spec.tokenizer.path == start else {}
        parts = {"model": {"start_from": source}, "tokenizer": own}
        spec = spec.model_copy(update={name: getattr(spec, name).model_copy(update=new) for name, new in parts.items()})
    return run_text(spec, spec.run_folder / CONFIG)


def unique_id(run_folder: Path) -> str | None:
    """The id that distinguishes a run from those of the same name and settings under other roots.

    None before the run begins.
    """
    return _recorded(run_folder, lambda begun: begun.get("unique_id"))


def begun_fingerprint(run_folder: Path) -> str | None:
    """The fingerprint that a run was begun with; None if it has not begun. Raises SpecError if its file is damaged."""
    return _recorded(run_folder, lambda begun: begun["fingerprint"])


def begun_shards(run_folder: Path) -> str | None:
    """The fingerprint of the shards that a run was begun with; None if it has not begun.

    Raises SpecError if its file is damaged.
    """
    return _recorded(run_folder, lambda begun: begun["identity"].get("shards"))


def _recorded(run_folder: Path, part: Callable[[Any], Any]) -> str | None:
    path = run_folder / RUN
    found = _begun(path, part) if is_there(path) else None
    return None if found is None else str(found)


def has_finished(spec: RunSpec) -> bool:
    """Whether the run's manifest records that training has ended, and the spec does not continue it.

    ``finished`` also verifies the files.
    """
    folder = spec.run_folder
    try:
        has_ended = Checkpoint.load(folder).fingerprint == begun_fingerprint(folder)
    except RecordError:
        return False
    return has_ended and not _is_continued(spec)


def load_run_spec(run_folder: Path) -> RunSpec:
    """The spec that a run was begun with.

    Args:
        run_folder: ``{root}/runs/{name}``.

    Returns:
        The spec, as recorded in ``run.json``.

    Raises:
        SpecError: The file is absent or damaged; the error names it.

    """
    return _begun(run_folder / RUN, lambda begun: build(begun["spec"]))


def require_same(name: str, path: Path, identity: Mapping[str, Any]) -> None:
    """Raise RunChanged unless the run file has the same value for every part of ``identity``."""
    begun = _begun(path, _identity)
    _require_same_order(name, begun)
    if changed := differences({part: begun.get(part) for part in identity}, identity):
        raise RunChanged(
            f"run {name!r} was begun with other settings ({'; '.join(changed)}). Set these back, or choose another "
            "--name"
        )


def _require_same_order(name: str, begun: Mapping[str, Any]) -> None:
    """Raise RunChanged if the run has another order of samples than this version produces."""
    version = begun.get("order_version", 1)  # version 1 was not recorded
    if version != ORDER_VERSION:
        raise RunChanged(
            f"run {name!r} was started with version {version} of the sample order, and this installation has version "
            f"{ORDER_VERSION}: continuing would train on some samples twice and skip others. Finish the run with the "
            f"installation that started it, or choose another --name. To begin that run with the weights of {name!r}, "
            f"export {name!r} and set model.start_from to the export"
        )


def _begun(path: Path, part: Callable[[Any], T]) -> T:
    """Read a part of the run file. Raises Unreadable, and SpecError if it is absent or damaged."""
    try:
        with reading(path):
            return part(json.loads(path.read_bytes()))
    except ABSENT:
        raise SpecError(f"{path.parent} is not a run folder: it has no {path.name}. Check the path") from None
    except (ValueError, KeyError, TypeError, SpecError) as error:
        raise SpecError(f"{path} is damaged ({error}). Restore the file, or choose another --name") from error


def require_same_settings(spec: RunSpec) -> None:
    """Raise RunChanged if the run on disk was begun with other settings that affect the weights.

    This check needs no tokens. The location of the text is not compared, as it may have been moved. Training may end
    later than before, where it can be continued.
    """
    path = spec.run_folder / RUN
    if is_there(path):
        _require_same_order(spec.run_name, _begun(path, _identity))
        refuse_changes(load_run_spec(spec.run_folder), spec)


def _identity(begun: Any) -> dict[str, Any]:
    return dict(begun["identity"])


def finished(spec: RunSpec, shards: Shards, progress: Progress = silent) -> Checkpoint | None:
    """The record of the run's last checkpoint if training has ended and all of its files verify, else None.

    None also if the spec continues the run.
    """
    if _is_continued(spec):
        return None
    return reusable(Checkpoint, spec.run_folder, run_fingerprint(spec, shards), progress)


def write_job(spec: RunSpec, shards: Shards, attempt_folder: Path, progress: Progress = silent) -> Path:
    """Choose the newest complete checkpoint, verify it, and write the job file for the ranks.

    A checkpoint that was written in another layout than the spec's is consolidated first. A run that has ended is
    reopened if the spec continues it. If the user asked to begin again, all checkpoints are moved aside unread. Raises
    RunChanged if there is a checkpoint of another run, or if more training would not continue the run, and the errors
    of ``newest_verified_tag``.
    """
    if not is_asked_to_begin_again(spec.run_folder):
        _require_own_checkpoints(spec, shards)
    if decays_all(spec):
        _log.warning(
            "run %s was begun by an earlier version: its weight decay (%g) also shrinks norms and position biases. It "
            "keeps this rule; new runs exempt them",
            spec.run_name,
            spec.optimizer.weight_decay,
        )
    tag = resume_tag(spec.run_folder, progress)
    consolidated = None
    if tag is not None:
        _log.info("resuming %s from %s", spec.run_name, tag)
        consolidated = consolidated_for(spec, tag, progress)
    if _is_continued(spec):
        _continue(spec)
    job = TrainJob(
        spec=spec,
        run_fingerprint=run_fingerprint(spec, shards),
        run_folder=spec.run_folder.resolve(),
        shards_folder=shards.path.resolve(),
        resume_tag=None if consolidated else tag,
        consolidated=consolidated,
        start_fingerprint=start_fingerprint(spec.model),
        start_name=start_name(spec.model),
        unique_id=unique_id(spec.run_folder),
        decays_all=decays_all(spec),
        vocabulary=b64encode(stored_spiece(spec.storage.root, shards.inputs["vocabulary"]))
        if spec.evaluate.generates
        else None,
    )
    write_text(spec.run_folder / CONFIG, config_text(spec))
    path = attempt_folder / ATTEMPT_SPEC
    write_text(path, job.model_dump_json(indent=1) + "\n")
    return path


def is_job_of(spec: RunSpec, shards: Shards, attempt_folder: Path) -> bool:
    """Whether an attempt's job is for this spec and these shards; the checkpoint it began from does not matter.

    The path of the weights that the run started from is not compared, because it may differ on nodes.
    """
    job = TrainJob.read(attempt_folder / ATTEMPT_SPEC)
    model = job.spec.model.model_copy(update={"start_from": spec.model.start_from})
    described = job.spec.model_copy(update={"model": model})
    return described == spec and job.run_fingerprint == run_fingerprint(spec, shards)


def conclude(spec: RunSpec, shards: Shards, progress: Progress = silent) -> Checkpoint:
    """Verify the results of the ranks and write the run's manifest, the only sign that training has ended.

    Returns the record of the last checkpoint, or of the best one if the run has a metric for that. Raises LaunchError
    if the witness is missing or training has not ended, and the errors of ``require_complete`` for the checkpoint.
    """
    folder = spec.run_folder
    step = _best_step(spec, progress) if spec.evaluate.best_metric else spec.optimizer.num_steps
    tag = tag_of(step)
    for name in _WITNESS_FILES:
        if not is_there(folder / name):
            raise LaunchError(f"every rank succeeded, but {folder / name} is missing: start the run again")
    sidecars = tags.require_complete(folder / CHECKPOINTS / tag, progress)
    discard_consolidated(folder)
    files: dict[str, FileDigest] = {
        f"{CHECKPOINTS}/{tag}/{name}": digest for name, digest in tags.files_of(sidecars).items()
    }
    names = [f"{CHECKPOINTS}/{tag}/{sidecar.sidecar_name(one.rank)}" for one in sidecars]
    return Checkpoint(
        path=folder,
        fingerprint=sidecars[0].run_fingerprint,  # as recorded: the weights it started from may no longer exist
        inputs={"shards": shards.fingerprint},
        files=files | digest_files(folder, [*names, *_WITNESS_FILES]),
        counts={"step": step, "ranks": len(sidecars), "samples": sidecars[0].data.samples_consumed},
        step=step,
        tag=tag,
    ).commit()


def _best_step(spec: RunSpec, progress: Progress) -> int:
    """Return the step of the best checkpoint of a run that has ended, after copying its witness to the run's folder."""
    checkpoints = spec.run_folder / CHECKPOINTS
    newest = next(iter(tags.complete_tags(checkpoints)), None)
    last = sidecar.read(checkpoints / newest, 0) if newest else None
    best = last.best if last else None
    has_ended = best and last and (last.step == spec.optimizer.num_steps or spec.evaluate.ends_training(best))
    if best is None or best.step is None or not has_ended:
        raise LaunchError(
            f"every rank succeeded, but the newest complete checkpoint in {checkpoints} is {newest}, which is neither "
            "the last step nor one that ends training early: start the run again"
        )
    folder = checkpoints / tag_of(best.step)
    tags.require_complete(folder, progress)
    (spec.run_folder / WITNESS_FOLDER).mkdir(exist_ok=True)
    for name in WITNESS_FILES:
        with replacing(spec.run_folder / WITNESS_FOLDER / name) as file:
            file.write((folder / name).read_bytes())
    return best.step


def _require_own_checkpoints(spec: RunSpec, shards: Shards) -> None:
    """Raise RunChanged if there is a checkpoint of another run, for example because ``run.json`` was replaced."""
    folder, own = spec.run_folder / CHECKPOINTS, run_fingerprint(spec, shards)
    for tag in tags_in(folder):
        try:
            written = tags.require_agreement(sidecar.read_all(folder / tag), folder / tag)
        except IncompleteCheckpoint:
            continue  # no run resumes from it
        if written[0].run_fingerprint != own:
            raise RunChanged(
                f"{folder / tag} is a checkpoint of another run, not of {spec.run_name!r}. Move that folder to "
                f"another place, so that {spec.run_name!r} resumes from its own checkpoints, or choose another --name"
            )
