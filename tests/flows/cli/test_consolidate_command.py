"""``consolidate`` as a user calls it."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from t5train.model.parameters import ParameterSlot

MODEL = "mp_rank_00_model_states.pt"
Record = Callable[..., None]


def write_tag(tag: Path, record: Record) -> dict[str, dict[str, torch.Tensor]]:
    """Write a checkpoint of one fp32 rank without separate masters; return the expected tensors, by file."""
    tag.mkdir(parents=True)
    held = {
        stem: {"b.weight": torch.randn(3, 2), "a.bias": torch.randn(4)} for stem in ("model", "exp_avg", "exp_avg_sq")
    }
    states = {
        number: {"step": torch.tensor(3.0)} | {key: held[key][name] for key in ("exp_avg", "exp_avg_sq")}
        for number, name in enumerate(held["model"])
    }
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"module": held["model"], "optimizer": optimizer, "global_steps": 3, "dp_world_size": 1}, tag / MODEL)
    record(tag, [MODEL], [ParameterSlot.of("b.weight", (3, 2), 0), ParameterSlot.of("a.bias", (4,), 6)])
    return held


def test_moments_are_written_only_on_request(
    t5_pretrain: Callable[..., int], record_only_rank: Record, tmp_path: Path
) -> None:
    held = write_tag(tmp_path / "checkpoints/step-00000003", record_only_rank)
    assert t5_pretrain("consolidate", "checkpoints", "plain") == 0
    assert t5_pretrain("consolidate", "checkpoints", "out", "--moments") == 0
    assert sorted(path.stem for path in (tmp_path / "plain").glob("*.safetensors")) == ["model"]
    for stem, tensors in held.items():
        found = load_file(tmp_path / "out" / f"{stem}.safetensors")
        assert sorted(found) == sorted(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert t5_pretrain("verify", "out") == 0
