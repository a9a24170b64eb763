"""A step on pairs has the same loss and gradient for every number of ranks and passes, ZeRO stage, and packing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from t5train.engine.forward_backward import rows_of
from t5train.spec import LoraSpec
from t5train.spec.recipes import recipe
from tests.support.training.launched import launch
from tests.support.training.ragged_pairs import (
    MODELS,
    PACKED,
    UNPACKED,
    batch_of,
    distance,
    gradients_of,
    make_model,
    make_pairs,
)

pytestmark = pytest.mark.slow
MODEL, RATE = "relu, tied", 0.2
RECOMPUTED = {"model.activation_checkpointing": True}
BF16 = {"optimizer.precision": "bf16"}
TERMS = {"optimizer.label_smoothing": 0.1, "optimizer.z_loss": 1e-2}


def _job(ranks: int, passes: int, stage: int, rows: Any, has_keys: bool, **settings: Any) -> dict[str, Any]:
    spec = recipe("smoke").with_settings(
        {
            "pairs.train": ["pairs.jsonl"],
            "cluster.ranks": ranks,
            "cluster.accelerator": "cpu",
            "optimizer.global_batch_sequences": len(rows),
            "optimizer.precision": "fp32",
            "optimizer.gradient_clip": 0,
            "layout.micro_batch_sequences": len(rows) // ranks // passes,
            "layout.zero_stage": stage,
            **{f"model.{name}": value for name, value in MODELS[MODEL].items()},
            "model.dropout_rate": RATE if has_keys else 0.0,
            **settings,
        }
    )
    return {"spec": spec.model_dump(mode="json"), "rows": rows, "has_keys": has_keys}


LORA = {
    "model.start_from": "unread",
    "optimizer.kind": "adamw",
    "finetune.lora.rank": 3,
    "finetune.lora.alpha": 6.0,
    "finetune.lora.targets": ["q", "k", "v", "o", "wi", "wo"],
    "finetune.lora.dropout": 0.2,
}
ALONE = {
    "1x1": _job(1, 1, 0, PACKED, False),
    "1x4, dropout": _job(1, 4, 1, PACKED, True),
    "1x4, LoRA": _job(1, 4, 1, PACKED, True, **LORA),
    "1x4, ZeRO 3, LoRA, offload": _job(1, 4, 3, PACKED, True, **LORA, **{"layout.offload": "all"}),
    "1x2, ZeRO 3, LoRA": _job(1, 2, 3, PACKED, True, **LORA),
    "1x4, unpacked": _job(1, 4, 2, UNPACKED, False),
}
TOGETHER = {
    "2x2, ZeRO 0": _job(2, 2, 0, PACKED, True),
    "2x2, ZeRO 1, unpacked": _job(2, 2, 1, UNPACKED, True),
    "2x2, ZeRO 2, all terms": _job(2, 2, 2, PACKED, False, **RECOMPUTED, **TERMS),
    "2x2, ZeRO 3": _job(2, 2, 3, PACKED, True),
    "2x2, ZeRO 3, unpacked, recomputed": _job(2, 2, 3, UNPACKED, True, **RECOMPUTED),
    "2x2, ZeRO 2, offload": _job(2, 2, 2, PACKED, True, **{"layout.offload": "optimizer"}),
    "2x2, ZeRO 3, offload": _job(2, 2, 3, PACKED, True, **{"layout.offload": "all"}),
    **{f"2x2, ZeRO {stage}, LoRA": _job(2, 2, stage, PACKED, True, **LORA) for stage in (0, 1)},
    "2x2, ZeRO 3, LoRA, recomputed, offload": _job(
        *(2, 2, 3, UNPACKED, True), **LORA, **RECOMPUTED, **{"layout.offload": "all"}
    ),
    "2x2, ZeRO 2, LoRA, offload": _job(2, 2, 2, PACKED, True, **LORA, **{"layout.offload": "optimizer"}),
    "2x2, ZeRO 1, bf16": _job(2, 2, 1, PACKED, True, **BF16),
    "2x2, ZeRO 3, bf16": _job(2, 2, 3, PACKED, False, **BF16),
}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stepped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(root))
        for ranks, jobs in ((1, ALONE), (2, TOGETHER)):
            (root / "jobs.json").write_text(json.dumps([{"name": name, **job} for name, job in jobs.items()]))
            launch(root / "jobs.json", ranks, program="pair_program")
    return root


def _expected(job: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], float]:
    """What the model itself has on the whole batch: cross-entropy, gradients, and the sum of losses in evaluation."""
    has_keys, optimizer = job["has_keys"], job["spec"]["optimizer"]
    lora = LoraSpec.model_validate(job["spec"]["finetune"]["lora"])
    model = make_model(MODEL, RATE if has_keys else 0.0, lora=lora)
    batch = batch_of(PACKED, make_pairs(), has_keys=has_keys)
    model.label_smoothing, model.z_loss = optimizer["label_smoothing"], optimizer["z_loss"]
    assert batch.segments is not None
    inputs, targets = (torch.from_numpy(each).long() for each in (batch.inputs, batch.targets))
    rows = rows_of(batch.segments, passes_a_step=1)
    model(inputs, targets, rows).backward()
    with torch.no_grad():
        total, count = float(model.eval().token_losses(inputs, targets, rows).sum()), rows.target_segments.gt(0).sum()
        assert has_keys or float(model.cross_entropy) == pytest.approx(total / float(count), rel=1e-6)
        return model.cross_entropy, gradients_of(model), total


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_loss_and_gradient_are_the_same_in_every_layout(stepped: Path, name: str) -> None:
    job = (ALONE | TOGETHER)[name]
    loss, gradients, token_losses = _expected(job)
    tolerance = 1e-2 if "bf16" in name else 1e-6
    for rank in range(job["spec"]["cluster"]["ranks"]):
        found = json.loads((stepped / f"{name}.rank-{rank}.json").read_text())
        assert found["loss"] == pytest.approx(float(loss), rel=tolerance)
        assert found["token_losses"] == pytest.approx(token_losses, rel=tolerance)
    reduced = load_file(stepped / f"{name}.safetensors")
    assert reduced.keys() == gradients.keys()
    if "bf16" in name:  # small gradients of single tensors are mostly rounding
        reduced, gradients = _joined(reduced), _joined(gradients)
    assert max(distance(reduced[each], gradients[each]) for each in gradients) < 10 * tolerance


def _joined(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"all": torch.cat([gradients[name].flatten() for name in sorted(gradients)])}
