"""A real run on two hosts, which are folders of this machine and act as separate disks.

The killed stages work on it.
"""

import os
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from infra.head.hosts.agents import Agents
from infra.head.hosts.hostfile import Host, Hosts
from infra.head.storage.checkpoint_inventory import complete_tags, survey
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.run_storage import NodeLocalStorage
from infra.node import node_folders
from t5train.checkpoint.resume import run_fingerprint, write_job
from t5train.checkpoint.resume_point import newest_verified_tag
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.files.run_folder import CHECKPOINTS
from t5train.model.model_shape import huggingface_config, resolve
from t5train.progress import silent
from t5train.records.stage_records import TokenizerFiles
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards, TrainJob
from t5train.spec.recipes import recipe
from tests.acceptance.kills.independent_tags import find_complete_tags
from tests.support.generated_text import make_shards
from tests.support.simulated_nodes import LocalHosts

HOSTS = ("a", "b")
RECIPES = {
    "smoke": {
        "tokenizer.vocab_size": 500,
        "model.d_model": 128,
        "model.d_ff": 256,
        "objective.input_tokens": 32,
    },
    "reverse_and_sort": {"evaluate.best_metric": "validation_token_accuracy", "storage.validate_every_steps": 3},
}
"""The recipes of runs that are killed, and settings of each. On pairs, the best checkpoint is kept and published."""
ADAPTERS = {"optimizer.kind": "adamw", "finetune.lora.rank": 4, "finetune.lora.dropout": 0.1}
"""Settings with which a run on pairs trains adapters of a random model."""
SETTINGS = {
    "name": "killed",
    "model.dropout_rate": 0.1,
    "optimizer.warmup_steps": 2,
    "optimizer.peak_learning_rate": 0.005,
    "optimizer.global_batch_sequences": 8,
    "layout.micro_batch_sequences": 4,
    "storage.checkpoint_every_steps": 1,
    "storage.keep_last": 2,
    "storage.validate_every_steps": 1000,
    "storage.validate_sequences": 8,
}


@dataclass(frozen=True)
class Site:
    """Head and hosts. The root lies in the same folder as the hosts."""

    folder: Path
    spec: RunSpec
    shards: Shards

    @cached_property
    def transport(self) -> LocalHosts:
        hosts = self.folder / "hosts"
        hosts.mkdir(parents=True, exist_ok=True)
        return LocalHosts(hosts)

    def scratch(self, host: str) -> Path:
        return self.folder / "hosts" / host / f"t5-pretrain-{os.getuid()}" / "scratch"

    @cached_property
    def run(self) -> NodeRun:
        """The run, as a launch over hosts makes it."""
        hosts = Hosts(tuple(Host(name, (0,)) for name in HOSTS))
        return NodeRun.of(self.spec, run_fingerprint(self.spec, self.shards), "0" * 32, hosts, self.transport, {})

    @property
    def storage(self) -> NodeLocalStorage:
        """Prepares hosts for an attempt, and gathers what a run leaves there."""
        return NodeLocalStorage(self.run, partial(write_job, self.spec, self.shards), silent, Claim(Agents()))

    @property
    def checkpoints(self) -> Path:
        return self.run.checkpoints

    @property
    def checkpoint_folders(self) -> list[Path]:
        """All folders with checkpoints of the run: the gathered copy, and each host's."""
        on_hosts = [self.scratch(host) / self.run.relative_path / CHECKPOINTS for host in HOSTS]
        return [self.checkpoints, *on_hosts]

    def job_of(self, rank: int, job: TrainJob) -> TrainJob:
        """The job of a rank, with the paths of its host's folder."""
        scratch = self.scratch(HOSTS[rank])
        default = node_folders.node_path("scratch")
        folders = {name: scratch / getattr(job, name).relative_to(default) for name in ("run_folder", "shards_folder")}
        start = {}
        if (model := job.begins_from) is not None:
            start["model.start_from"] = str(scratch / model.folder.relative_to(default))
        return job.model_copy(update={**folders, "spec": job.spec.with_settings(start)})

    def in_folder(self, folder: Path) -> "Site":
        return Site(folder, self.spec.with_settings({"storage.root": str(folder / "root")}), self.shards)


def chosen_by_launch(site: Site) -> str | None:
    """The newest complete tag on hosts and head, as a launch would choose it before it gathers."""
    found = complete_tags(survey(site.run.nodes, site.run.name, site.checkpoints).found)
    return found[0].name if found else None


def wrong_choices(site: Site) -> list[str]:
    """Wrong choices, by hosts and head together or by the head alone: any tag that is not the newest complete one."""
    wrong = []
    choices = {"hosts and head": (chosen_by_launch(site), site.checkpoint_folders)}
    choices["the head"] = (newest_verified_tag(site.spec.run_folder, silent), [site.checkpoints])
    for where, (chosen, checkpoint_folders) in choices.items():
        newest = max(find_complete_tags(checkpoint_folders), default=None)
        if chosen != newest:
            wrong.append(f"on {where}, {chosen} was chosen, but the newest complete tag is {newest}")
    return wrong


def make_site(folder: Path, recipe_name: str, num_steps: int, *, lora: bool) -> tuple[Site, TokenizerFiles]:
    """A run of one of RECIPES that has not begun, with shards of Python's documentation or of pairs, and vocabulary.

    With ``lora``, it is a run on pairs that trains adapters.
    """
    root = folder / "root"
    settings = SETTINGS | RECIPES[recipe_name] | {"storage.root": str(root), "optimizer.num_steps": num_steps}
    spec = recipe(recipe_name).with_settings(settings)
    tokenizer, shards = _make_pair_shards(spec, root) if spec.is_fine_tuning else make_shards(spec, root)
    if lora:
        start = _save_random_model(folder / "start", spec, int(tokenizer.counts["vocab_size"]))
        spec = spec.with_settings(ADAPTERS | {"model.start_from": str(start)})
    return Site(folder, spec, shards), tokenizer


def _save_random_model(folder: Path, spec: RunSpec, vocab_size: int) -> Path:
    config = huggingface_config(resolve(spec.model, vocab_size), pad_id=0, eos_id=1)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    return folder


def _make_pair_shards(spec: RunSpec, root: Path) -> tuple[TokenizerFiles, Shards]:
    pairs = build_pairs(spec.pairs, root)
    tokenizer = build_pairs_tokenizer(spec.tokenizer, pairs, root)
    return tokenizer, build_pair_shards(spec.pairs, pairs, tokenizer, root)
