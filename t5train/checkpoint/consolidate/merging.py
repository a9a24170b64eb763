"""Merge adapters with the model that they are for, whose weights the checkpoint does not hold.

The result is the start model's own values as fp32, not the rounded ones that training computed with, plus the product
of each adapter's factors, which is computed in fp32 in a fixed order (``t5train.model.lora``). So it has the bits that
the witness recorded, wherever it is made.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint
from t5train.checkpoint.consolidate.plan import ITEM_BYTES, Extent, Plan, Source, TensorPlan
from t5train.checkpoint.consolidate.span_reader import Reader
from t5train.errors import InputError
from t5train.model.lora import LORA_A, LORA_B, Adapter, Merging
from t5train.model.model_shape import resolve
from t5train.model.parameters import parameter_shapes
from t5train.model.starting_model import start_fingerprint, tensors_of
from t5train.model.tensor_files import StoredTensor
from t5train.progress import Progress
from t5train.records.start_copy import require_copied
from t5train.spec import ModelSpec, RunSpec

_SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")
_LENGTH = struct.Struct("<Q")


def require_start(opened: OpenedCheckpoint, start_from: str, progress: Progress) -> ModelSpec:
    """Return the model that the checkpoint's adapters are for, after verifying the folder ``start_from``.

    Raises InputError if it holds another model, SpecError if it is no folder, and the errors of ``start_fingerprint``.
    """
    require_copied(start_from)
    first = opened.sidecars[0]
    config, adapted = first.huggingface_config, first.adapted
    settings = {
        "start_from": json.dumps(start_from),
        "version": "v1.0" if config["tie_word_embeddings"] else "v1.1",
        "feed_forward": config["feed_forward_proj"],
        **{name: config[name] for name in _SIZES},
    }
    model = RunSpec(recipe="any").with_settings({f"model.{name}": value for name, value in settings.items()}).model
    found = start_fingerprint(model, progress)
    if adapted is None or found != adapted.start_fingerprint:
        raise InputError(
            f"{opened.folder} has adapters for another model than {start_from}, whose fingerprint is "
            f"{str(found)[:12]}: give the folder that the run started from (model.start_from)"
        )
    return model


def merge(plan: Plan, model: ModelSpec, scaling: float) -> Plan:
    """Return the plan of the merged model, from that of a checkpoint of adapters."""
    shape = resolve(model, 1)
    sources = _sources(tensors_of(model, shape) or {})
    factors = {tensor.name: tensor for tensor in plan.tensors}

    def merging(name: str) -> Merging | None:
        a, b = factors.get(name + LORA_A), factors.get(name + LORA_B)
        return Merging(Adapter(_read(a), _read(b)), scaling) if a and b else None

    tensors = [
        TensorPlan(name, size, "F32", sources[name], merging=merging(name))
        for name, size in parameter_shapes(shape).items()
    ]
    return replace(plan, tensors=tensors, adapters=plan.tensors)


def _read(tensor: TensorPlan) -> torch.Tensor:
    """Return an fp32 tensor of a checkpoint."""
    values = torch.empty(tensor.shape)
    with Reader() as reader:
        reader.read(tensor.source, 0, values.numpy().reshape(-1).view(np.uint8).data)
    return values


def _sources(places: Mapping[str, StoredTensor]) -> dict[str, Source]:
    """Return where in their safetensors files the tensors are."""
    headers = {file: _header(file) for file in {place.file for place in places.values()}}
    found = {}
    for name, (file, own, shape, dtype) in places.items():
        start, entries = headers[file]
        size = ITEM_BYTES[dtype] * torch.Size(shape).numel()
        found[name] = Source(dtype, (Extent(file, start + entries[own]["data_offsets"][0], size),))
    return found


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and its header, which safetensors has checked before."""
    with file.open("rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        return _LENGTH.size + length, json.loads(opened.read(length))
