"""A RunSpec defines a run: every setting is either identity or execution, and a wrong one is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.errors import SpecError
from t5train.records.identity import differences
from t5train.spec import Accelerator, RunSpec, SpecPart, build, pad_vocabulary, read, setting_names
from t5train.spec.recipes import recipe, smoke

# For each setting, a valid value that differs from smoke's. Every new setting needs a line here.
OTHER: dict[str, Any] = {
    "recipe": "other",
    "name": "other",
    "corpus.source": "other.txt",
    "corpus.revision": "2",
    "corpus.split": [900, 50, 50],
    "corpus.split_seed": 1,
    "corpus.workers": 3,
    "tokenizer.path": "spiece.model",
    "tokenizer.vocab_size": 2001,
    "tokenizer.character_coverage": 0.99,
    "shards.shard_tokens": 150_001,
    "shards.workers": 3,
    "objective.noise_density": 0.2,
    "objective.mean_span_tokens": 4.0,
    "objective.input_tokens": 128,
    "model.preset": "tiny",
    "model.version": "v1.0",
    "model.feed_forward": "relu",
    "model.d_model": 80,
    "model.d_kv": 24,
    "model.d_ff": 80,
    "model.num_heads": 3,
    "model.num_layers": 3,
    "model.num_decoder_layers": 3,
    "model.vocab_size": 2560,
    "model.dropout_rate": 0.1,
    "model.activation_checkpointing": True,
    "model.compile": True,
    "model.start_from": "/models/t5",
    "optimizer.kind": "adamw",
    "optimizer.peak_learning_rate": 0.03,
    "optimizer.warmup_steps": 41,
    "optimizer.schedule": "inverse-sqrt",
    "optimizer.final_learning_rate": 0.002,
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": [0.8, 0.99],
    "optimizer.epsilon": 1e-6,
    "optimizer.gradient_clip": 2.0,
    "optimizer.global_batch_sequences": 128,
    "optimizer.num_steps": 401,
    "optimizer.seed": 1,
    "optimizer.precision": "bf16",
    "optimizer.initial_scale_power": 8,
    "layout.zero_stage": 2,
    "layout.offload": "optimizer",
    "layout.pin_memory": True,
    "layout.micro_batch_sequences": 16,
    "storage.root": "elsewhere",
    "storage.scratch": "/local/t5",
    "storage.publish_to": "memory://bucket",
    "storage.checkpoint_every_steps": 7,
    "storage.keep_last": 5,
    "storage.keep_every_steps": 7,
    "storage.checkpoint_gigabytes": 7.0,
    "storage.validate_every_steps": 7,
    "storage.validate_sequences": 7,
    "cluster.ranks": 1,
    "cluster.accelerator": "cuda",
    "cluster.master_port": 29501,
    "cluster.retries": 0,
    "cluster.hostfile": "hosts",
    "cluster.launcher": "slurm",
    "cluster.ssh_user": "trainer",
    "cluster.ssh_port": 2222,
    "cluster.known_hosts": "known_hosts",
    "cluster.master_address": "10.0.0.1",
    "cluster.environment": ["HF_TOKEN"],
    "cluster.lease_seconds": 20.0,
    "cluster.grace_seconds": 5.0,
    "cluster.deadlines.start_seconds": 7.0,
    "cluster.deadlines.compile_seconds": 7.0,
    "cluster.deadlines.step_seconds": 7.0,
    "cluster.deadlines.save_seconds": 7.0,
    "cluster.deadlines.validate_seconds": 7.0,
}
# The same for the settings of experts, which smoke does not have.
OTHER_EXPERTS: dict[str, Any] = {
    "model.moe.num_experts": 8,
    "model.moe.top_k": 2,
    "model.moe.every_n_layers": 1,
    "model.moe.capacity_factor": 1.5,
    "model.moe.eval_capacity_factor": 3.0,
    "model.moe.aux_loss": 0.02,
    "model.moe.z_loss": 0.0,
    "layout.expert_parallel_size": 2,
}
# The same for settings that need a hostfile.
OTHER_HOSTS: dict[str, Any] = {
    "cluster.include": "node1@node2:0,2",
    "cluster.exclude": "node1:1",
    "cluster.num_nodes": 2,
    "cluster.spares": 1,
    "cluster.ship_code": True,
}
# The same for settings that cannot be combined with the values above.
OTHER_ALONE: dict[str, Any] = {"layout.pipeline_stages": 2}
EVERY = OTHER | OTHER_EXPERTS | OTHER_HOSTS | OTHER_ALONE
# These settings decide where and how a run executes. All others decide its result.
EXECUTION = {
    "recipe",
    "name",
    "corpus.workers",
    "shards.workers",
    "model.activation_checkpointing",
    "model.compile",
    *(name for name in EVERY if name.startswith(("layout.", "storage.", "cluster."))),
}


def base(setting: str) -> RunSpec:
    """A spec in which a setting has an effect: smoke, or smoke with experts or hosts."""
    if setting in OTHER_HOSTS:
        return smoke().with_settings({"cluster.hostfile": "hosts"})
    return experts() if setting in OTHER_EXPERTS else smoke()


def experts() -> RunSpec:
    return smoke().with_settings({"model.version": "v1.0", "model.moe.num_experts": 4})


def test_every_setting_has_a_second_value_in_this_file() -> None:
    assert set(EVERY) == set(setting_names())


@pytest.mark.parametrize("setting", sorted(set(EVERY) - EXECUTION))
def test_an_identity_setting_changes_the_fingerprint(setting: str) -> None:
    changed = base(setting).with_settings({setting: EVERY[setting]})
    assert changed != base(setting)
    assert changed.fingerprint() != base(setting).fingerprint()
    assert changed.run_name != base(setting).run_name
    assert differences(base(setting).identity(), changed.identity())


@pytest.mark.parametrize("setting", sorted(EXECUTION))
def test_an_execution_setting_does_not_change_the_fingerprint(setting: str) -> None:
    changed = base(setting).with_settings({setting: EVERY[setting]})
    assert changed != base(setting)
    assert changed.fingerprint() == base(setting).fingerprint()
    assert not differences(base(setting).identity(), changed.identity())


def test_execution_names_are_settings_of_their_part() -> None:
    parts: list[type[SpecPart]] = [RunSpec, *(type(part) for _, part in smoke() if isinstance(part, SpecPart))]
    for part in parts:
        assert part.execution <= part.model_fields.keys()


def test_training_settings_of_a_given_vocabulary_do_not_change_the_fingerprint() -> None:
    given = smoke().with_settings({"tokenizer.path": "spiece.model"})
    assert given.with_settings({"tokenizer.vocab_size": 5000}).fingerprint() == given.fingerprint()


def test_expert_settings_do_not_change_the_fingerprint_of_a_dense_model() -> None:
    assert smoke().with_settings({"model.moe.capacity_factor": 3}).fingerprint() == smoke().fingerprint()


@pytest.mark.parametrize("name", ["smoke", "moe", "pipeline", "zero3", "t5_3b_one_gpu", "t5_11b_one_gpu"])
def test_the_fingerprint_of_a_spec_is_the_same_on_every_machine_and_in_every_version(
    golden: Callable[[str, str], None], name: str
) -> None:
    golden(f"{name}.json", recipe(name).model_dump_json(indent=1) + "\n")
    golden(f"{name}.fingerprint", recipe(name).fingerprint() + "\n")


def test_with_settings_changes_only_the_given_settings() -> None:
    changed = smoke().with_settings({"optimizer.seed": "7", "corpus.split": "[900, 60, 40]"})
    assert changed.optimizer.seed == 7
    assert changed.corpus.split == (900, 60, 40)
    assert changed.with_settings({"optimizer.seed": 0, "corpus.split": [950, 30, 20]}) == smoke()


def test_text_that_looks_like_a_number_stays_text_in_a_text_setting() -> None:
    changed = smoke().with_settings({"name": "007", "corpus.revision": "2", "storage.publish_to": "null"})
    assert (changed.name, changed.corpus.revision, changed.storage.publish_to) == ("007", "2", None)


@given(settings=st.sets(st.sampled_from(sorted(OTHER)), max_size=6))
def test_settings_survive_text_and_json(settings: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    values = {setting: OTHER[setting] for setting in settings}
    as_text = {setting: value if isinstance(value, str) else json.dumps(value) for setting, value in values.items()}
    changed = smoke().with_settings(values)
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text(changed.model_dump_json(), "utf-8")
    assert smoke().with_settings(as_text) == changed
    assert read(path) == changed
    assert read(path).fingerprint() == changed.fingerprint()


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("optimizer.peak_learning_rat", "optimizer.peak_learning_rate"),
        ("optimiser.num_steps", "optimizer.num_steps"),
        ("num_steps", "optimizer.num_steps"),
        ("cluster.rank", "cluster.ranks"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(unknown: str, meant: str) -> None:
    with pytest.raises(SpecError, match=rf"unknown setting '{unknown}' \(did you mean '{meant}'\?\)"):
        smoke().with_settings({unknown: 1})


@pytest.mark.parametrize("unknown", ["", ".", "optimizer", "optimizer.", "optimizer.betas.0", "__class__"])
def test_a_name_that_is_not_a_setting_is_refused(unknown: str) -> None:
    with pytest.raises(SpecError, match="unknown setting"):
        smoke().with_settings({unknown: 1})


def test_an_unknown_name_in_a_spec_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    values = smoke().model_dump(mode="json")
    values["optimizer"]["num_step"] = 5
    (tmp_path / "spec.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match=r"optimizer\.num_step is 5: unknown setting \(did you mean"):
        read(tmp_path / "spec.json")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("optimizer.num_steps", "many", r"optimizer\.num_steps is 'many': Input should be a valid integer"),
        ("optimizer.num_steps", 0, r"optimizer\.num_steps is 0: .*greater than or equal to 1"),
        ("optimizer.num_steps", None, r"optimizer\.num_steps is None"),
        ("optimizer.peak_learning_rate", "NaN", r"optimizer\.peak_learning_rate is nan: .*finite"),
        ("optimizer.betas", [0.9, 1.0], "both must be at least 0 and below 1"),
        ("optimizer.final_learning_rate", 0.5, r"must not exceed optimizer\.peak_learning_rate \(0\.02\)"),
        ("optimizer.precision", "fp8", r"optimizer\.precision is 'fp8'"),
        ("layout.zero_stage", 4, r"layout\.zero_stage is 4"),
        ("layout.offload", "all", r"layout\.offload is 'all' and layout\.zero_stage 1: .* 'all' needs ZeRO 3"),
        ("corpus.split", [900, 30, 20], "that sum to 1000"),
        ("corpus.split", [1000, 0, 0], "the first two above zero"),
        ("model.vocab_size", 2100, r"multiple of 128 \(the next is 2176\)"),
        ("cluster.include", "node1", r"cluster\.include selects hosts of a hostfile, .* give --hostfile"),
        ("cluster.ssh_user", "-oProxyCommand=x", r"cluster\.ssh_user is '-oProxyCommand=x'"),
        ("cluster.ssh_user", "root\n", r"cluster\.ssh_user is 'root\\n'"),
        ("cluster.master_address", "$(reboot)", r"cluster\.master_address is '\$\(reboot\)'"),
        ("cluster.environment", ["A=b"], r"cluster\.environment holds 'A=b': give names of variables only"),
        ("name", "../elsewhere", r"name is '\.\./elsewhere'"),
        ("name", "", "name is ''"),
    ],
)
def test_an_invalid_value_is_refused_with_its_constraint(setting: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        smoke().with_settings({setting: value})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.moe.num_experts": 1}, r"num_experts is 1: it must be 0 \(a dense model\) or at least 2"),
        ({"model.version": "v1.1"}, r"ReLU experts and a tied output; set model\.version=v1\.0"),
        ({"model.feed_forward": "gated-gelu"}, r"model\.feed_forward 'gated-gelu': .* leave model\.feed_forward out"),
        ({"layout.zero_stage": 0}, r"layout\.zero_stage is 0 .*: experts need ZeRO 1 or 2"),
        ({"layout.zero_stage": 3}, r"layout\.zero_stage is 3 .*: experts need ZeRO 1 or 2"),
        (
            {"layout.expert_parallel_size": 3},
            r"expert_parallel_size is 3: it must divide model\.moe\.num_experts \(4\)",
        ),
        ({"layout.expert_parallel_size": 4}, r"expert_parallel_size is 4: it must divide cluster\.ranks \(2\)"),
        ({"model.moe.num_experts": 0, "layout.expert_parallel_size": 2}, "a dense model has no experts to spread"),
    ],
)
def test_experts_are_refused_with_incompatible_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        experts().with_settings(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"layout.zero_stage": 2},
            r"pipeline_stages is 2, which cannot be combined with layout\.zero_stage 2 \(set layout\.zero_stage=1\)",
        ),
        ({"layout.zero_stage": 0}, r"layout\.zero_stage 0 \(set layout\.zero_stage=1\)"),
        ({"layout.offload": "optimizer"}, r"layout\.offload 'optimizer' \(set layout\.offload=none\)"),
        ({"model.version": "v1.0", "model.moe.num_experts": 4}, r"experts \(set model\.moe\.num_experts=0\)"),
        ({"layout.pipeline_stages": 4}, r"layout\.pipeline_stages is 4: it must divide cluster\.ranks \(2\)"),
        ({"cluster.ranks": 6}, r"pipeline_stages \(32 x 3 = 96\)"),
    ],
)
def test_pipelines_are_refused_with_incompatible_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        smoke().with_settings({"layout.pipeline_stages": 2, **settings})


def test_exclude_and_num_nodes_cannot_be_combined() -> None:
    with pytest.raises(SpecError, match=r"cluster\.exclude and cluster\.num_nodes cannot be combined"):
        base("cluster.exclude").with_settings({"cluster.exclude": "node1", "cluster.num_nodes": 1})


def test_the_stages_of_a_pipeline_are_one_data_parallel_replica() -> None:
    spec = smoke().with_settings({"layout.pipeline_stages": 2, "layout.micro_batch_sequences": 16})
    assert (spec.data_parallel_size, spec.gradient_accumulation) == (1, 4)


def test_a_compiled_model_is_refused_at_zero_3() -> None:
    with pytest.raises(SpecError, match=r"model\.compile is true and layout\.zero_stage 3: .*set model\.compile=false"):
        smoke().with_settings({"model.compile": True, "layout.zero_stage": 3})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("optimizer.global_batch_sequences", 65), ("layout.micro_batch_sequences", 31), ("cluster.ranks", 3)],
)
def test_a_batch_that_does_not_divide_evenly_is_refused_with_the_divisor(setting: str, value: int) -> None:
    with pytest.raises(SpecError, match=r"global_batch_sequences is \d+: it must be a multiple of .* = \d+\)"):
        smoke().with_settings({setting: value})


@given(passes=st.integers(1, 8), micro_batch=st.integers(1, 64), ranks=st.integers(1, 8))
def test_a_global_batch_is_a_whole_number_of_passes_of_every_rank(passes: int, micro_batch: int, ranks: int) -> None:
    spec = smoke().with_settings(
        {
            "optimizer.global_batch_sequences": passes * micro_batch * ranks,
            "layout.micro_batch_sequences": micro_batch,
            "cluster.ranks": ranks,
        }
    )
    assert spec.gradient_accumulation == passes


def test_all_invalid_settings_are_reported_at_once() -> None:
    values = smoke().model_dump(mode="json")
    values["optimizer"]["num_steps"] = 0
    values["cluster"]["ranks"] = "two"
    with pytest.raises(SpecError) as caught:
        build(values)
    assert "optimizer.num_steps" in str(caught.value)
    assert "cluster.ranks" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"null", b'"smoke"'])
def test_a_file_that_is_not_a_spec_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(content)
    with pytest.raises(SpecError):
        read(tmp_path / "spec.json")


def test_a_missing_spec_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.json cannot be read as a run spec"):
        read(tmp_path / "absent.json")


def test_differences_name_the_field_and_both_values() -> None:
    changed = smoke().with_settings({"optimizer.seed": 1, "model.preset": "tiny"})
    assert differences(smoke().identity(), changed.identity()) == [
        'model.preset: "smoke" -> "tiny"',
        "optimizer.seed: 0 -> 1",
    ]


@given(pieces=st.integers(1, 300_000))
def test_a_vocabulary_is_padded_to_the_next_multiple_of_128(pieces: int) -> None:
    padded = pad_vocabulary(pieces)
    assert padded % 128 == 0
    assert padded - 128 < pieces <= padded


@pytest.mark.parametrize("setting", ["corpus.source", "storage.publish_to"])
@pytest.mark.parametrize(
    "url", ["s3://key:s3cret@bucket/x", "https://host/x.jsonl?token=s3cret", "simplecache::ftp://u:s3cret@h/x"]
)
def test_a_url_with_a_secret_is_refused_without_repeating_the_secret(setting: str, url: str) -> None:
    with pytest.raises(SpecError, match=setting) as caught:
        recipe("smoke").with_settings({setting: url})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["abfs://container@account/x", "sftp://user@host/x", "what?/x*.txt"])
def test_a_url_without_a_secret_is_kept(url: str) -> None:
    assert recipe("smoke").with_settings({"corpus.source": url}).corpus.source == url


@pytest.mark.parametrize("value", ["\udcff", json.dumps("\udcff")])
def test_a_value_that_is_not_utf8_is_refused(value: str) -> None:
    with pytest.raises(SpecError, match=r"corpus.source is .* valid UTF-8"):
        recipe("smoke").with_settings({"corpus.source": value})


@pytest.mark.slow
def test_the_accelerators_of_a_spec_are_those_that_deepspeed_supports() -> None:
    from deepspeed.accelerator.real_accelerator import SUPPORTED_ACCELERATOR_LIST

    assert set(get_args(Accelerator)) == set(SUPPORTED_ACCELERATOR_LIST)
