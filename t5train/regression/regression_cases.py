"""The cases of the regression, as data: small settings on top of recipes.

All cases train the same text with the same seed on CPU ranks, except the one on a hostfile. Cases with the same
``same_model`` must train the same model: their loss curves agree within ``AGREEMENT``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from t5train.errors import RegressionUsage
from t5train.spec import RunSpec, nearest
from t5train.spec.recipes import recipe

STEPS = 60
RESUMED_STEP = 30
"""The step whose checkpoint the resumed run starts from."""
AGREEMENT = 2e-6
"""Largest relative difference of a loss between two layouts of a model: ten times that in docs/evidence/layouts.md."""
HOSTFILE_CASE = "hosts"
_BATCH = 32
CaseName = Literal["smoke", "moe", "zero2", "zero3", "pipeline", "hosts"]
"""The names of all cases, written out so that Prefect's form for a run offers them."""

_SMALL: Mapping[str, Any] = {
    "tokenizer.vocab_size": 500,
    "shards.shard_tokens": 100_000,
    "objective.input_tokens": 64,
    "model.preset": "smoke",
    "model.compile": False,
    "model.d_model": 32,
    "model.d_kv": 16,
    "model.num_heads": 2,
    "model.d_ff": 64,
    "optimizer.num_steps": STEPS,
    "optimizer.warmup_steps": 10,
    "optimizer.peak_learning_rate": 0.02,
    "optimizer.global_batch_sequences": _BATCH,
    "optimizer.precision": "fp32",
    "layout.offload": "none",
    "layout.pin_memory": False,
    "layout.micro_batch_sequences": 16,
    "storage.checkpoint_every_steps": RESUMED_STEP,
    "storage.validate_every_steps": 20,
    "storage.validate_sequences": 64,
    "cluster.ranks": 2,
    "cluster.accelerator": "cpu",
}


@dataclass(frozen=True)
class RegressionCase:
    """One case: a recipe and the settings that it changes, besides those that make it small."""

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 3
    """How often it is trained and its times are measured in a night."""
    same_model: str | None = None
    """Cases with the same name here train the same model."""

    def spec(self, root: Path, run_name: str) -> RunSpec:
        """Return the spec of a run of this case. Raises SpecError if a recipe has become invalid with the settings."""
        places = {"storage.root": json.dumps(str(root)), "name": json.dumps(run_name)}
        return recipe(self.recipe).with_settings({**_SMALL, **self.settings, **places})


CASES = (
    RegressionCase("smoke", "smoke", {"layout.zero_stage": 1}, same_model="dense"),
    # The only case with dropout: of the other layouts, each would draw other masks.
    RegressionCase(
        "moe",
        "moe",
        {
            "layout.zero_stage": 2,
            "layout.expert_parallel_size": 2,
            "model.moe.num_experts": 4,
            "model.dropout_rate": 0.1,
        },
    ),
    RegressionCase("zero2", "smoke", {"layout.zero_stage": 2}, repeats=2, same_model="dense"),
    RegressionCase("zero3", "smoke", {"layout.zero_stage": 3}, repeats=2, same_model="dense"),
    RegressionCase(
        "pipeline",
        "pipeline",
        {"optimizer.final_learning_rate": 0.001, "layout.pipeline_stages": 2},
        repeats=2,
        same_model="dense",
    ),
)


def chosen_cases(names: Sequence[str] | None, hostfile: Path | None = None, num_slots: int = 0) -> list[RegressionCase]:
    """Return the cases called ``names``, or all, and one more on the hosts of ``hostfile``, if that is given.

    ``num_slots`` is the number of slots of that file. Raises RegressionUsage for an unknown name, and for the case on
    hosts without a hostfile.
    """
    known = [*(case.name for case in CASES), HOSTFILE_CASE]
    for name in names or ():
        if name not in known:
            raise RegressionUsage(f"unknown case {name!r}{nearest(name, known)}; choose from {', '.join(known)}")
    if hostfile is None and HOSTFILE_CASE in (names or ()):
        raise RegressionUsage(f"the case {HOSTFILE_CASE!r} needs a hostfile: give one, or leave the case out")
    chosen = [case for case in CASES if names is None or case.name in names]
    return chosen if hostfile is None else [*chosen, _on_hosts(hostfile, num_slots)]


def _on_hosts(hostfile: Path, num_slots: int) -> RegressionCase:
    """Return the case smoke on hosts with node-local storage: two sequences for each rank and pass.

    It uses the accelerators of the hosts. If they have none, whoever runs the case sets ``cluster.accelerator``.
    """
    settings = {
        "cluster.hostfile": json.dumps(str(hostfile)),
        "cluster.ranks": num_slots,
        "cluster.ship_code": True,
        "cluster.accelerator": None,
        "storage.node_local": True,
        "layout.zero_stage": 1,
        "layout.micro_batch_sequences": 2,
        "optimizer.global_batch_sequences": 2 * num_slots,
    }
    return RegressionCase(HOSTFILE_CASE, "smoke", settings, repeats=2)
