"""Small trainings on real ranks: settings by a short name of a layout, the launch, and its results."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.engine.collectives import digest64
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards
from t5train.spec.recipes import recipe
from tests.support.forked_ranks import run_ranks


def spec_of(layout: str, num_steps: int = 4, ranks: int = 2, saved_every: int = 2) -> RunSpec:
    stage, precision, *others = layout.removeprefix("zero").split("-")
    return recipe("smoke").with_settings(
        {
            "model.d_model": 32,
            "model.d_ff": 64,
            "model.num_layers": 2,
            "model.dropout_rate": 0.1,
            "objective.input_tokens": 32,
            "optimizer.num_steps": num_steps,
            "optimizer.warmup_steps": 2,
            "optimizer.global_batch_sequences": 16,
            "optimizer.precision": precision,
            "cluster.ranks": ranks,
            "layout.micro_batch_sequences": 4,
            "layout.zero_stage": int(stage),
            "layout.offload": ("all" if stage == "3" else "optimizer") if "offload" in others else "none",
            "storage.checkpoint_every_steps": saved_every,
            "storage.validate_every_steps": saved_every,
            "storage.validate_sequences": 11,  # three micro-batches: the last is short, and of two ranks one has fewer
            **_experts(others),
            **_pipeline(others),
        }
    )


def job(name: str, layout: str, settings: dict[str, Any] | None = None, ranks: int = 2, **more: Any) -> dict[str, Any]:
    spec = spec_of(layout, ranks=ranks).with_settings(settings or {})
    return {"name": name, "spec": spec.model_dump(mode="json"), **more}


def _experts(options: list[str]) -> dict[str, Any]:
    """Settings of a model with four experts and expert-parallel size N if ``epN`` is among the options; else none."""
    size = next((int(option.removeprefix("ep")) for option in options if option.startswith("ep")), None)
    if size is None:
        return {}
    # No dropout: experts that process tokens of several ranks draw other dropout masks.
    return {
        "model.version": "v1.0",
        "model.moe.num_experts": 4,
        "model.moe.top_k": 2 if "top2" in options else 1,
        "model.dropout_rate": 0.0,
        "layout.expert_parallel_size": size,
    }


def _pipeline(options: list[str]) -> dict[str, Any]:
    """Settings of a pipeline with N stages if ``ppN`` is among the options; else with one stage."""
    stages = next((int(option.removeprefix("pp")) for option in options if option.startswith("pp")), 1)
    version = {"model.version": "v1.0"} if "tied" in options else {}
    # A deep encoder that extends into the last stage, which then shares both embedding and bias with the first stage.
    encoder = {"model.num_layers": 4, "model.num_decoder_layers": 1} if "deep" in options else {}
    # Training passes have one sample, validation passes two: stages must tell each other when sizes change.
    passes = {"layout.micro_batch_sequences": 1} if stages == 4 else {}
    return {"layout.pipeline_stages": stages, **version, **encoder, **passes}


class Trained:
    def __init__(self, root: Path) -> None:
        self.root = root

    def found(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What a rank reported about the training ``name``."""
        found: dict[str, Any] = json.loads((self.root / f"{name}.rank-{rank}.json").read_text())
        return found

    def consolidated(self, name: str, out: Path) -> dict[str, int]:
        """Digests of the weights in the training's newest checkpoint, in the same form as ``found`` has its masters."""
        consolidate(self.root / name / "checkpoints", out / "weights")
        tensors = load_file(out / "weights/model.safetensors")
        return {name: digest64(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def train(
    root: Path, jobs: list[dict[str, Any]], shards: Shards, ranks: int = 2, program: str = "rank_program"
) -> Trained:
    """Have a program of this package do all jobs on these shards, in one launch of ``ranks`` ranks.

    A job without a run folder has one of its name in ``root``.
    """
    for job in jobs:
        job.setdefault("run_folder", f"{root}/{job['name']}")
        job["shards"] = str(shards.path)
        Path(job["run_folder"]).mkdir(parents=True, exist_ok=True)
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch(root / "jobs.json", ranks, program)
    return Trained(root)


def launch(jobs: Path, ranks: int = 2, program: str = "rank_program") -> None:
    run_ranks(f"tests.support.training.{program}", [str(jobs)], ranks, jobs)
