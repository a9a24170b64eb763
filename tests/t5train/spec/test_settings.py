"""What is said about a setting is complete and right."""

import pytest

from t5train.errors import SpecError
from t5train.spec import RunSpec, setting_names
from t5train.spec.recipes import recipe
from t5train.spec.settings import settings_of
from tests.t5train.spec.test_fingerprint import EXECUTION

SETTINGS = settings_of(RunSpec)


def test_every_setting_is_described_in_a_sentence_of_its_own() -> None:
    assert list(SETTINGS) == setting_names()
    assert all(len(setting.description) >= 12 for setting in SETTINGS.values())
    assert not [name for name, setting in SETTINGS.items() if setting.description.endswith(".")]
    assert not [name for name, setting in SETTINGS.items() if "left out" in setting.description and name != "recipe"]


def test_what_null_means_is_said_for_every_setting_that_may_be_null() -> None:
    assert {name for name, setting in SETTINGS.items() if setting.allowed.endswith("or null")} == {
        name for name, setting in SETTINGS.items() if "null:" in setting.description
    }


def test_execution_settings_are_those_outside_the_fingerprint() -> None:
    assert {name for name, setting in SETTINGS.items() if not setting.is_identity} == EXECUTION


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("optimizer.num_steps", "a whole number of at least 1"),
        ("cluster.retries", "a whole number from 0 to 100"),
        ("optimizer.peak_learning_rate", "a number above 0 and up to 1"),
        ("objective.noise_density", "a number above 0 and below 0.5"),
        ("model.dropout_rate", "a number of at least 0 and below 1"),
        ("corpus.workers", "a whole number of at least 1, or null"),
        ("model.feed_forward", "one of gated-gelu, relu, or null"),
        ("layout.zero_stage", "one of 0, 1, 2, 3"),
        ("model.compile", "true or false"),
        ("storage.root", "a path"),
        ("storage.scratch", "a path or null"),
        ("corpus.split", "a list of 3 whole numbers"),
        ("optimizer.betas", "a list of 2 numbers"),
        ("cluster.environment", "a list of text"),
        ("name", "text of at most 80 of the characters A-Z a-z 0-9 . _ -, the first one of A-Z a-z 0-9, or null"),
    ],
)
def test_allowed_values_are_those_that_a_spec_takes(name: str, allowed: str) -> None:
    assert SETTINGS[name].allowed == allowed
    wrong = [["x", {}]] if "list" in allowed else "/\n" if name == "name" else {"x": 1}
    with pytest.raises(SpecError, match=f"it must be {allowed}"):
        recipe("smoke", {name: wrong})


def test_choices_are_offered_for_settings_that_have_some() -> None:
    assert SETTINGS["optimizer.precision"].choices == ["fp32", "bf16", "fp16"]
    assert SETTINGS["model.feed_forward"].choices == ["gated-gelu", "relu"]
    assert SETTINGS["model.compile"].choices == ["true", "false"]
    assert SETTINGS["optimizer.seed"].choices == []
