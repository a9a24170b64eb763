"""Declarations that are repeated for their readers agree with each other."""

from typing import Any, get_args

import pytest
from prefect import Flow

from flows.deployment.definitions import Definitions
from flows.pretrain import pretrain
from flows.regression import regression
from flows.run_parameters import RecipeName
from t5train.spec.recipes import RECIPES


def test_the_flows_recipe_parameter_offers_every_recipe() -> None:
    assert set(get_args(RecipeName)) == set(RECIPES)


def test_every_recipe_has_a_deployment() -> None:
    definitions = Definitions.load()
    of_recipes = [each for each in definitions.deployments if each.flow is pretrain]
    assert {each.name for each in of_recipes} == set(RECIPES)
    assert all(each.parameters["recipe"] == each.name for each in of_recipes)


@pytest.mark.parametrize("flow", [pretrain, regression], ids=["pretrain", "regression"])
def test_every_flow_parameter_has_a_description_that_a_web_page_shows_in_full(flow: Flow[..., Any]) -> None:
    descriptions = [each.get("description") for each in flow.parameters.properties.values()]
    assert all(descriptions)
    assert not [each for each in descriptions if "<" in each]  # a web page treats <name> as a tag and hides it
