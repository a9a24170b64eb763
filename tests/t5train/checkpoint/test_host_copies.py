"""Copies of what DeepSpeed saves: torch.save writes for them what it would have written for the originals."""

import io
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from t5train.checkpoint import host_copies
from t5train.checkpoint.host_copies import copied, fit_in_memory
from t5train.model.model_shape import resolve
from t5train.spec.recipes import recipe

SPEC = recipe("smoke").with_settings({"cluster.ranks": 2})
SHAPE = resolve(SPEC.model, 2048)


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_copy_is_saved_as_the_original_was_before_training_changed_it() -> None:
    flat = torch.randn(100, requires_grad=True)
    flat.ds_id = "0_8"  # as DeepSpeed does
    module: Any = OrderedDict(weight=flat.detach().narrow(0, 10, 20), bias=torch.ones(3, dtype=torch.bfloat16))
    module._metadata = {"version": 1}
    state = {
        "module": module,
        "flat": [flat, flat],
        "transposed": torch.nn.Parameter(torch.randn(4, 3).t()),
        "scalar": (1, torch.tensor(3.0)),
        "empty": torch.empty(0),
        "shape": torch.Size([1, 2]),
        "scaler": SimpleNamespace(cur_scale=1024.0),
    }
    before, copy = saved(state), copied(state)
    assert saved(copy) == before
    with torch.no_grad():
        flat.zero_()
        state["transposed"].fill_(1)
    state["scaler"].cur_scale = 512.0
    module._metadata["version"] = 2
    assert saved(state) != before
    assert saved(copy) == before


def test_a_copy_of_an_accelerators_tensor_is_saved_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.ones(30)
    state = {"flat": flat, "part": flat[3:7], "other": torch.ones(3)}
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _storage: str(torch.device("cuda", 1)))
    before, copy = saved(state), copied(state)
    monkeypatch.undo()
    assert b"cuda:1" in before
    assert saved(copy) == before


@pytest.mark.gpu
def test_the_state_of_an_accelerator_is_copied_to_host_memory_and_saved_as_the_state_itself() -> None:
    flat = torch.randn(host_copies._STAGED_BYTES // 4 + 5, device=get_accelerator().current_device_name())
    state = {"flat": flat, "part": flat[3:7], "weight": flat.bfloat16()}
    before, copy = saved(state), copied(state)
    flat.zero_()
    assert {tensor.device.type for tensor in copy.values()} == {"cpu"}
    assert saved(copy) == before


def test_what_is_larger_than_the_page_locked_buffer_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_STAGED_BYTES", 8)
    source, target = torch.arange(20, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)
    host_copies._Storages()._copy_staged(source, target)
    assert torch.equal(source, target)


@pytest.mark.parametrize(("witness", "metric"), [(False, None), (True, None), (False, "validation_bleu")])
def test_copies_are_made_only_if_every_host_keeps_a_tenth_of_its_memory_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, witness: bool, metric: str | None
) -> None:
    spec = SPEC.model_copy(update={"evaluate": SPEC.evaluate.model_copy(update={"best_metric": metric})})
    needed = host_copies.bytes_written(spec, SHAPE, range(2)) + 2 * 500
    needed += 4 * host_copies.count_parameters(SHAPE) if witness or metric else 0
    free = 10_000 + needed
    ranks = {"available_host_memory_bytes": lambda: free, "host_memory_bytes": lambda: 100_000}
    ranks |= {"_growth_bytes": lambda: 500, "ranks_of_node": lambda: [0, 1], "rank": lambda: 0}
    for name, value in ranks.items():
        monkeypatch.setattr(host_copies, name, value)
    other = {2: [500, 10**12], 1: [0]}  # rank 1 has as much to grow by, and sees no limit of its own
    monkeypatch.setattr(host_copies, "gather", lambda own: [own, other[len(own)]])
    assert fit_in_memory(spec, SHAPE, records_witness=witness)
    assert caplog.messages == []
    free -= 1
    assert not fit_in_memory(spec, SHAPE, records_witness=witness)
    (line,) = caplog.messages
    assert "host memory is short, so that training waits for this checkpoint" in line
