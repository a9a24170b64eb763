"""The table in docs/reference/options.md for users of other DeepSpeed scripts names only settings that exist."""

import re
from pathlib import Path

import pytest

from t5train.spec import nearest, setting_names
from t5train.spec.recipes import RECIPES
from t5train.spec.settings import NAMES_ELSEWHERE

TEXT = (Path(__file__).parent.parent / "docs/reference/options.md").read_text("utf-8")
DEEPSPEED_OPTIONS = {
    *("exclude", "hostfile", "num_nodes", "launcher", "master_addr", "master_port"),
    *("include", "checkpoint_dir", "tokenizer_name_or_dir", "dataset_dir", "num_iterations", "fp16"),
    *("initial_scale_power", "batch_size", "dropout", "num_stage", "zero_stage", "cpu_adam", "print_memory"),
    *("moe", "moe_num_experts", "moe_ep_size"),
}

TRANSLATION_OPTIONS = {
    *("model_name_or_path", "source_lang", "target_lang", "source_prefix", "max_source_length", "max_target_length"),
    *("train_file", "validation_file", "dataset_name", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("label_smoothing_factor", "lr_scheduler_type", "learning_rate", "warmup_steps", "num_train_epochs", "max_steps"),
    *("group_by_length", "predict_with_generate", "num_beams", "metric_for_best_model", "load_best_model_at_end"),
    *("early_stopping_patience", "bf16", "fp16", "deepspeed", "save_total_limit", "resume_from_checkpoint", "seed"),
}


def test_every_option_of_other_deepspeed_scripts_has_a_line() -> None:
    assert set(re.findall(r"^- `(\w+)`: ", TEXT, re.MULTILINE)) == DEEPSPEED_OPTIONS


@pytest.mark.parametrize("there", sorted(DEEPSPEED_OPTIONS - {"print_memory"}))  # has no equivalent setting here
def test_an_option_of_other_scripts_used_as_a_setting_suggests_the_setting_of_its_line(there: str) -> None:
    line = next(line for line in TEXT.splitlines() if line.startswith(f"- `{there}`: "))
    here = line.split("`")[3].partition("=")[0]
    assert nearest(there, setting_names()) == f" (did you mean {here!r}?)"


def test_every_setting_that_is_named_exists() -> None:
    parts = {name.split(".")[0] for name in setting_names()}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", TEXT)
    settings = {name for name in named if name.split(".")[0] in parts}
    assert len(settings) >= 14
    assert settings <= set(setting_names())


def test_every_recipe_that_is_named_exists() -> None:
    sentences = re.findall(r"recipes? ((?:`\w+`(?:, )?)+)", TEXT)
    named = {name for sentence in sentences for name in re.findall(r"`(\w+)`", sentence)}
    assert {"moe", "pipeline", "zero1_offload"} <= named <= set(RECIPES)


def test_every_option_of_hugging_faces_translation_script_has_a_row_that_names_settings_or_that_there_is_none() -> None:
    rows = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    there = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert len(there) == len(set(there))
    assert set(there) >= TRANSLATION_OPTIONS
    for row in rows:
        assert "no setting" in row[1] or re.search(r"`([a-z_]+\.[a-z_]+|--[a-z-]+)", row[1]), row


_OF_TEXT = {"train_file", "dataset_config_name"}
"""Suggest the settings of text, which these options of other scripts are for, too."""


@pytest.mark.parametrize(
    "there", sorted(set(re.findall(r"`(\w+)`", TEXT)) & NAMES_ELSEWHERE.keys() - DEEPSPEED_OPTIONS - _OF_TEXT)
)
def test_an_option_of_hugging_faces_script_used_as_a_setting_suggests_a_setting_of_its_row(there: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `") and f"`{there}`" in line.split(" | ")[0])
    here = NAMES_ELSEWHERE[there]
    assert f"`{here}" in row.split(" | ")[1]
    assert nearest(there, setting_names()) == f" (did you mean {here!r}?)"
