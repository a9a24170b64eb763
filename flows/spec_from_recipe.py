"""Builds a complete RunSpec from a user's input: a recipe and changed settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.head.hosts.hostfile import chosen_hosts
from infra.head.launch.deepspeed_launcher import require_launchable
from t5train.errors import SpecError
from t5train.locations import local_folder
from t5train.quantities import quantity
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe as recipe_spec


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
    for setting, path in (
        ("cluster.hostfile", spec.cluster.hostfile),
        ("cluster.known_hosts", spec.cluster.known_hosts),
    ):
        if path is not None:
            places[setting] = json.dumps(str(path.absolute()))
    return spec.with_settings(places)


def has_own_text(recipe: str, changes: Mapping[str, Any]) -> bool:
    """Whether there is a text to train on: the changed settings name one, or the recipe is for trials on CPUs."""
    return "corpus.source" in changes or recipe_spec(recipe).cluster.accelerator == "cpu"


def require_own_text(recipe: str, changes: Mapping[str, Any]) -> None:
    """Raise SpecError if the recipe is not for trials on CPUs, and the changed settings name no text for it."""
    if not has_own_text(recipe, changes):
        raise SpecError(
            f"recipe {recipe!r} needs text to train on: name a file, folder, pattern or URL with --corpus or in "
            "corpus.source (in Prefect: the parameter corpus, or for all deployments `t5-pretrain deploy --corpus`). "
            f"For a small trial without a GPU: t5-pretrain run {recipe} --trial"
        )


def _ranks(recipe: str, changes: Mapping[str, Any]) -> dict[str, int]:
    """Return the setting ``cluster.ranks`` as determined by the hostfile; empty without a hostfile."""
    of_cluster = {name: value for name, value in changes.items() if name.startswith("cluster.")}
    asked = of_cluster.pop("cluster.ranks", None)
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
