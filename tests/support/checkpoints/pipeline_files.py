"""Checkpoint files of a pipeline as DeepSpeed 0.19 writes them, written without DeepSpeed.

| file | written by | holds |
|---|---|---|
| ``layer_LL-model_states.pt`` | first rank of the stage | layer LL's weights, by their names in the layer |
| ``mp_rank_SS_model_states.pt`` | first rank of stage SS | shapes and buffers by the names ``LL.name``, no module |
| ``zero_pp_rank_R_mp_rank_SS_optim_states.pt`` | rank R of stage SS | its partition of every flat group of the stage |

A tied module is named ``tied_modules.KEY.name`` in the groups of each of its stages, and has one file, that of its
layer. Here it is the embedding: layer 0, with which the last stage ends as well.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from t5train.checkpoint import sidecar
from tests.support.checkpoints.deepspeed_files import Group, Layout, Model, Shape, Written, zero12_files
from tests.support.checkpoints.sidecar_files import rank_sidecar

TIED = "tied_modules.embed.weight"
_STAGE_AND_RANK = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_")


@dataclass(frozen=True)
class Pipeline:
    """Shapes of all weights, by stage and layer. ``layout`` gives precision, ranks per stage and padding."""

    stages: Sequence[Sequence[Sequence[Shape]]]
    layout: Layout
    embedding: Shape = (5, 3)

    @property
    def first_layers(self) -> list[int]:
        """Number of each stage's first layer; layer 0 is the embedding."""
        return [1 + sum(map(len, self.stages[:stage])) for stage in range(len(self.stages))]


def write_pipeline(folder: Path, pipeline: Pipeline, *, sidecars: bool) -> Written:
    layout = pipeline.layout
    tag = folder / f"global_step{layout.step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    models = _models(pipeline)
    for stage, model in enumerate(models):
        for name, content in {**_stage_files(pipeline, model, stage), **_layer_files(pipeline, model)}.items():
            torch.save(content, tag / name)
    if sidecars:
        _write_sidecars(tag, pipeline, models)
    masters = {name: tensor for model in models for name, tensor in model.masters.items()}
    return Written(tag, {_published(name) if sidecars else name: tensor for name, tensor in masters.items()})


def _models(pipeline: Pipeline) -> list[Model]:
    """What each stage holds, with matrices in one parameter group and all else in another."""
    generator = torch.Generator().manual_seed(pipeline.layout.seed)
    embedding = torch.randn(pipeline.embedding, generator=generator)
    models = []
    for stage, (first, layers) in enumerate(zip(pipeline.first_layers, pipeline.stages, strict=True)):
        masters = {
            f"{first + index}.w{number}": torch.randn(shape, generator=generator)
            for index, shapes in enumerate(layers)
            for number, shape in enumerate(shapes)
        }
        if stage in (0, len(pipeline.stages) - 1):
            masters[TIED] = embedding
        groups = [[n for n, t in masters.items() if (t.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        models.append(Model(masters, [Group([names]) for names in groups if names], {}, {}, {}))
    return models


def _stage_files(pipeline: Pipeline, model: Model, stage: int) -> dict[str, Any]:
    """The files that ZeRO writes for a stage, with the stage's number in place of 00."""
    count = len(pipeline.stages)
    files = zero12_files(pipeline.layout, model)
    states = files["mp_rank_00_model_states.pt"]
    states |= {"module": None, "mp_world_size": count, "shared_params": {}}
    states["checkpoint_parallel_dimensions"] = {"pp_degree": count, "tp_degree": 1}
    return {name.replace("mp_rank_00", f"mp_rank_{stage:02d}"): content for name, content in files.items()}


def _layer_files(pipeline: Pipeline, model: Model) -> dict[str, Any]:
    files: dict[str, OrderedDict[str, torch.Tensor]] = {}
    for name, master in model.masters.items():
        layer, weight = ("0", "weight") if name == TIED else name.split(".", 1)
        content = files.setdefault(f"layer_{int(layer):02d}-model_states.pt", OrderedDict())
        content[weight] = master.to(pipeline.layout.precision)
    return files


def _published(name: str) -> str:
    return "shared.weight" if name == TIED else f"block.{name}"


def _write_sidecars(tag: Path, pipeline: Pipeline, models: Sequence[Model]) -> None:
    """Write a sidecar per rank. The first rank of a stage records the stage's files, and rank 0 those of all layers."""
    last = pipeline.first_layers[-1] + len(pipeline.stages[-1])
    layers = {str(layer): f"block.{layer}" for layer in range(1, last)}
    layers |= {"0": "shared", "tied_modules.embed": "shared"}
    size, count = pipeline.layout.ranks, len(pipeline.stages)
    for stage, model in enumerate(models):
        for data_rank in range(size):
            rank = stage * size + data_rank
            files = [path.name for path in tag.glob("*.pt") if _writer(path.name, size) == rank]
            one = rank_sidecar(tag, replace(pipeline.layout, prefix=""), model, data_rank, files)
            groups = [[slot.model_copy(update={"name": _published(slot.name)}) for slot in g] for g in one.groups]
            parallel_layout = one.layout.model_copy(update={"pipeline_rank": stage, "pipeline_size": count})
            changed = {"rank": rank, "world_size": size * count, "layout": parallel_layout, "groups": groups}
            sidecar.write(tag, one.model_copy(update=changed | {"pipeline_layers": layers}))


def _writer(name: str, size: int) -> int:
    match = _STAGE_AND_RANK.search(name)
    return int(match[2]) * size + int(match[1] or 0) if match else 0
