"""Every setting is either identity, which the fingerprint covers, or execution, and survives text and JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.records.identity import differences
from t5train.spec import RunSpec, SpecPart, build, setting_names
from t5train.spec.recipes import recipe, smoke

# For each setting, a valid value that differs from smoke's. Every new setting needs a line here.
OTHER: dict[str, Any] = {
    "recipe": "other",
    "name": "other",
    "corpus.source": "other.txt",
    "corpus.revision": "2",
    "corpus.split": [900, 50, 50],
    "corpus.split_seed": 1,
    "corpus.license": "cc-by-4.0",
    "corpus.languages": ["en", "de"],
    "corpus.remove": ["duplicates"],
    "corpus.remove_listed": "pairs.jsonl",
    "corpus.workers": 3,
    "tokenizer.path": "spiece.model",
    "tokenizer.vocab_size": 2001,
    "tokenizer.character_coverage": 0.99,
    "shards.shard_tokens": 150_001,
    "shards.workers": 3,
    "shards.max_unknown_share": 0.5,
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
    "storage.node_local": True,
    "storage.publish_to": "memory://bucket",
    "storage.publish_checkpoints_under": "s3://bucket/checkpoints",
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
    "cluster.deadlines.predict_seconds": 7.0,
    "monitor.csv": True,
    "monitor.wandb": True,
    "monitor.wandb_mode": "offline",
    "monitor.wandb_project": "other",
    "profile.steps": "10:13",
}
# The same for settings that need others: which, and a value of each.
NEEDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"model.version": "v1.0", "model.moe.num_experts": 4},
        {
            "model.moe.num_experts": 8,
            "model.moe.top_k": 2,
            "model.moe.every_n_layers": 1,
            "model.moe.capacity_factor": 1.5,
            "model.moe.eval_capacity_factor": 3.0,
            "model.moe.aux_loss": 0.02,
            "model.moe.z_loss": 0.0,
            "layout.expert_parallel_size": 2,
        },
    ),
    (
        {"cluster.hostfile": "hosts"},
        {
            "cluster.include": "node1@node2:0,2",
            "cluster.exclude": "node1:1",
            "cluster.num_nodes": 2,
            "cluster.spares": 1,
            "cluster.ship_code": True,
            "shards.executor": "dask",
        },
    ),
    ({"corpus.remove": ["contaminated"]}, {"corpus.test_sets": ["questions.jsonl"]}),
    (
        {"corpus.source": "hf://someone/texts"},
        {"corpus.config": "en", "corpus.hub_split": "validation", "corpus.column": "body"},
    ),
    (
        {"corpus.mixed_with": ["more.txt"]},
        {"objective.mixing_temperature": 2, "objective.mixing_limit": 1000, "objective.mixing_weights": [0.7, 0.3]},
    ),
    (
        {"evaluate.best_metric": "validation_loss", "pairs.train": ["pairs.jsonl"]},
        {"evaluate.best_metric": "validation_exact_match", "evaluate.patience": 2},
    ),
    (
        {"pairs.train": ["pairs.jsonl"], "evaluate.best_metric": "validation_chrf"},
        {"evaluate.best_pairs": 50, "evaluate.pause_share": 0.3},
    ),
    ({"pairs.train": ["pairs.jsonl"]}, {"optimizer.label_smoothing": 0.1, "optimizer.z_loss": 1e-4}),
    (
        {"pairs.train": ["pairs.jsonl"], "evaluate.best_metric": "validation_loss"},
        {
            "evaluate.hostfile": "hosts",
            "evaluate.max_pairs": 50,
            "evaluate.num_beams": 4,
            "evaluate.max_new_tokens": 64,
            "evaluate.length_penalty": 0.6,
        },
    ),
    (
        {"pairs.train": ["a.jsonl", "b.jsonl"]},
        {
            "pairs.validation": ["c.jsonl", "d.jsonl"],
            "pairs.test": ["c.jsonl", "d.jsonl"],
            "pairs.split": [900, 50, 50],
            "pairs.split_seed": 1,
            "pairs.input_tokens": 128,
            "pairs.target_tokens": 128,
            "pairs.too_long": "drop",
            "pairs.pack": False,
            "pairs.mixing_temperature": 2,
            "pairs.mixing_limit": 1000,
            "pairs.mixing_weights": [0.7, 0.3],
        },
    ),
    ({"pairs.train": ["a.jsonl"], "pairs.test": ["b.jsonl"]}, {"pairs.remove": "contaminated"}),
    (
        {
            "pairs.train": ["a.jsonl"],
            "model.start_from": "/models/t5",
            "optimizer.kind": "adamw",
            "finetune.lora.rank": 8,
        },
        {
            "finetune.lora.rank": 16,
            "finetune.lora.alpha": 32,
            "finetune.lora.targets": ["q", "k", "wi_0"],
            "finetune.lora.dropout": 0.1,
        },
    ),
    # These cannot be combined with the values above.
    ({}, {"layout.pipeline_stages": 2, "corpus.mixed_with": ["more.txt"], "pairs.train": ["a.jsonl"]}),
]
EVERY = OTHER | {name: value for _, others in NEEDS for name, value in others.items()}
# These settings decide where and how a run executes. All others decide its result.
EXECUTION = {
    "recipe",
    "name",
    "corpus.license",
    "corpus.languages",
    "corpus.workers",
    "shards.workers",
    "shards.max_unknown_share",
    "shards.executor",
    "model.activation_checkpointing",
    "model.compile",
    "evaluate.pause_share",
    "evaluate.max_pairs",
    "evaluate.num_beams",
    "evaluate.max_new_tokens",
    "evaluate.length_penalty",
    "evaluate.hostfile",
    *(name for name in EVERY if name.startswith(("layout.", "storage.", "cluster.", "monitor.", "profile."))),
}


def base(setting: str) -> RunSpec:
    """A spec in which a setting has an effect: smoke, with what the setting needs."""
    return smoke().with_settings(next((needed for needed, others in NEEDS if setting in others), {}))


def test_every_setting_has_a_second_value_in_this_file() -> None:
    assert set(EVERY) == set(setting_names())


@pytest.mark.parametrize("setting", sorted(set(EVERY) - EXECUTION))
def test_an_identity_setting_changes_the_fingerprint(setting: str) -> None:
    changed = base(setting).with_settings({setting: EVERY[setting]})
    assert changed != base(setting)
    assert changed.fingerprint() != base(setting).fingerprint()
    assert changed.run_name != base(setting).run_name
    assert differences(base(setting).identity(), changed.identity())


@pytest.mark.parametrize("setting", ["storage.validate_every_steps", "storage.validate_sequences"])
def test_what_validations_measure_is_identity_where_they_choose_the_best_checkpoint(setting: str) -> None:
    base = smoke().with_settings({"evaluate.best_metric": "validation_loss"})
    changed = base.with_settings({setting: EVERY[setting]})
    assert changed.fingerprint() != base.fingerprint()
    assert str(differences(base.identity(), changed.identity())).count(setting) == 1


@pytest.mark.parametrize("setting", ["num_beams", "max_new_tokens", "length_penalty"])
def test_how_text_is_generated_is_identity_where_it_chooses_the_best_checkpoint(setting: str) -> None:
    base = smoke().with_settings({"pairs.train": ["pairs.jsonl"], "evaluate.best_metric": "validation_bleu"})
    changed = base.with_settings({f"evaluate.{setting}": EVERY[f"evaluate.{setting}"]})
    assert changed.fingerprint() != base.fingerprint()


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


def test_settings_without_an_effect_do_not_change_the_fingerprint() -> None:
    given = smoke().with_settings({"tokenizer.path": "spiece.model"})
    assert given.with_settings({"tokenizer.vocab_size": 5000}).fingerprint() == given.fingerprint()
    assert smoke().with_settings({"model.moe.capacity_factor": 3}).fingerprint() == smoke().fingerprint()


def test_a_model_to_start_from_is_the_same_to_a_run_before_and_after_it_is_copied() -> None:
    remote = recipe("finetune_base").with_settings({"model.start_from": "hf://someone/t5"})
    copied = remote.with_settings({"model.start_from": "/starts/t5", "tokenizer.path": "/starts/t5"})
    assert remote.run_name == copied.run_name


@pytest.mark.parametrize(
    "name", ["smoke", "large", "moe", "pipeline", "zero3", "t5_3b", "t5_3b_one_gpu", "t5_11b_one_gpu"]
)
def test_the_fingerprint_of_a_spec_is_the_same_on_every_machine_and_in_every_version(
    golden: Callable[[str, str], None], name: str
) -> None:
    golden(f"{name}.json", recipe(name).model_dump_json(indent=1) + "\n")
    golden(f"{name}.fingerprint", recipe(name).fingerprint() + "\n")


def test_differences_name_the_field_and_both_values() -> None:
    changed = smoke().with_settings({"optimizer.seed": 1, "model.preset": "tiny"})
    assert differences(smoke().identity(), changed.identity()) == [
        'model.preset: "smoke" -> "tiny"',
        "optimizer.seed: 0 -> 1",
    ]


@given(settings=st.sets(st.sampled_from(sorted(OTHER)), max_size=6))
def test_settings_survive_text_and_json(settings: set[str]) -> None:
    values = {setting: OTHER[setting] for setting in settings}
    as_text = {setting: value if isinstance(value, str) else json.dumps(value) for setting, value in values.items()}
    changed = smoke().with_settings(values)
    recorded = build(json.loads(changed.model_dump_json()))
    assert smoke().with_settings(as_text) == changed
    assert recorded == changed
    assert recorded.fingerprint() == changed.fingerprint()
