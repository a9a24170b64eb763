"""A recipe is a complete spec with a name."""

import pytest

from t5train.errors import SpecError
from t5train.spec import build
from t5train.spec.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_name_and_a_description_and_survives_json(name: str) -> None:
    spec = recipe(name)
    assert spec.recipe == name
    assert RECIPES[name].__doc__
    assert build(spec.model_dump(mode="json")) == spec


def test_recipes_that_differ_only_in_execution_settings_have_the_same_fingerprint() -> None:
    assert len({recipe(name).run_name for name in RECIPES}) == len(RECIPES)
    same = ("base", "pipeline", "zero1_offload", "zero2_offload", "zero3")
    assert len({recipe(name).fingerprint() for name in same}) == 1
    assert len({recipe(name).fingerprint() for name in RECIPES}) > 5


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SpecError, match=r"unknown recipe 'smok' \(did you mean 'smoke'\?\); choose one of smoke, "):
        recipe("smok")
