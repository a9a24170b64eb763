"""Train a run beyond its end: with more steps, or with more patience.

Where no step depends on when training ends, the checkpoints of a run are also those of a longer one. A run that is
continued keeps the identity that it was begun with. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from t5train.checkpoint import sidecar
from t5train.checkpoint.resume_point import last_complete
from t5train.errors import IncompleteCheckpoint, RunChanged
from t5train.files.run_folder import CHECKPOINTS
from t5train.quantities import quantity
from t5train.records.identity import differences
from t5train.spec import RunSpec

End = tuple[str, str]
"""Part and name of a setting that decides when training ends."""
STEPS: End = ("optimizer", "num_steps")
PATIENCE: End = ("evaluate", "patience")
_ENDLESS = ("constant", "inverse-sqrt")
"""Schedules whose learning rates do not depend on the number of steps."""


def changed_settings(begun: RunSpec, spec: RunSpec) -> list[str]:
    """Return which settings that affect the weights differ, with both values.

    The location of the text may differ, and training may end later.
    """
    before, after = begun.settings_without_locations(), spec.settings_without_locations()
    for part, name in later_ends(begun, spec):
        for settings in (before, after):
            settings[part].pop(name, None)
    return differences(before, after)


def later_ends(begun: RunSpec, spec: RunSpec) -> Iterator[End]:
    """Yield the settings with which ``spec`` continues a run beyond its end."""
    if spec.optimizer.num_steps > begun.optimizer.num_steps and spec.optimizer.schedule in _ENDLESS:
        yield STEPS
    before, after = begun.evaluate.patience, spec.evaluate.patience
    if before is not None and (after is None or after > before) and spec.evaluate.best_metric is not None:
        yield PATIENCE


def refuse_changes(begun: RunSpec, spec: RunSpec) -> None:
    """Raise RunChanged unless a run can go on with the settings of ``spec``."""
    changed = changed_settings(begun, spec)
    depends = any(each.startswith("optimizer.num_steps:") for each in changed)
    if len(changed) == 1 and depends and spec.optimizer.num_steps > begun.optimizer.num_steps:
        raise RunChanged(
            f"run {spec.run_name!r} cannot be continued to {spec.optimizer.num_steps:,} steps (optimizer.num_steps): "
            f"with optimizer.schedule={spec.optimizer.schedule}, the learning rate of its first "
            f"{begun.optimizer.num_steps:,} depended on their number. To train on from its weights, choose another "
            "--name and set model.start_from to the published folder"
        )
    if changed:
        raise RunChanged(
            f"run {spec.run_name!r} was begun with other settings ({'; '.join(changed)}). Set these back, or choose "
            "another --name"
        )
    if any(later_ends(begun, spec)):
        require_effect(begun, spec)


def require_effect(begun: RunSpec, spec: RunSpec) -> None:
    """Raise RunChanged if one longer run would not have gone on from the newest checkpoint, or not from the same one.

    With a metric for the best checkpoint, the last step is judged even if it is not validated in a longer run. Nothing
    is raised while the checkpoint is only on hosts or in a bucket.
    """
    last = last_complete(spec.run_folder)
    try:
        newest = sidecar.read(spec.run_folder / CHECKPOINTS / last.tag, 0) if last else None
    except IncompleteCheckpoint:
        return  # it is not on this machine yet, or to resume from it is refused with the reason
    if newest is None or newest.best is None:
        return
    if spec.evaluate.ends_training(newest.best):
        without = newest.best.validations_since
        raise RunChanged(
            f"run {spec.run_name!r} ended early, after step {newest.step:,}, and more steps would not continue it: "
            f"{quantity(without, 'validation')} in a row had no better {spec.evaluate.best_metric}, and "
            f"evaluate.patience is {spec.evaluate.patience}. Set evaluate.patience to more than {without}, or to null"
        )
    every = spec.storage.validate_every_steps
    if newest.step == begun.optimizer.num_steps and newest.step % every:
        raise RunChanged(
            f"run {spec.run_name!r} cannot be continued: its last step, {newest.step:,}, was judged for the best "
            f"checkpoint, which one longer run would not do, as storage.validate_every_steps is {every}. To train on "
            "from its weights, choose another --name and set model.start_from to the published folder"
        )


def with_ends_of(begun: Mapping[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a run with the ends that it was begun with, which it keeps if it is continued."""
    for part, name in (STEPS, PATIENCE):
        if part in begun and part in identity:
            others = {key: value for key, value in identity[part].items() if key != name}
            identity[part] = others | ({name: begun[part][name]} if name in begun[part] else {})
    return identity


def name_of_version(run_name: str, begun: Mapping[str, Any], spec: RunSpec) -> str:
    """Return the name to publish a run under: its own, or one with its new ends if it was continued.

    ``begun`` is the identity that it was begun with. So no version takes the place of an earlier one.
    """
    name, patience = run_name, begun.get("evaluate", {}).get("patience")
    if spec.optimizer.num_steps != begun["optimizer"]["num_steps"]:
        name += f"-{spec.optimizer.num_steps}-steps"
    if spec.evaluate.patience != patience:
        name += f"-patience-{spec.evaluate.patience or 'none'}"
    return name
