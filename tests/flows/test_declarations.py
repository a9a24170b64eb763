"""Declarations that are repeated for their readers agree with each other."""

from typing import Any, get_args

import pytest
from prefect import Flow

from flows.deployment.definitions import Definitions
from flows.deployment.notifications import _FLOWS
from flows.finetune import finetune
from flows.pretrain import pretrain
from flows.regression import regression
from flows.run_parameters import FineTuningRecipeName, RecipeName
from t5train.spec.recipes import RECIPES

FLOWS = [pretrain, finetune]


def recipes_of(flow: Flow[..., Any]) -> set[str]:
    return {name for name, recipe in RECIPES.items() if recipe().is_fine_tuning == (flow is finetune)}


@pytest.mark.parametrize(("flow", "names"), [(pretrain, RecipeName), (finetune, FineTuningRecipeName)])
def test_the_recipe_parameter_of_a_flow_offers_every_recipe_that_it_can_train(flow: Flow[..., Any], names: Any) -> None:
    assert set(get_args(names)) == recipes_of(flow)
    assert set(flow.parameters.properties["recipe"]["enum"]) == recipes_of(flow)


@pytest.mark.parametrize("flow", FLOWS)
def test_every_recipe_has_a_deployment_of_the_flow_that_trains_it(flow: Flow[..., Any]) -> None:
    definitions = Definitions.load()
    of_recipes = [each for each in definitions.deployments if each.flow is flow]
    assert {each.name for each in of_recipes} == recipes_of(flow)
    assert all(each.parameters["recipe"] == each.name for each in of_recipes)


def test_runs_of_every_flow_are_watched_for_lost_heartbeats_and_notified_about() -> None:
    definitions = Definitions.load()
    flows = sorted({each.flow.name for each in definitions.deployments})
    triggers = [each.model_dump(mode="json")["trigger"] for each in definitions.automations]
    assert [sorted(each["match_related"]["prefect.resource.name"]) for each in triggers] == [flows]
    assert sorted(_FLOWS) == flows


@pytest.mark.parametrize("flow", [*FLOWS, regression], ids=lambda flow: str(flow.name))
def test_every_flow_parameter_has_a_description_that_a_web_page_shows_in_full(flow: Flow[..., Any]) -> None:
    descriptions = [each.get("description") for each in flow.parameters.properties.values()]
    assert all(descriptions)
    assert not [each for each in descriptions if "<" in each]  # a web page treats <name> as a tag and hides it
