"""MFU is relative to the peak of the accelerator that trains, as its data sheet states it."""

import pytest
from deepspeed.accelerator import get_accelerator

from t5train.data.samples.span_corruption import geometry
from t5train.model.model_shape import resolve
from t5train.spec.recipes import recipe
from t5train.train.flops import training_flops
from t5train.train.peak_flops import accelerator_peak_flops, peak_flops, utilization


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A10 MIG", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_a_device_is_known_by_its_name_and_similar_ones_and_parts_are_unknown(
    name: str, precision: str, peak: float | None
) -> None:
    assert peak_flops(name, precision) == peak


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="only a CPU has no peak")
def test_a_cpu_has_no_peak() -> None:
    assert accelerator_peak_flops("bf16") is None


def test_utilization_is_relative_to_the_peak_of_all_ranks() -> None:
    spec = recipe("smoke")
    shape = resolve(spec.model, 2100)
    lengths = spec.objective.input_tokens, geometry(spec.objective).target_tokens
    flops = spec.optimizer.global_batch_sequences * training_flops(shape, *lengths)
    assert spec.cluster.ranks == 2
    assert utilization(spec, shape, seconds=0.5, peak=2 * flops) == pytest.approx(0.5)
    assert utilization(spec, shape, seconds=0.5, peak=None) is None


def test_rows_of_pairs_count_with_their_full_lengths() -> None:
    lengths = {"pairs.input_tokens": 48, "pairs.target_tokens": 24}
    spec = recipe("smoke").with_settings({"pairs.train": ["pairs.jsonl"], **lengths})
    shape = resolve(spec.model, 2100)
    flops = spec.optimizer.global_batch_sequences * training_flops(shape, 48, 24)
    assert utilization(spec, shape, 2.0, 1e9) == flops / 2 / (1e9 * spec.cluster.ranks)
