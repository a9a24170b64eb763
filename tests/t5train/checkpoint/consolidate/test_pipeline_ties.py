"""Ties inside a layer that no file records are found by content."""

import tracemalloc
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from tests.support.checkpoints.deepspeed_files import Layout
from tests.support.checkpoints.pipeline_files import Pipeline, write_pipeline

LAYER = "layer_02-model_states.pt"


def tag_with(folder: Path, embedding: tuple[int, int], **more: Any) -> Path:
    """A pipeline of two stages. ``more`` adds tensors to the file of its last layer, or replaces its ``w0``."""
    layers = Pipeline([[[(3, 2)]], [[(4,)]]], Layout((), stage=1), embedding=embedding)
    tag = write_pipeline(folder, layers, sidecars=False).tag
    torch.save(torch.load(tag / LAYER) | more, tag / LAYER)
    return tag


def test_a_large_tied_weight_is_never_held_in_memory_whole(tmp_path: Path) -> None:
    embedding = (2000, 3000)
    weight = torch.load(tag_with(tmp_path / "first", embedding) / "layer_00-model_states.pt")["weight"]
    tag = tag_with(tmp_path / "second", embedding, tie=weight.clone())
    tracemalloc.start()
    try:
        consolidate(tag, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 0.9 * weight.nbytes
    finally:
        tracemalloc.stop()
    assert "2.tie" not in load_file(tmp_path / "out" / "model.safetensors")


def test_different_parts_of_one_storage_are_not_taken_for_tied_weights(tmp_path: Path) -> None:
    w0 = torch.load(tag_with(tmp_path / "first", (5, 3)) / LAYER)["w0"]
    parts = torch.stack([torch.zeros(4), w0.float(), torch.arange(4.0)]).bfloat16()
    consolidate(tag_with(tmp_path / "second", (5, 3), w0=parts[1], frozen=parts[2]), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["2.frozen"], torch.arange(4.0))
