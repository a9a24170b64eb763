"""The examples for Kubernetes: valid by its published schemas, with arguments that this program accepts."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from flows.spec_from_recipe import resolve

EXAMPLES = sorted((Path(__file__).parents[2] / "deployments" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.31", "1.36")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def commands() -> Iterator[list[str]]:
    """Yield the command lines that start runs, as lists of words."""
    for job in (each for path in EXAMPLES for each in documents(path) if each["kind"] == "Job"):
        container = job["spec"]["template"]["spec"]["containers"][0]
        words = shlex.split(" ".join(container["args"]).replace("\\\n", " "))
        yield words[words.index("run") :]


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["one-host.yaml", "several-hosts.yaml"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_follow_the_published_schemas(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_is_noticed() -> None:
    job = next(each for each in documents(EXAMPLES[0]) if each["kind"] == "Job")
    job["spec"]["template"]["spec"]["terminationGraceSeconds"] = 600
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: words[2])
def test_recipe_and_settings_of_the_examples_are_valid(words: list[str]) -> None:
    _run, recipe, *options = words
    assert all(re.fullmatch(r"--(name|root|hostfile|set)=.+", option) for option in options)
    settings = [option.removeprefix("--set=") for option in options if option.startswith("--set=")]
    spec = resolve(recipe, dict(setting.split("=", 1) for setting in settings))
    assert spec.corpus.source == "/data/text"


def test_mounted_volumes_configuration_and_keys_are_those_that_the_examples_define() -> None:
    everything = [each for path in EXAMPLES for each in documents(path)]
    for workload in (each for each in everything if each["kind"] in {"Job", "StatefulSet"}):
        pod = workload["spec"]["template"]["spec"]
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod["volumes"]} | claims
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    hosts = next(each for each in everything if each["kind"] == "ConfigMap")["data"]["hosts"].split()[::2]
    nodes, service = (next(each for each in everything if each["kind"] == kind) for kind in ("StatefulSet", "Service"))
    names = [f"{nodes['metadata']['name']}-{number}" for number in range(nodes["spec"]["replicas"])]
    assert hosts == [f"{name}.{service['metadata']['name']}" for name in names]
