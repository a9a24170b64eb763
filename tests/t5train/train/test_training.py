"""Real DeepSpeed training on two CPU ranks: it resumes bit-equal, layouts agree, and faults end it with an error."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.data.samples.keyed_random import permuted
from t5train.records.metrics import read
from t5train.records.stage_records import TokenizerFiles, TokenShards
from t5train.release.certificate import Certificate
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.training.launched import Trained, job, spec_of, train
from tests.support.training.layouts import covering

pytestmark = pytest.mark.slow

LAYOUTS = ["zero0-fp32", "zero1-fp32", "zero2-fp32", "zero3-fp32", "zero0-bf16", "zero1-bf16", "zero2-bf16"]
LAYOUTS += ["zero3-bf16", "zero3-fp32-tied", "zero1-bf16-offload", "zero2-fp32-offload", "zero3-bf16-offload"]
LAYOUTS += ["zero2-fp32-ep1", "zero2-fp32-ep2", "zero1-bf16-ep2", "zero2-bf16-ep2-offload", "zero2-fp32-ep2-top2"]
LAYOUTS += ["zero1-fp32-pp2", "zero1-bf16-pp2-tied", "zero1-fp32-pp2-tied-deep"]
if torch.ops.mkldnn._is_mkldnn_fp16_supported():
    LAYOUTS += ["zero2-fp16", "zero2-fp16-ep2"]
RECOMPUTED = ["zero2-fp32-offload", "zero3-bf16-offload", "zero2-fp32-ep2", "zero1-fp32-pp2"]
LAYOUTS = covering(LAYOUTS, always=["zero0-fp32", *RECOMPUTED])
EXPERTS = [layout for layout in LAYOUTS if "-ep" in layout and "fp16" not in layout]
CERTIFIED = [layout for layout in LAYOUTS if layout in RECOMPUTED or "-pp" in layout or layout == "zero1-bf16-offload"]
OFFLOADED = ["zero1-fp32-offload", "zero2-fp32-offload", "zero3-fp32-offload"]
EQUAL = ["zero0-fp32", "zero1-fp32", "zero2-fp32", "zero3-fp32", "zero1-fp32-pp2"]
ODD = ["zero0-fp32", "zero3-fp32", "zero3-fp32-offload"]
"""Also trained with tensors of an odd number of elements, which two ranks cannot share equally."""
SUMMED = ["zero0-bf16", "zero1-bf16-offload", "zero1-bf16-ep2", "zero1-bf16-pp2-tied-deep"]
SUMMED = covering([*SUMMED, "zero2-bf16", "zero2-bf16-ep2-offload", "zero3-bf16", "zero3-bf16-offload"])
KEYS = ("step", "loss", "gradient_norm", "validation_loss", "router_loss", "dropped_tokens")
PASSES = 4
DISPATCHED: dict[str, tuple[str, float | None, str | None]] = {
    "roomy-masks": ("zero2-fp32-ep2", 4, None),
    "roomy-slots": ("zero2-fp32-ep2", 4, "slots"),
    "roomy-rows": ("zero2-fp32-ep1", 4, "rows"),
    "tight-slots": ("zero2-fp32-ep2", 0.5, "slots"),
    "tight-rows": ("zero2-fp32-ep1", 0.5, "rows"),
    "unlimited-masks": ("zero2-fp32-ep2", None, None),
    "unlimited-rows": ("zero2-fp32-ep1", None, "rows"),
}
"""Runs with experts: layout, capacity factor, and how tokens get to their experts."""
FAULTS = {
    "nan-gradients": ("NonFiniteLoss", "the gradient norm is inf at step 3"),
    "nan-at-the-end": ("NonFiniteLoss", "the loss is nan at step 4"),
    "duplicate": ("DuplicateBatch", "ranks 0 and 1 got the same samples at step 1"),
    "frozen": ("WeightsDidNotMove", "2 optimizer steps up to step 2"),
    "skipped": ("TooManySkippedSteps", "optimizer steps were skipped"),
    "disagree": ("RanksDisagree", "the resume tag differs between ranks"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """All trainings of this file, in one launch of two ranks."""
    root = tmp_path_factory.mktemp("trained")
    jobs: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        killed = {"killed": f"{root}/{layout}.whole", "resume_tag": "step-00000002"}
        jobs += [job(f"{layout}.whole", layout), job(f"{layout}.resumed", layout, **killed)]
    for layout in RECOMPUTED:
        jobs.append(job(f"{layout}.recomputed", layout, {"model.activation_checkpointing": True}))
    for name, (layout, capacity, dispatch) in DISPATCHED.items():
        settings = {"model.moe.capacity_factor": capacity, "model.dropout_rate": 0}
        jobs.append(job(name, layout, settings, dispatch=dispatch))
    one_pass = {"model.dropout_rate": 0, "optimizer.gradient_clip": 0, "layout.micro_batch_sequences": 8}
    for layout in EQUAL + OFFLOADED:
        jobs.append(job(f"{layout}.one-pass", layout, one_pass | {"optimizer.weight_decay": 0.1}))
    for layout in ODD:
        jobs.append(job(f"{layout}.odd", layout, one_pass | {"model.d_model": 9, "model.d_ff": 11}))
    for layout in SUMMED:
        jobs += [_one_batch(layout, passes) for passes in (1, PASSES)]
    jobs.append(job("to-zero", "zero1-fp32", {"optimizer.final_learning_rate": 0}))
    jobs.append(_epoch_ends_within_a_step())
    jobs.append(job("unused", "zero1-fp32", {"storage.checkpoint_every_steps": 1}, fault="unused"))
    for fault in FAULTS:
        of_skips = {"optimizer.num_steps": 6}
        tag = "step-00000002" if fault == "disagree" else None
        jobs.append(job(fault, "zero1-fp32", of_skips if fault == "skipped" else {}, fault=fault, resume_tag=tag))
    return train(root, jobs, pydocs_shards)


def _one_batch(layout: str, passes: int) -> dict[str, Any]:
    """A short training whose steps take the same batch ``passes`` times. Its experts have capacity for every token."""
    spec = spec_of(layout)
    settings = {
        "optimizer.num_steps": 3,
        "optimizer.global_batch_sequences": spec.layout.micro_batch_sequences * spec.data_parallel_size * passes,
        "model.dropout_rate": 0,
        "model.moe.capacity_factor": 4,  # tokens beyond the capacity are dropped at random
    }
    return job(f"{layout}.passes-{passes}", layout, settings, fault="one-batch")


def _epoch_ends_within_a_step() -> dict[str, Any]:
    """With this seed, the last of an epoch's three samples is also the first of the next epoch, and step 2 has both."""
    positions, epochs = np.array([2, 0]), np.array([0, 1])
    seed = next(seed for seed in range(20) if len({*permuted(positions, 3, seed, 1, epochs).tolist()}) == 1)
    settings = {"optimizer.global_batch_sequences": 2, "layout.micro_batch_sequences": 1, "optimizer.num_steps": 3}
    return job("short-epochs", "zero1-fp32", settings | {"optimizer.seed": seed}, fault="short-epochs")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_killed_between_checkpoints_resumes_bit_equal_and_all_ranks_end_with_the_same_weights(
    trained: Trained, layout: str
) -> None:
    whole, resumed = trained.found(f"{layout}.whole"), trained.found(f"{layout}.resumed")
    assert whole["step"] == resumed["step"] == 4
    assert whole["masters"] == resumed["masters"]
    assert trained.found(f"{layout}.whole", rank=1) == whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_consolidates_to_the_live_masters_and_every_record_has_its_checksum(
    trained: Trained, layout: str, tmp_path: Path
) -> None:
    assert trained.consolidated(f"{layout}.whole", tmp_path) == trained.found(f"{layout}.whole")["masters"]
    archives = list((trained.root / f"{layout}.whole/checkpoints").glob("*/*.pt"))
    assert archives
    for path in archives:
        with ZipFile(path) as archive:
            assert archive.testzip() is None


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # transformers warns so for every T5 v1.1
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_witness_records_every_weight_finite_logits_the_test_split_the_loss_curve_and_the_layout(
    trained: Trained, layout: str
) -> None:
    folder, spec = trained.root / f"{layout}.resumed", spec_of(layout)
    witness = json.loads((folder / "witness/witness.json").read_text())
    assert witness["tag"] == "step-00000004"
    assert {"torch", "processor", "arithmetic"} <= witness["environment"].keys()
    assert set(witness["tensors"]) == set(trained.found(f"{layout}.resumed")["masters"])
    assert torch.isfinite(load_file(folder / "witness/witness.safetensors")["heldout.logits"]).all()
    recorded = witness["trained"]
    assert recorded["layout"] == {"ranks": 2, **spec.layout.model_dump(mode="json")}
    assert recorded["data"]["train_tokens"] > recorded["data"]["train_samples"] > 0
    assert 0 < witness["validation"]["test_content_loss"] < 20
    assert witness["validation"]["test_sequences"] <= spec.storage.validate_sequences
    lines = read(folder / "metrics.jsonl")
    assert witness["curve"]["loss"] == [[line["step"], line["loss"]] for line in lines if "loss" in line]
    validated = sorted({line["step"] for line in lines if "validation_content_loss" in line})
    assert [step for step, _ in witness["curve"]["validation_content_loss"]] == validated


@pytest.mark.parametrize("layout", CERTIFIED)
def test_every_variant_is_certified_to_be_the_model_that_was_trained(
    trained: Trained, layout: str, pydocs_tokenizer: TokenizerFiles, tmp_path: Path, restore_torch_threads: None
) -> None:
    certificate = _certificate(trained.root / f"{layout}.whole", spec_of(layout), pydocs_tokenizer, tmp_path)
    assert certificate.passed
    assert all(probe.bit_equal for probe in certificate.probes.values()) or "ep" in layout


@pytest.mark.parametrize("name", ["tight-rows", "tight-slots", "unlimited-rows"])
def test_experts_that_got_sorted_tokens_are_certified(
    trained: Trained, name: str, pydocs_tokenizer: TokenizerFiles, tmp_path: Path, restore_torch_threads: None
) -> None:
    layout, capacity, _ = DISPATCHED[name]
    spec = spec_of(layout).with_settings({"model.moe.capacity_factor": capacity})
    assert _certificate(trained.root / name, spec, pydocs_tokenizer, tmp_path).passed


def _certificate(folder: Path, spec: RunSpec, tokenizer: TokenizerFiles, into: Path) -> Certificate:
    weights = consolidate(folder / "checkpoints", into / "weights")
    exported = export(weights, tokenizer, folder / "witness", spec, into / "export")
    return certify(exported.path, folder / "witness")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_logged_exactly_once_across_a_resume(trained: Trained, layout: str) -> None:
    lines = read(trained.root / f"{layout}.resumed/metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    again = read(trained.root / f"{layout}.whole/metrics.jsonl")
    assert [line["loss"] for line in lines if "loss" in line] == [line["loss"] for line in again if "loss" in line]
    assert all(line["gradient_norm"] and line["host_memory_bytes"] for line in lines if "loss" in line)
    assert [line["step"] for line in lines if line.get("save_seconds")] == [2, 4]
    assert [line["step"] for line in lines if line.get("validate_seconds")] == [2]
    baselines = {line["step"]: line["unigram_content_loss"] for line in lines if "unigram_content_loss" in line}
    assert list(baselines) == [0, 4]
    assert baselines[0] == baselines[4]
    assert not any("mfu" in line for line in lines), "the peak of a CPU is not known"


@pytest.mark.parametrize("layout", RECOMPUTED)
def test_activation_checkpointing_changes_no_result(trained: Trained, layout: str) -> None:
    assert trained.found(f"{layout}.recomputed") == trained.found(f"{layout}.whole")
    runs = [read(trained.root / f"{layout}.{run}/metrics.jsonl") for run in ("whole", "recomputed")]
    kept, recomputed = ([{key: line.get(key) for key in KEYS} for line in run] for run in runs)
    assert kept == recomputed


@pytest.mark.parametrize("layout", EQUAL[1:])
def test_layouts_train_bit_equal_weights_when_sums_have_only_one_order(trained: Trained, layout: str) -> None:
    """With two ranks, one pass of each per step and no clipping, every layout sums in the same order as ZeRO 0."""
    assert trained.found(f"{layout}.one-pass")["masters"] == trained.found("zero0-fp32.one-pass")["masters"]
    _require_equal(trained, ("zero0-fp32.one-pass", f"{layout}.one-pass"), ("loss", "gradient_norm"), 1e-5)


def _require_equal(trained: Trained, runs: tuple[str, str], keys: tuple[str, ...], tolerance: float) -> None:
    """Compare what two runs logged, up to rounding."""
    expected, found = (read(trained.root / f"{run}/metrics.jsonl") for run in runs)
    for key in keys:
        values = [line[key] for line in expected if key in line]
        assert len(values) > 0
        assert [line[key] for line in found if key in line] == pytest.approx(values, rel=tolerance), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_and_position_biases_are_not_decayed_in_any_layout(trained: Trained, layout: str) -> None:
    found, endings = trained.found(f"{layout}.whole"), ("layer_norm.weight", "relative_attention_bias.weight")
    assert found["not_decayed"] == sorted(name for name in found["masters"] if name.endswith(endings)) != []


@pytest.mark.parametrize("layout", OFFLOADED)
def test_an_optimizer_in_host_memory_trains_the_same_model(trained: Trained, layout: str) -> None:
    _require_equal(trained, ("zero0-fp32.one-pass", f"{layout}.one-pass"), ("loss",), 1e-5)


@pytest.mark.parametrize("layout", ODD[1:])
def test_tensors_that_ranks_cannot_share_equally_are_trained_alike(trained: Trained, layout: str) -> None:
    _require_equal(trained, ("zero0-fp32.odd", f"{layout}.odd"), ("loss", "gradient_norm"), 1e-5)


def test_experts_over_one_rank_and_over_two_train_the_same_model(trained: Trained) -> None:
    runs = ("zero2-fp32-ep1.whole", "zero2-fp32-ep2.whole")
    _require_equal(trained, runs, ("loss", "gradient_norm", "router_loss", "dropped_tokens"), 1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("roomy-masks", "roomy-slots"),
        ("roomy-masks", "roomy-rows"),
        ("roomy-masks", "unlimited-masks"),
        ("roomy-masks", "unlimited-rows"),
        ("tight-rows", "tight-slots"),
    ],
)
def test_experts_train_the_same_model_however_they_get_their_tokens(trained: Trained, first: str, second: str) -> None:
    keys = ("loss", "gradient_norm", "router_loss", "dropped_tokens", "validation_loss")
    _require_equal(trained, (first, second), keys, 1e-4)
    dropped = [line["dropped_tokens"] for line in read(trained.root / second / "metrics.jsonl") if "loss" in line]
    assert all((value > 0.1) == ("tight" in first) for value in dropped)


@pytest.mark.parametrize("layout", EXPERTS)
def test_every_experts_tokens_are_counted_over_all_ranks(trained: Trained, layout: str) -> None:
    lines = [line for line in read(trained.root / f"{layout}.whole/metrics.jsonl") if "starving_experts" in line]
    assert [line["step"] for line in lines] == [2, 4]
    encoder = [f"tokens/encoder.block.1.layer.1.mlp/expert_{expert}" for expert in range(4)]
    assert [sum(line[name] for name in encoder) for line in lines] == [2 * 16 * 32 * (2 if "top2" in layout else 1)] * 2


@pytest.mark.parametrize(
    ("name", "steps"),
    [("to-zero", 4), ("unused", 4), ("short-epochs", 3)],
    ids=["a last step with a learning rate of zero", "a rank with unused weights", "a sample in two epochs"],
)
def test_what_only_resembles_a_fault_is_allowed(trained: Trained, name: str, steps: int) -> None:
    for rank in (0, 1):
        assert trained.found(name, rank).get("step") == steps, trained.found(name, rank)


def test_old_checkpoints_are_pruned(trained: Trained) -> None:
    kept = sorted(path.name for path in (trained.root / "unused/checkpoints").iterdir() if path.is_dir())
    assert kept == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_fault_ends_with_a_clear_error_on_every_rank(trained: Trained, fault: str) -> None:
    kind, message = FAULTS[fault]
    for rank in (0, 1):
        found = trained.found(fault, rank)
        assert found["error"] == kind
        assert message in found["message"]


@pytest.mark.parametrize("layout", SUMMED)
def test_repeating_a_batch_within_a_step_gives_the_same_update_as_one_pass(trained: Trained, layout: str) -> None:
    """Equal to the last bit: the sum is exact in fp32; in bf16, it would be off by a percent."""
    once, often = (trained.found(f"{layout}.passes-{passes}") for passes in (1, PASSES))
    assert often == once
