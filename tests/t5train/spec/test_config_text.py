"""The configuration file that is written for a spec is read back as the same spec."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from t5train.spec import RunSpec, setting_names
from t5train.spec.config_file import data_setting, read_config, recipe_text, run_text
from t5train.spec.recipes import RECIPES, recipe
from tests.t5train.spec.test_fingerprint import OTHER

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
TEXTS = {
    "corpus.revision": WORDS,
    "tokenizer.path": WORDS,
    "corpus.source": WORDS.filter(lambda text: "://" not in text and text.strip() != ""),
    "optimizer.epsilon": st.floats(1e-300, 1e300),
    "optimizer.weight_decay": st.floats(0, 1),
    "optimizer.seed": st.integers(0, 2**31 - 1),
    "name": st.from_regex(re.compile("^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$", re.ASCII), fullmatch=True),
    "cluster.environment": st.lists(st.from_regex(re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII), fullmatch=True)),
}


def read_back(text: str, folder: Path) -> RunSpec:
    (folder / "run.yaml").write_text(text, "utf-8")
    config = read_config(folder / "run.yaml")
    assert config.recipe is not None
    return recipe(config.recipe).with_settings(config.settings)


@pytest.mark.parametrize("needs_source", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_back(name: str, needs_source: bool, tmp_path: Path) -> None:
    text = recipe_text(recipe(name), needs_source=needs_source)
    assert read_back(text, tmp_path) == recipe(name)
    written = set(read_config(tmp_path / "run.yaml").settings)
    assert (data_setting(recipe(name)) in written) is not needs_source
    of_pairs = recipe(name).is_fine_tuning
    others = {each for each in written if each.startswith(("corpus.", "objective.") if of_pairs else "pairs.")}
    assert others == ({"corpus.license", "corpus.languages"} if of_pairs else set())


@settings(max_examples=40)
@given(
    chosen=st.sets(st.sampled_from(sorted(set(OTHER) - {"recipe"})), max_size=6),
    texts=st.fixed_dictionaries({}, optional=TEXTS),
)
def test_every_valid_change_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[str], texts: dict[str, Any]
) -> None:
    values = {name: OTHER[name] for name in chosen}
    quoted = {name: quoted_text(value) for name, value in texts.items()}
    spec = recipe("smoke").with_settings(values).with_settings(quoted)
    folder = tmp_path_factory.getbasetemp()
    for text in (recipe_text(spec, needs_source=False), run_text(spec, Path("config.yaml"))):
        again = read_back(text, folder)
        assert again == spec
        assert (again.fingerprint(), again.run_name) == (spec.fingerprint(), spec.run_name)


def quoted_text(value: Any) -> Any:
    """Quote text as JSON, so that it is not read as such."""
    return json.dumps(value) if isinstance(value, str) else value


def test_every_setting_is_written_once_with_a_comment_before_it() -> None:
    lines = recipe_text(recipe("moe"), needs_source=False).splitlines()
    written = [number for number, line in enumerate(lines) if re.match(r" *[a-z_0-9]+: \S", line)]
    assert len(written) == len([name for name in setting_names() if not name.startswith("pairs.")])
    assert all(lines[number - 1].lstrip().startswith("# ") for number in written)
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_other_yaml_readers_read_the_same_values() -> None:
    spec = recipe("base").with_settings({"optimizer.epsilon": 1e-8, "corpus.revision": "on", "name": "007"})
    read = yaml.safe_load(recipe_text(spec, needs_source=False))
    assert read == spec.model_dump(mode="json", exclude={"pairs"})


def test_the_file_says_which_settings_are_execution_settings() -> None:
    text = recipe_text(recipe("smoke"), needs_source=False)
    marked = re.findall(r"\(execution\)\n *([a-z_]+):", text)
    of_corpus, of_shards = ["license", "languages", "workers"], ["workers", "executor", "max_unknown_share"]
    of_predictions = ["pause_share", "max_pairs", "num_beams", "max_new_tokens", "length_penalty", "hostfile"]
    assert marked == ["name", *of_corpus, *of_shards, "activation_checkpointing", "compile", *of_predictions]
    sentence = "Settings in layout, storage, cluster, monitor and profile, and those marked (execution)"
    assert sentence in " ".join(text.split("\n# "))


def test_the_text_that_a_recipe_for_gpus_needs_is_left_to_the_user() -> None:
    text = recipe_text(recipe("base"), needs_source=True)
    assert "\n  # REQUIRED. Text to train on" in text
    assert "\n  # source: /data/text/*.jsonl.gz\n" in text
    assert "source: pydocs" not in text


def test_the_file_for_smoke_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("smoke.yaml", recipe_text(recipe("smoke"), needs_source=False))
