"""Declarations that are repeated for their readers agree with each other."""

from importlib.resources import files
from typing import get_args

import yaml

from flows.pretrain import RecipeName, pretrain
from t5train.spec.recipes import RECIPES


def test_the_flows_recipe_parameter_offers_every_recipe() -> None:
    assert set(get_args(RecipeName)) == set(RECIPES)


def test_every_recipe_has_a_deployment() -> None:
    declared = yaml.safe_load((files("deployments") / "prefect.yaml").read_text("utf-8"))
    assert {each["name"] for each in declared["deployments"]} == set(RECIPES)
    assert all(each["parameters"]["recipe"] == each["name"] for each in declared["deployments"])
    assert all(each["entrypoint"] == "flows.pretrain:pretrain" for each in declared["deployments"])


def test_every_flow_parameter_has_a_description_that_a_web_page_shows_in_full() -> None:
    descriptions = [each.get("description") for each in pretrain.parameters.properties.values()]
    assert all(descriptions)
    assert not [each for each in descriptions if "<" in each]  # a web page treats <name> as a tag and hides it
