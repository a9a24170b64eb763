"""Which parts of a model train with kernels, on which GPUs."""

from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from t5train.engine import engine
from t5train.model.attention import Attention
from t5train.model.feed_forward import GatedFeedForward
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec.recipes import recipe
from tests.support.needed_triton import require_triton

# After require_triton, because the module imports Triton.
require_triton()
from t5train.model.kernels import biased_attention  # noqa: E402 - see above

EXPERTS = {"model.version": "v1.0", "model.moe.num_experts": 4}
LORA: dict[str, Any] = {
    "pairs.train": ["pairs.jsonl"],
    "model.start_from": "unread",
    "optimizer.kind": "adamw",
    "finetune.lora.rank": 8,
}
TAKES_ALL = {"model.moe.capacity_factor": None}


class Chosen(NamedTuple):
    attention: bool = False
    gate: bool = False
    experts: str = ""


def _chosen(monkeypatch: pytest.MonkeyPatch, capability: int, settings: dict[str, Any]) -> Chosen:
    monkeypatch.setattr(engine, "_has_kernels", lambda: True)
    monkeypatch.setattr(biased_attention, "capability", lambda: capability)
    small = {"model.d_model": 64, "model.d_ff": 128, "model.d_kv": 32, "model.num_layers": 2}
    spec = recipe("smoke").with_settings(
        {**small, "model.num_decoder_layers": 2, "layout.zero_stage": 2, "optimizer.precision": "bf16", **settings}
    )
    shape = resolve(spec.model, 2100)
    model = T5(shape, decoder_start_id=0)
    engine._use_kernels(model, spec, shape)
    modules = list(model.modules())
    return Chosen(
        any(isinstance(each, Attention) and each.kernel is not None for each in modules),
        any(isinstance(each, GatedFeedForward) and each.kernel is not None for each in modules),
        next((layer.dispatch for _, layer in model.sparse_layers()), ""),
    )


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        (90, {}, Chosen(attention=True, gate=True)),
        (80, {}, Chosen(attention=True, gate=True)),
        (90, {"optimizer.precision": "fp16"}, Chosen(attention=True, gate=True)),
        (90, {"optimizer.precision": "fp32"}, Chosen()),
        (90, {"layout.zero_stage": 3}, Chosen(attention=True, gate=True)),
        (90, {"model.dropout_rate": 0.1}, Chosen(gate=True)),
        (90, {"model.d_kv": 48}, Chosen(gate=True)),
        (90, {"pairs.train": ["pairs.jsonl"]}, Chosen(attention=True, gate=True)),
        (90, {"pairs.train": ["pairs.jsonl"], "model.dropout_rate": 0.1}, Chosen(attention=True, gate=True)),
        (90, LORA, Chosen(attention=True, gate=True)),
        (90, EXPERTS, Chosen(attention=True, experts="rows")),
        (90, EXPERTS | TAKES_ALL, Chosen(attention=True, experts="rows")),
        (90, EXPERTS | TAKES_ALL | {"layout.expert_parallel_size": 2}, Chosen(attention=True, experts="deepspeed")),
        (80, EXPERTS | TAKES_ALL, Chosen(attention=True, experts="deepspeed")),
        (80, EXPERTS, Chosen(attention=True, experts="slots")),
        (100, EXPERTS, Chosen(attention=True, experts="slots")),
        (90, EXPERTS | {"optimizer.precision": "fp16"}, Chosen(attention=True, experts="slots")),
        (90, EXPERTS | {"optimizer.precision": "fp32"}, Chosen(experts="deepspeed")),
        (90, EXPERTS | {"layout.expert_parallel_size": 2}, Chosen(attention=True, experts="slots")),
        (90, EXPERTS | {"model.d_ff": 132}, Chosen(attention=True, experts="slots")),
        (90, EXPERTS | {"model.d_model": 68}, Chosen(attention=True, experts="slots")),
    ],
)
def test_kernels_are_used_where_they_are_right(
    monkeypatch: pytest.MonkeyPatch, capability: int, settings: dict[str, Any], expected: Chosen
) -> None:
    assert _chosen(monkeypatch, capability, settings) == expected


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_kernels_need_ampere(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    monkeypatch.setattr(engine, "get_accelerator", CUDA_Accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert engine._has_kernels() is expected


@pytest.mark.parametrize(("capability", "is_tuned"), [(80, False), (86, False), (90, True), (100, False), (120, False)])
def test_only_hopper_uses_the_settings_that_were_tuned_on_it(
    monkeypatch: pytest.MonkeyPatch, capability: int, is_tuned: bool
) -> None:
    monkeypatch.setattr(biased_attention, "capability", lambda: capability)
    options = biased_attention._options(64)
    assert (options["tiles"]["STAGES"] == 3) is is_tuned
    assert (options["dkdv"]["maxnreg"] is not None) is is_tuned
    assert all(each["enable_fp_fusion"] for each in options.values())
