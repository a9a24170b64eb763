"""A real run of one rank: made once, and small enough to be copied thousands of times."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

from infra.node.attempts import shared_memory
from t5train.files.presence import visible_in
from t5train.files.run_folder import CHECKPOINTS, tag_of
from t5train.records.stage_records import TokenizerFiles, TokenShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from tests.support.generated_text import make_shards

NAME = "small"
ADDRESS = "io-faults"
"""The rendezvous of the only rank. No program listens there; DeepSpeed names its shared memory after it."""
STEPS = (2, 4, 6)
"""The steps whose checkpoints are saved."""
UNFINISHED = 8
"""The step of a save that was killed."""
_SETTINGS = {
    "name": NAME,
    "tokenizer.vocab_size": 400,
    "model.d_model": 16,
    "model.d_kv": 4,
    "model.d_ff": 32,
    "model.num_heads": 2,
    "model.num_layers": 1,
    "objective.input_tokens": 32,
    "optimizer.num_steps": STEPS[-1],
    "optimizer.warmup_steps": 2,
    "optimizer.global_batch_sequences": 4,
    "layout.micro_batch_sequences": 4,
    "cluster.ranks": 1,
    "storage.checkpoint_every_steps": 2,
    "storage.keep_last": 3,
    "storage.validate_every_steps": 1000,
    "storage.validate_sequences": 4,
}


class SmallRun:
    """The run, below ``folder / "root"``."""

    def __init__(self, folder: Path) -> None:
        from t5train.spec.recipes import recipe

        self.root = folder / "root"
        self.spec: RunSpec = recipe("smoke").with_settings({**_SETTINGS, "storage.root": str(self.root)})

    @property
    def folder(self) -> Path:
        return self.spec.run_folder

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def shards(self) -> TokenShards:
        return TokenShards.load(self._only(self.root / "shards"))

    @property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles.load(self._only(self.root / "tokenizer"))

    @staticmethod
    def _only(folder: Path) -> Path:
        (found,) = visible_in(folder)
        return found

    def tag(self, step: int) -> Path:
        return self.checkpoints / tag_of(step)

    def job(self, resume_step: int | None = None) -> TrainJob:
        from t5train.checkpoint.resume import run_fingerprint

        shards = self.shards
        return TrainJob(
            spec=self.spec,
            run_fingerprint=run_fingerprint(self.spec, shards),
            run_folder=self.folder,
            shards_folder=shards.path,
            resume_tag=None if resume_step is None else tag_of(resume_step),
        )

    def make(self) -> None:
        """Make corpus, vocabulary and token shards, and train to the end."""
        from t5train.checkpoint.resume import conclude, open_run
        from t5train.train.loop import Trainer

        self.root.mkdir(parents=True)
        text = self.root.with_name("words.txt")
        write_text(text)
        spec = self.spec.with_settings({"corpus.source": str(text)})
        _, shards = make_shards(spec, self.root)
        open_run(spec, shards)
        become_only_rank()
        Trainer(self.job()).run()
        conclude(spec, shards)

    def leave_unfinished(self) -> None:
        """Leave what a save of ``UNFINISHED`` leaves if it is killed before it writes the sidecar."""
        shutil.copytree(self.tag(STEPS[-1]), self.tag(UNFINISHED))
        (self.tag(UNFINISHED) / "rank-00000.json").unlink()

    def copy_to(self, folder: Path, *, without: tuple[str, ...] = ()) -> "SmallRun":
        """Copy the run to another folder, without its corpus and the files that match ``without``."""
        names = shutil.ignore_patterns("corpus", *without)
        shutil.copytree(self.root, folder / "root", ignore=names)
        return SmallRun(folder)


def write_text(path: Path) -> None:
    """Write random text of few different words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(500)]
    path.write_text("".join(" ".join(rng.choices(words, k=30)) + "\n\n" for _ in range(600)), "utf-8")


def become_only_rank() -> None:
    """Become the only rank, with torch's fake backend for tests: its collectives copy, and need no thread."""
    import deepspeed
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    # DeepSpeed names its shared memory after these, and never removes it.
    os.environ |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(os.getpid())}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    deepspeed.init_distributed("fake")
    shared_memory.remove_of_rank()


def train_one_step(job: TrainJob) -> Any:
    """A rank's trainer after its first step, which gives it weights, masters and moments to save."""
    from t5train.data.samples.loader import Prefetched
    from t5train.train.loop import Trainer, micro_batches

    trainer = Trainer(job)
    with Prefetched(micro_batches(trainer.dataset.train, trainer.spec, 0), 1) as batches:
        trainer._take_step(batches)
    return trainer
