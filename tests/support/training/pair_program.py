"""The program that ranks run in test_pair_passes.py: a step on pairs, in many layouts.

``python pair_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "rows", "has_keys"}]``. For each job it
writes ``{name}.rank-{rank}.json`` beside it, with the loss of the step and of tokens, and ``{name}.safetensors`` with
the gradients that the step updates the weights with.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import comm
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from t5train.data.samples.loader import Batch
from t5train.engine import forward_backward
from t5train.engine.collectives import gather_floats
from t5train.engine.engine import build_engine, model_of, set_learning_rate
from t5train.engine.expert_routing import Routing
from t5train.engine.forward_backward import passes_of
from t5train.model.model_shape import resolve
from t5train.spec import RunSpec, build
from tests.support.training import rank_main
from tests.support.training.ragged_pairs import LENGTHS, PAD, VOCABULARY, batch_of, fill, make_pairs


def _step(entry: dict[str, Any]) -> dict[str, Any]:
    spec = build(entry["spec"])
    shape = resolve(spec.model, VOCABULARY)
    engine = build_engine(spec, shape, PAD, partial(fill, shape=shape), node_local=False)
    passes = passes_of(engine, spec, Routing(model_of(engine)))
    set_learning_rate(engine, 0.0)
    found: dict[str, torch.Tensor] = {}
    take = forward_backward.take_update

    def take_update(engine: Any) -> float | None:
        if engine.is_gradient_accumulation_boundary():
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    found[name] = safe_get_full_grad(parameter).float().clone()
        return take(engine)

    with mock.patch.object(forward_backward, "take_update", take_update):
        result = passes.step(iter(_batches(spec, entry)))
    if comm.get_rank() == 0:
        save_file(found, Path(os.environ["OUT"]) / f"{entry['name']}.safetensors")
    whole = batch_of(entry["rows"], make_pairs(), has_keys=entry["has_keys"])
    (predicted,) = passes.predictions([whole])
    (losses,) = passes.token_losses([whole])
    assert losses.tolist() == predicted.losses.tolist()
    loss = sum(row[0] for row in gather_floats([result.loss])) / comm.get_world_size()
    return {"loss": loss, "norm": result.gradient_norm, "token_losses": float(losses.sum())}


def _batches(spec: RunSpec, entry: dict[str, Any]) -> list[Batch]:
    """This rank's batches of the step."""
    size, total = spec.layout.micro_batch_sequences, sum(target for _, target in LENGTHS)
    first = [(number * spec.cluster.ranks + comm.get_rank()) * size for number in range(spec.gradient_accumulation)]
    rows, pairs = entry["rows"], make_pairs()
    return [
        batch_of(rows[begin : begin + size], pairs, has_keys=entry["has_keys"], global_targets=total) for begin in first
    ]


if __name__ == "__main__":
    rank_main.run_jobs(_step)
