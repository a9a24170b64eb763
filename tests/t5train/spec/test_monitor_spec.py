"""Settings for monitoring: the range of profiled steps, W&B's project, and runs from before they existed."""

import json

import pytest

from t5train.errors import SpecError
from t5train.spec import build
from t5train.spec.recipes import recipe, smoke


@pytest.mark.parametrize(("text", "ends"), [("10:13", (10, 13)), ("1:1", (1, 1)), ("001:050", (1, 50))])
def test_a_range_of_steps_includes_both_ends(text: str, ends: tuple[int, int]) -> None:
    assert recipe("smoke", {"profile.steps": text}).profile.range == ends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10", "'10', which is not a range of steps: write FIRST:LAST, both included, such as 10:13"),
        ("10-13", "'10-13', which is not a range of steps"),
        ("-1:3", "'-1:3', which is not a range of steps"),
        ("a:b", "'a:b', which is not a range of steps"),
        ("10:13:2", "which is not a range of steps"),
        ("0:3", "the first step of a run is 1; set profile.steps=1:3"),
        ("13:10", "'13:10': the last step must not be before the first one"),
        ("10:60", "'10:60', which are 51 steps: a trace may have at most 50, .* Set profile.steps=10:59 or fewer"),
        ("399:401", "'399:401', but the last step of the run is 400 .* such as profile.steps=397:400"),
    ],
)
def test_another_value_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^profile.steps is .*{message}"):
        recipe("smoke", {"profile.steps": text})


@pytest.mark.parametrize("name", ["", "a/b", " a", "a\n", "x" * 129])
def test_a_project_that_wandb_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"^monitor.wandb_project is .* Choose another name"):
        smoke().with_settings({"monitor.wandb_project": name})


def test_a_run_from_before_these_settings_can_be_read_and_has_the_same_fingerprint() -> None:
    earlier = json.loads(smoke().model_dump_json())
    del earlier["monitor"], earlier["profile"]
    assert build(earlier) == smoke()
    watched = {"monitor.csv": True, "monitor.wandb": True, "profile.steps": "10:13"}
    assert smoke().with_settings(watched).fingerprint() == build(earlier).fingerprint()
