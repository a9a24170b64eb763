"""A RunSpec is made from settings; a wrong one is refused with its name, its value and its constraint."""

import json
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from t5train.errors import SpecError
from t5train.spec import Accelerator, build, pad_vocabulary, setting_names
from t5train.spec.recipes import recipe, smoke
from t5train.spec.settings import explain

EXPERTS = {"model.version": "v1.0", "model.moe.num_experts": 4}


def test_with_settings_changes_only_the_given_settings() -> None:
    changed = smoke().with_settings({"optimizer.seed": "7", "corpus.split": "[900, 60, 40]"})
    assert changed.optimizer.seed == 7
    assert changed.corpus.split == (900, 60, 40)
    assert changed.with_settings({"optimizer.seed": 0, "corpus.split": [950, 30, 20]}) == smoke()


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ("optimizer.peak_learning_rat", "optimizer.peak_learning_rate"),
        ("optimiser.num_steps", "optimizer.num_steps"),
        ("num_steps", "optimizer.num_steps"),
        ("cluster.rank", "cluster.ranks"),
        ("layout.num_steps", "optimizer.num_steps"),
        *((name, None) for name in ("", ".", "optimizer", "optimizer.", "optimizer.betas.0", "__class__")),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(unknown: str, hint: str | None) -> None:
    said = rf"unknown setting '{unknown}'" + (rf" \(did you mean '{hint}'\?\)" if hint else "")
    with pytest.raises(SpecError, match=rf"{said}.*; unknown setting 'corpus\.spilt' \(did you mean 'corpus\.split'"):
        smoke().with_settings({unknown: 1, "corpus.spilt": 2})


def test_an_unknown_name_in_a_recorded_spec_is_refused_with_the_nearest_one() -> None:
    values = smoke().model_dump(mode="json")
    values["optimizer"]["num_step"] = 5
    with pytest.raises(SpecError, match=r"optimizer\.num_step is 5: unknown setting \(did you mean"):
        build(values)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("optimizer.num_steps", 0, r"optimizer\.num_steps is 0: it must be a whole number of at least 1"),
        ("optimizer.num_steps", None, r"optimizer\.num_steps is null: it must be a whole number"),
        ("optimizer.peak_learning_rate", "NaN", r"learning_rate is nan: it must be a number above 0 and up to 1"),
        ("optimizer.label_smoothing", 0.1, r"label_smoothing is 0\.1, but only fine-tuning has it: set .*=0, or name "),
        ("optimizer.z_loss", 1e-4, r"optimizer\.z_loss is 0\.0001, but only fine-tuning has it"),
        ("optimizer.betas", [0.9, 1.0], "both must be at least 0 and below 1"),
        ("optimizer.final_learning_rate", 0.5, r"must not exceed optimizer\.peak_learning_rate \(0\.02\)"),
        ("optimizer.precision", "fp8", r"optimizer\.precision is 'fp8': it must be one of fp32, bf16, fp16"),
        ("layout.offload", "all", r"layout\.offload is 'all' and layout\.zero_stage 1: .* 'all' needs ZeRO 3"),
        ("corpus.split", [900, 30, 20], "that sum to 1000"),
        ("corpus.split", [1000, 0, 0], "the first two above zero"),
        ("model.vocab_size", 2100, r"multiple of 128 \(the next is 2176\)"),
        ("cluster.include", "node1", r"cluster\.include selects hosts of a hostfile, .* give --hostfile"),
        ("cluster.ship_code", True, r"cluster\.ship_code is true, but cluster\.hostfile is not set: give --hostfile"),
        ("cluster.ssh_user", "-oProxyCommand=x", r"cluster\.ssh_user is '-oProxyCommand=x'"),
        ("cluster.ssh_user", "root\n", r"cluster\.ssh_user is 'root\\n'"),
        ("cluster.master_address", "$(reboot)", r"cluster\.master_address is '\$\(reboot\)'"),
        ("cluster.environment", ["A=b"], r"cluster\.environment holds 'A=b': give names of variables only"),
        ("name", "../elsewhere", r"name is '\.\./elsewhere'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_constraint(setting: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        smoke().with_settings({setting: value})


PIPELINE = {"layout.pipeline_stages": 2}
HOSTS = {"cluster.hostfile": "hosts"}
PAIRS = {"pairs.train": ["pairs.jsonl"]}
IN_ROOT = {"storage.root": "/data/t5", "storage.scratch": "/data/t5"}


@pytest.mark.parametrize(
    ("valid", "settings", "words"),
    [
        ({}, {"evaluate.patience": 2}, r"evaluate\.patience is 2, but evaluate\.best_metric is not set: set it"),
        (
            {},
            {"evaluate.best_metric": "validation_exact_match"},
            r"is validation_exact_match, but only fine-tuning measures it: set evaluate\.best_metric=validation_loss",
        ),
        (
            {},
            {"evaluate.best_metric": "validation_chrf", "evaluate.best_pairs": 50},
            r"is validation_chrf, but only fine-tuning measures it",
        ),
        (
            PAIRS,
            {"evaluate.best_metric": "validation_loss", "evaluate.best_pairs": 50},
            r"best_pairs is 50, but evaluate\.best_metric is not a score of generated text: set it, for instance",
        ),
        (
            {},
            {"evaluate.num_beams": 4},
            r"num_beams is 4, but only fine-tuning predicts held-out pairs: leave evaluate\.num_beams out",
        ),
        ({}, {"evaluate.hostfile": "hosts"}, r"evaluate\.hostfile is hosts, but only fine-tuning predicts"),
        (EXPERTS, {"model.moe.num_experts": 1}, r"num_experts is 1: it must be 0 \(a dense model\) or at least 2"),
        (EXPERTS, {"model.version": "v1.1"}, r"ReLU experts and a tied output; set model\.version=v1\.0"),
        (EXPERTS, {"model.feed_forward": "gated-gelu"}, r"'gated-gelu': .* leave model\.feed_forward out"),
        (EXPERTS, {"layout.zero_stage": 0}, r"layout\.zero_stage is 0 .*: experts need ZeRO 1 or 2"),
        (EXPERTS, {"layout.zero_stage": 3}, r"layout\.zero_stage is 3 .*: experts need ZeRO 1 or 2"),
        (EXPERTS, {"layout.expert_parallel_size": 3}, r"is 3: it must divide model\.moe\.num_experts \(4\)"),
        (EXPERTS, {"layout.expert_parallel_size": 4}, r"is 4: it must divide cluster\.ranks \(2\)"),
        ({}, {"layout.expert_parallel_size": 2}, "a dense model has no experts to spread"),
        (PIPELINE, {"layout.zero_stage": 2}, r"stages is 2, which .* with layout\.zero_stage 2 \(set .*zero_stage=1\)"),
        (PIPELINE, {"layout.zero_stage": 0}, r"layout\.zero_stage 0 \(set layout\.zero_stage=1\)"),
        (PIPELINE, {"layout.offload": "optimizer"}, r"layout\.offload 'optimizer' \(set layout\.offload=none\)"),
        (PIPELINE, EXPERTS, r"experts \(set model\.moe\.num_experts=0\)"),
        (PIPELINE, {"layout.pipeline_stages": 4}, r"pipeline_stages is 4: it must divide cluster\.ranks \(2\)"),
        (PIPELINE, {"cluster.ranks": 6}, r"pipeline_stages \(32 x 3 = 96\)"),
        (HOSTS, {"cluster.exclude": "a", "cluster.num_nodes": 1}, r"exclude and cluster\.num_nodes cannot be combined"),
        (HOSTS | {"shards.executor": "dask"}, {"storage.node_local": True}, r"is dask, but storage\.node_local"),
        (PAIRS, PIPELINE, r"pipeline_stages is 2, but pairs .*: set layout\.pipeline_stages=1"),
        (PAIRS, {"shards.executor": "dask"}, r"executor is dask, but pairs .*: set shards\.executor=local"),
        (PAIRS, EXPERTS, r"num_experts is 4, but pairs .*: set model\.moe\.num_experts=0"),
        (IN_ROOT, {"storage.node_local": True}, r"storage\.scratch is '/data/t5', which is the root"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(
    valid: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    smoke().with_settings(valid)
    with pytest.raises(SpecError, match=words):
        smoke().with_settings(valid | settings)


@given(passes=st.integers(1, 8), micro_batch=st.integers(1, 64), ranks=st.integers(1, 8), stages=st.integers(1, 2))
def test_a_global_batch_is_a_whole_number_of_passes_of_every_replica(
    passes: int, micro_batch: int, ranks: int, stages: int
) -> None:
    """The stages of a pipeline are one replica."""
    spec = smoke().with_settings(
        {
            "optimizer.global_batch_sequences": passes * micro_batch * ranks,
            "layout.micro_batch_sequences": micro_batch,
            "layout.pipeline_stages": stages,
            "cluster.ranks": ranks * stages,
        }
    )
    assert (spec.data_parallel_size, spec.gradient_accumulation) == (ranks, passes)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("optimizer.global_batch_sequences", 65), ("layout.micro_batch_sequences", 31), ("cluster.ranks", 3)],
)
def test_a_batch_that_does_not_divide_evenly_is_refused_with_the_divisor_and_a_value_that_works(
    setting: str, value: int
) -> None:
    words = r"global_batch_sequences is \d+: it must be a multiple of .* = \d+\). Set for instance (\S+)=(\d+)$"
    with pytest.raises(SpecError, match=words) as refused:
        smoke().with_settings({setting: value})
    remedy = re.search(words, str(refused.value))
    assert remedy is not None
    assert smoke().with_settings({setting: value, remedy[1]: remedy[2]}).gradient_accumulation <= 64 // 16


def test_all_invalid_settings_and_contradictions_are_named() -> None:
    of_parts = {
        "optimizer.warmup_steps": 9000,
        "corpus.split": [900, 50, 40],
        "corpus.test_sets": ["a"],
        "optimizer.num_steps": 0,
        "cluster.ranks": "two",
    }
    of_all = {"optimizer.precision": "fp16", "layout.zero_stage": 0, "layout.expert_parallel_size": 2}
    for wrong, named in (
        (of_parts, ("optimizer.num_steps is 0", "cluster.ranks is 'two'", "corpus.split is", "test_sets is set")),
        ({"optimizer.warmup_steps": 9000} | of_all, ("optimizer.warmup_steps is 9000",)),
        (of_all, ("layout.zero_stage is 0", "layout.expert_parallel_size is 2")),
    ):
        with pytest.raises(SpecError) as refused:
            smoke().with_settings(wrong)
        assert all(name in str(refused.value) for name in named), str(refused.value)


@given(pieces=st.integers(1, 300_000))
def test_a_vocabulary_is_padded_to_the_next_multiple_of_128(pieces: int) -> None:
    padded = pad_vocabulary(pieces)
    assert padded % 128 == 0
    assert padded - 128 < pieces <= padded


@pytest.mark.parametrize("setting", ["corpus.source", "storage.publish_to"])
def test_a_url_with_a_secret_is_refused_without_repeating_the_secret(setting: str) -> None:
    with pytest.raises(SpecError, match=setting) as caught:
        recipe("smoke").with_settings({setting: "s3://key:s3cret@bucket/x"})
    assert "s3cret" not in str(caught.value)


def test_the_home_folder_is_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = recipe("smoke").with_settings({"storage.root": "~/t5", "tokenizer.path": "~/spiece.model"})
    assert (spec.storage.root, spec.tokenizer.path) == (tmp_path / "t5", str(tmp_path / "spiece.model"))
    hosts = recipe("smoke").with_settings({"cluster.hostfile": "~/hosts", "cluster.known_hosts": "~nobody-such/k"})
    assert (hosts.cluster.hostfile, hosts.cluster.known_hosts) == (tmp_path / "hosts", Path("~nobody-such/k"))


def test_code_is_sent_to_hosts_that_only_evaluate() -> None:
    hosts = {"evaluate.hostfile": "hosts", "cluster.ship_code": True}
    assert recipe("reverse_and_sort", hosts).cluster.ship_code


@pytest.mark.parametrize("value", ["\udcff", json.dumps("\udcff")])
def test_a_value_that_is_not_utf8_is_refused(value: str) -> None:
    with pytest.raises(SpecError, match=r"corpus.source is .* valid UTF-8"):
        recipe("smoke").with_settings({"corpus.source": value})


@pytest.mark.slow
def test_the_accelerators_of_a_spec_are_those_that_deepspeed_supports() -> None:
    from deepspeed.accelerator.real_accelerator import SUPPORTED_ACCELERATOR_LIST

    assert set(get_args(Accelerator)) == set(SUPPORTED_ACCELERATOR_LIST)


@pytest.mark.parametrize("languages", ["en,de", "en, de", ["en", "de"], '["en", "de"]'])
def test_languages_may_be_given_as_one_text_or_as_a_list(languages: Any) -> None:
    assert smoke().with_settings({"corpus.languages": languages}).corpus.languages == ("en", "de")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("corpus.languages", "English"),
        ("corpus.languages", "en;de"),
        ("corpus.license", "mit\nevil: true"),
        ("corpus.license", ""),
        ("corpus.license", "`x`"),
    ],
)
def test_a_licence_or_language_that_would_break_the_model_card_is_refused(setting: str, value: str) -> None:
    with pytest.raises(SpecError, match=setting):
        smoke().with_settings({setting: value})


LISTS = [[], [1], [None], [1, 2, 3, 4], ["a"]]
ANY_VALUES = [*LISTS, {}, {"a": 1}, True, None, -1, 1.5, "nan", "abc", "", b"\xff", object()]


@pytest.mark.parametrize("setting", [*setting_names(), "corpus", "model.moe", "storage"])
def test_no_error_about_a_setting_is_in_the_words_of_a_library(setting: str) -> None:
    for value in ANY_VALUES:
        values = smoke().model_dump(mode="json")
        *parts, key = setting.split(".")
        reduce(lambda inside, part: inside[part], parts, values)[key] = value
        said = refusal(values)
        assert "should" not in said, "a word of pydantic"
        assert "equired" not in said, "a word of pydantic"
        assert not said or key in said


def refusal(values: object) -> str:
    try:
        build(cast(Mapping[str, Any], values))
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "recipe is missing: set it, it must be text of at most 40 of the characters"),
        ([], "the settings are []: they must be settings by their name"),
        (None, "the settings are null: they must be settings by their name"),
        ({"recipe": "a", "corpus": 1}, "corpus is 1, but it is a group of settings: set those that it holds, such as"),
        ({"recipe": "a", "corpus": {"split": [900, 50]}}, "corpus.split is [900, 50]: it must be a list of 3 whole"),
        ({"recipe": "a", "corpus": {"split": [1, "a", 2]}}, "item 2 of corpus.split is 'a': it must be a whole number"),
    ],
)
def test_values_of_another_form_are_refused_with_what_they_must_be(values: object, message: str) -> None:
    assert refusal(values).startswith(message)


def test_values_of_a_model_that_is_no_spec_are_explained_in_our_words() -> None:
    class Some(BaseModel):
        number: int = Field(2, ge=2)
        kind: Literal["a", "b"] = "a"
        several: tuple[str, ...] = Field((), min_length=1)
        flag: bool = False
        named: dict[str, str]

    with pytest.raises(ValidationError) as refused:
        Some.model_validate({"number": 1, "kind": "c", "several": [], "flag": "x"})
    assert explain(refused.value) == (
        "number is 1: it must be at least 2; kind is 'c': it must be one of 'a' or 'b'; several is []: it must be a "
        "list of at least 1 items; flag is 'x': it must be true or false; named is missing: set it"
    )


def test_fp16_is_refused_for_fine_tuning_of_t5_v1_0_only() -> None:
    settings = {"pairs.train": ["pairs.jsonl"], "optimizer.precision": "fp16", "model.start_from": "/models/t5"}
    smoke().with_settings(settings | {"model.version": "v1.1"})
    with pytest.raises(SpecError, match=r"fp16, but model\.start_from is '/models/t5', a T5 v1\.0, .*precision=bf16"):
        smoke().with_settings(settings | {"model.version": "v1.0"})
