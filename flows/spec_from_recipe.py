"""Builds a complete RunSpec from a user's input: a recipe and changed settings."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.head.hosts.hostfile import chosen_hosts
from infra.head.launch.deepspeed_launcher import require_launchable
from t5train.errors import SpecError
from t5train.quantities import quantity
from t5train.records.locations import local_folder
from t5train.spec import RunSpec, setting_names
from t5train.spec.config_file import data_setting
from t5train.spec.recipes import RECIPES
from t5train.spec.recipes import recipe as recipe_spec

_OF_TEXT, _OF_PAIRS = ("corpus", "objective"), ("pairs",)
"""Parts of a RunSpec that count only for runs on text, or only for runs on pairs."""
_OF_BOTH = {"corpus.license", "corpus.languages"}
"""Settings of these parts that the model card of any run states."""


def resolve(
    recipe: str,
    settings: Mapping[str, Any],
    *,
    root: Path | None = None,
    run_name: str | None = None,
    publish_to: str | None = None,
) -> RunSpec:
    """Return the spec of a recipe with settings changed and local paths made absolute. Raises SpecError if invalid."""
    changes: dict[str, Any] = dict(settings)
    # Quoted, so that a name such as "2024" stays text when the setting is read as JSON.
    for setting, value in (("storage.root", root), ("name", run_name), ("storage.publish_to", publish_to)):
        if value is not None:
            changes[setting] = json.dumps(str(value))
    spec = recipe_spec(recipe).with_settings(changes | _ranks(recipe, changes))
    places = {"storage.root": json.dumps(str(spec.storage.root.absolute()))}
    if spec.storage.publish_to and (folder := local_folder(spec.storage.publish_to)):
        places["storage.publish_to"] = json.dumps(str(folder))
    if spec.model.start_from and (folder := local_folder(spec.model.start_from)):
        places["model.start_from"] = json.dumps(str(folder))
        if spec.is_fine_tuning and spec.tokenizer.path is None and folder.is_dir():
            places["tokenizer.path"] = json.dumps(str(folder))  # the vocabulary that the model knows
    for setting, path in (
        ("cluster.hostfile", spec.cluster.hostfile),
        ("cluster.known_hosts", spec.cluster.known_hosts),
        ("evaluate.hostfile", spec.evaluate.hostfile),
    ):
        if path is not None:
            places[setting] = json.dumps(str(path.absolute()))
    return spec.with_settings(places)


def is_fine_tuning(recipe: str) -> bool:
    """Whether a recipe trains on pairs, and not on text."""
    return recipe_spec(recipe).is_fine_tuning


def has_own_data(recipe: str, changes: Mapping[str, Any]) -> bool:
    """Whether there is a text, or pairs, to train on: the changes name them, or the recipe is for trials on CPUs."""
    return data_setting(recipe_spec(recipe)) in changes or recipe_spec(recipe).cluster.accelerator == "cpu"


def require_own_data(recipe: str, changes: Mapping[str, Any]) -> None:
    """Raise SpecError if the recipe is not for trials on CPUs, and the changed settings name nothing to train on."""
    if has_own_data(recipe, changes):
        return
    if is_fine_tuning(recipe):
        raise SpecError(
            f"recipe {recipe!r} needs pairs to train on: name a file with --train or in pairs.train (in Prefect: the "
            "parameter train), such as wmt.jsonl#source=en&target=de. For a small trial without a GPU: "
            f"t5-pretrain finetune {recipe} --trial"
        )
    raise SpecError(
        f"recipe {recipe!r} needs text to train on: name a file, folder, pattern or URL with --corpus or in "
        "corpus.source (in Prefect: the parameter corpus, or for all deployments `t5-pretrain deploy --corpus`). "
        f"For a small trial without a GPU: t5-pretrain run {recipe} --trial"
    )


def require_recipe_for(fine_tuning: bool, recipe: str) -> None:
    """Raise SpecError if a recipe fine-tunes, and the command or flow pre-trains, or the other way round."""
    if is_fine_tuning(recipe) == fine_tuning:
        return
    what, command = ("on text", "run") if fine_tuning else ("on pairs", "finetune")
    others = ", ".join(name for name in RECIPES if is_fine_tuning(name) == fine_tuning)
    raise SpecError(
        f"recipe {recipe!r} trains {what}: use `t5-pretrain {command} {recipe}` (in Prefect: "
        f"t5-{'pretrain' if fine_tuning else 'finetune'}/{recipe}), or one of the recipes {others}"
    )


def require_on_text(recipe: str, instead: str) -> None:
    """Raise SpecError, which names the command to use ``instead``, if a recipe trains on pairs."""
    if is_fine_tuning(recipe):
        raise SpecError(f"recipe {recipe!r} trains on pairs, and this command is for text: use `t5-pretrain {instead}`")


def require_used(recipe: str, settings: Iterable[str]) -> None:
    """Raise SpecError if one of these settings is of text, and the recipe trains on pairs, or the other way round."""
    unused, instead = (_OF_TEXT, "pairs") if is_fine_tuning(recipe) else (_OF_PAIRS, "corpus")
    for name in settings:
        part, _, key = name.partition(".")
        if part not in unused or name in _OF_BOTH:
            continue
        what = "pairs" if instead == "pairs" else "text"
        other = f"{instead}.{key}"
        remedy = f"set {other}" if other in setting_names() else f"leave {name} out"
        raise SpecError(f"{name} is set, but recipe {recipe!r} trains on {what}, where it has no effect: {remedy}")


def without_unused(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were given for all recipes, without those that this one does not use."""
    unused = _OF_TEXT if is_fine_tuning(recipe) else _OF_PAIRS
    return {name: value for name, value in settings.items() if name.partition(".")[0] not in unused}


def _ranks(recipe: str, changes: Mapping[str, Any]) -> dict[str, int]:
    """Return the setting ``cluster.ranks`` as determined by the hostfile; empty without a hostfile."""
    of_cluster = {name: value for name, value in changes.items() if name.startswith("cluster.")}
    asked = of_cluster.pop("cluster.ranks", None)
    of_cluster.pop("cluster.ship_code", None)  # can be meant for the hosts of evaluate.hostfile alone
    cluster = recipe_spec(recipe).with_settings(of_cluster).cluster
    if cluster.hostfile is None:
        return {}
    hosts = chosen_hosts(cluster)
    require_launchable(cluster, hosts)
    slots = hosts.num_ranks
    if asked is not None and str(asked) != str(slots):
        raise SpecError(
            f"cluster.ranks is {asked}, but the hosts chosen from {cluster.hostfile} have {quantity(slots, 'slot')}: "
            "leave cluster.ranks out, because the hostfile determines it, or choose other hosts"
        )
    return {"cluster.ranks": slots}
