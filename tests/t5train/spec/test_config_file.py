"""A configuration file is read as it is meant, or refused in one line that names the file, the line and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.errors import InputError, SpecError, T5TrainError
from t5train.spec import RunSpec
from t5train.spec.config_file import read_config
from t5train.spec.recipes import recipe


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def spec_in(file: Path, text: str) -> RunSpec:
    file.write_text(text, "utf-8")
    return recipe("smoke").with_settings(read_config(file).settings)


def setting_in(file: Path, name: str, value: str) -> Any:
    *parts, key = name.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    spec = spec_in(file, "\n".join([*lines, f"{'  ' * len(parts)}{key}: {value}"]))
    found: Any = spec
    for step in name.split("."):
        found = getattr(found, step)
    return found


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("optimizer.peak_learning_rate", "1e-2", 0.01),  # text in YAML 1.1
        ("optimizer.peak_learning_rate", ".5", 0.5),
        ("optimizer.num_steps", "0100", 100),  # octal in YAML 1.1
        ("optimizer.num_steps", "1e3", 1000),
        ("optimizer.num_steps", "'100'", 100),
        ("optimizer.num_steps", "1_000", 1000),
        ("model.compile", "yes", True),
        ("model.compile", "off", False),
        ("corpus.revision", "on", "on"),  # true in YAML 1.1
        ("corpus.revision", "2026-07-01", "2026-07-01"),  # a date in YAML 1.1
        ("corpus.revision", "1:30", "1:30"),  # 90 in YAML 1.1
        ("corpus.revision", "1e-4", "1e-4"),
        ("corpus.revision", '"null"', "null"),
        ("corpus.revision", "''", ""),
        ("corpus.source", "s3://bucket/text/*.jsonl.gz", "s3://bucket/text/*.jsonl.gz"),
        ("corpus.workers", "null", None),
        ("corpus.split", "[900, 50, 50]", (900, 50, 50)),
        ("corpus.split", "\n  - 900\n  - 50\n  - 50", (900, 50, 50)),
        ("cluster.environment", "[NO, 'A']", ("NO", "A")),
        ("cluster.deadlines.save_seconds", "60", 60.0),
        ("storage.root", "2026", Path("2026")),
        ("name", "007", "007"),
        ("tokenizer.path", "'a\\tb'", "a\\tb"),
        ("tokenizer.path", '"a\\tb"', "a\tb"),
        ("model.moe.capacity_factor", "null", None),
    ],
)
def test_a_value_is_what_was_written(file: Path, name: str, written: str, value: Any) -> None:
    assert setting_in(file, name, written) == value


def test_anchors_comments_json_and_a_byte_order_mark_are_read(file: Path) -> None:
    anchored = "\ufeffcorpus: # the text\n  workers: &all 3\nshards:\n  workers: *all\n"
    assert spec_in(file, anchored).shards.workers == 3
    assert spec_in(file, json.dumps({"recipe": "smoke", "optimizer": {"num_steps": 60}})).optimizer.num_steps == 60
    assert spec_in(file, "corpus:\n# source: everything below is commented out\noptimizer: null\n") == recipe("smoke")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer:\n  num_stepss: 3", "line 2: unknown setting 'optimizer.num_stepss' (did you mean 'optimizer.num_"),
        ("layout:\n  num_steps: 3", "line 2: unknown setting 'layout.num_steps' (did you mean 'optimizer.num_steps'"),
        ("seed: 3", "line 1: unknown setting 'seed' (did you mean 'optimizer.seed'?). Correct or remove it"),
        ("optimiser:\n  seed: 3", "line 1: unknown setting 'optimiser' (did you mean 'optimizer'?)"),
        ("optimizer.seed: 3", "line 1: 'optimizer.seed' has a dot: write 'seed' on a line of its own, indented, below"),
        ("optimizer:\n  seed: 1\n  kind: adamw\n  seed: 1", "lines 2 and 4: optimizer.seed is there twice: keep one"),
        ("corpus:\n  workers: 1\nname: a\ncorpus:\n  split_seed: 1", "lines 1 and 4: corpus is there twice"),
        ("optimizer: adamw", "line 1: optimizer is a group of settings: write them on the lines below it, indented"),
        (
            "optimizer:\n  seed:\n    value: 1",
            "line 2: optimizer.seed takes one value, but holds several: write `seed: V",
        ),
        ("corpus:\n  split: [[1], 2, 3]", "line 2: corpus.split takes one value, but holds several"),
        ("optimizer:\n  seed:", "line 2: optimizer.seed has no value: write one, or remove the line"),
        ("optimizer:\n  seed: !!int 3", "line 2: optimizer.seed has the tag tag:yaml.org,2002:int: remove it"),
        ("name: !!python/object/apply:os.system [ls]", "line 1: name takes one value"),
        ("name: !!python/name:os.system x", "line 1: name has the tag tag:yaml.org,2002:python/name:os.system"),
        ("? [a]\n: 1", "line 1: the name of a setting must be plain text"),
        ("<<: {name: x}", "line 1: unknown setting '<<'"),
        ("recipe: smoke\noptimizer:\n\tseed: 3", "line 3: not valid YAML: found character '\\t'"),
        ("corpus:\n  source: *.txt", "line 2: not valid YAML"),
        ("corpus: {source: a", "not valid YAML"),
        ("name: a\n---\nname: b", "line 2: not valid YAML: but found another document"),
        ("name: a\x00", "line 1: the character U+0000 is not allowed in YAML. Remove it"),
        ("- name", "has no settings: write lines such as `recipe: smoke`, or start from a file that `t5-pretrain init"),
        ("", "has no settings"),
        ("# only a comment", "has no settings"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_with_the_place_and_the_remedy(file: Path, text: str, message: str) -> None:
    file.write_text(text, "utf-8")
    with pytest.raises(SpecError) as refused:
        read_config(file)
    assert str(refused.value).startswith(str(file))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no configuration file .*nowhere\.yaml: correct the path"):
        read_config(tmp_path / "nowhere.yaml")
    with pytest.raises(InputError, match="is a folder, not a configuration file: name a file in it"):
        read_config(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "loop")
    with pytest.raises(InputError, match="larger than 1 MiB, so it is not a configuration file"):
        read_config(Path("/dev/zero"))
    (tmp_path / "latin").write_bytes(b"recipe: smoke\nname: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin, line 2: not UTF-8 text"):
        read_config(tmp_path / "latin")


@given(text=st.text(alphabet=st.sampled_from("abo: -[]{}\n\t'\"&*!#,1e.~") | st.characters(), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    said = ""
    try:
        read_config(file)
    except T5TrainError as refused:
        said = str(refused)
    assert "\n" not in said


def test_an_error_about_a_value_gets_the_lines_of_the_settings_it_names(file: Path) -> None:
    file.write_text("name: a\noptimizer:\n  num_steps: 100\n  warmup_steps: 100\n  seed: 1\n")
    config = read_config(file)
    with pytest.raises(SpecError, match=r"run\.yaml, lines 3 and 4: optimizer\.warmup_steps is 100"), config.locating():
        recipe("smoke", config.settings)
    with (
        pytest.raises(SpecError, match=r"run\.yaml, line 4: optimizer\.warmup_steps is 100: .* \(99\)"),
        config.locating({"optimizer.num_steps"}),
    ):
        recipe("smoke", {**config.settings, "optimizer.num_steps": 99})
    with pytest.raises(SpecError, match=r"^optimizer\.betas"), config.locating():
        recipe("smoke", {"optimizer.betas": [2, 2]})
    with pytest.raises(SpecError, match=r"run\.yaml, line 1: name is '/'"), config.locating():
        recipe("smoke", {"name": "/"})


def test_only_what_differs_from_the_recipe_counts_as_a_change_but_the_text_always_does(file: Path) -> None:
    file.write_text("corpus: {source: pydocs}\ncluster: {ranks: 2}\noptimizer: {seed: 1, num_steps: 400}")
    assert read_config(file).changes(recipe("smoke")) == {"corpus.source": '"pydocs"', "optimizer.seed": 1}


def test_a_file_with_several_mistakes_names_them_all(file: Path) -> None:
    file.write_text(
        "recipe: smok\noptimizer:\n  num_steps: many\n  sed: 1\n  seed:\ncorpus:\n  split: [900, 50]\nbogus: 1\n"
        "layout: 3\nmodel:\n  version: !x 3\nname: a\nname: b\n"
    )
    with pytest.raises(SpecError) as refused:
        read_config(file)
    said = str(refused.value)
    assert said.startswith(f"{file}, line 1: unknown recipe 'smok' (did you mean 'smoke'?)")
    for message in (
        "line 3: optimizer.num_steps is 'many': it must be a whole number of at least 1; ",
        "line 4: unknown setting 'optimizer.sed' (did you mean 'optimizer.seed'?)",
        "line 5: optimizer.seed has no value",
        "line 7: corpus.split is [900, 50]: it must be a list of 3 whole numbers, such as [950, 30, 20]; ",
        "line 8: unknown setting 'bogus'",
        "line 9: layout is a group of settings",
        "line 11: model.version has the tag !x",
        "lines 12 and 13: name is there twice",
    ):
        assert f"; {message}" in said
    assert said.count(str(file)) == 1
    assert "\n" not in said


def test_values_that_are_wrong_in_several_parts_are_all_named(file: Path) -> None:
    file.write_text("recipe: smoke\noptimizer:\n  num_steps: x\ncorpus:\n  split: [1]\nshards:\n  workers: 0\n")
    config, said = read_config(file), r"lines 3, 5 and 7: corpus\.split is .*; shards\.workers is .*; optimizer\.num_"
    with pytest.raises(SpecError, match=said), config.locating():
        recipe("smoke", config.settings)
