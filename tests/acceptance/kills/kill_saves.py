"""Two DeepSpeed ranks, each on a host with its own disk, that train and are killed while they save."""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from infra.head.storage.checkpoint_sync import keep_up
from t5train.errors import T5TrainError
from t5train.files.run_folder import step_of, tag_of
from t5train.progress import silent
from t5train.spec.rank_job import TrainJob
from tests.acceptance.kills.independent_tags import files_of, whole_tags
from tests.acceptance.kills.kill_site import HOSTS, Site, wrongly_chosen
from tests.acceptance.kills.kill_tally import Found, Tally
from tests.acceptance.kills.killed_process import CONTEXT

_BETWEEN_SECONDS = 0.1
_FEW_STEPS = 8
_LONGEST_SECONDS = 300.0
Saved = Mapping[str, Mapping[str, str]]
"""The sha256 of each file, by tag and name."""


class Ranks:
    """The ranks of an attempt, ready to start."""

    def __init__(self, site: Site) -> None:
        self._site, self._meeting = site, tempfile.TemporaryDirectory()
        self._told = TrainJob.read(site.storage.make_ready(Path(self._meeting.name)))
        keep_up(site.run, silent)
        self.whole_before = whole_tags(site.places)
        self.step = step_of(self._told.resume_tag) if self._told.resume_tag else 0
        self._pipes = [CONTEXT.Pipe() for _ in HOSTS]
        self._processes: list[Any] = []

    def begin(self) -> None:
        """Start each rank in its own process."""
        for rank, (_, theirs) in enumerate(self._pipes):
            job = self._site.job_of(rank, self._told).model_dump_json()
            self._processes.append(
                CONTEXT.Process(target=_train, args=(rank, job, self._meeting.name, theirs), daemon=True)
            )
            self._processes[-1].start()
            theirs.close()

    def reply(self) -> Iterator[tuple[str, int, float]]:
        """Yield what rank 0 reports: "saving" and "saved", each with the step and the time."""
        while True:
            assert self._pipes[0][0].poll(_LONGEST_SECONDS), "ranks hang"
            try:
                yield self._pipes[0][0].recv()
            except EOFError:
                return

    def await_saving(self, step: int) -> None:
        """Wait until the ranks begin to save a step. Raises AssertionError if they never do."""
        assert self.tell_of("saving", step), f"step {step} is never saved"

    def tell_of(self, what: str, step: int) -> bool:
        """Whether rank 0 reports this before it ends."""
        return any(each[:2] == (what, step) for each in self.reply())

    def kill(self, first: int, pause: float) -> None:
        """SIGKILL one rank, and the other one ``pause`` seconds later."""
        for rank, seconds in ((first, pause), (1 - first, 0.0)):
            self._processes[rank].kill()
            self._processes[rank].join()
            time.sleep(seconds)
        self._meeting.cleanup()

    def join(self) -> None:
        """Wait until the ranks end. Raises AssertionError if one fails."""
        for process in self._processes:
            process.join()
            assert process.exitcode == 0, (Path(self._meeting.name) / "log").read_text("utf-8", "replace")[-4000:]
        self._meeting.cleanup()


def undisturbed(site: Site) -> tuple[float, Saved]:
    """The median time of a save, in seconds, and what is saved when nobody is killed."""
    ranks, began, seconds, saved = Ranks(site), dict[int, float](), list[float](), dict[str, Mapping[str, str]]()
    ranks.begin()
    for what, step, at in ranks.reply():
        if what == "saving":
            began[step] = at
            continue
        seconds.append(at - began[step])
        tag = tag_of(step)
        assert tag in whole_tags(site.places)
        folders = [place / tag for place in site.places if (place / tag).exists()]
        saved[tag] = files_of(folders)
        for folder in folders:
            shutil.rmtree(folder)
    ranks.join()
    return statistics.median(seconds), saved


def kill_saves(site: Site, saved: Saved, tally: Tally, kills: int) -> None:
    """Kill the ranks ``kills`` times.

    Each time, they resume from the newest complete tag, save once, and are killed during the next save.
    """
    chance, ranks = random.Random(f"{tally.seed} whom, and how long before the other"), Ranks(site)
    while len(tally.moments) < kills and ranks.step + 2 < site.spec.optimizer.num_steps:
        ranks.begin()
        ranks.await_saving(ranks.step + 2)
        moment = tally.draw()
        time.sleep(moment)
        ranks.kill(chance.randrange(len(HOSTS)), chance.uniform(0, _BETWEEN_SECONDS))
        before, after = ranks.whole_before | {tag_of(ranks.step + 1)}, whole_tags(site.places)
        found: Found = {
            "incomplete chosen": wrongly_chosen(site),
            "complete lost": sorted(before - after),
            "ended otherwise": otherwise_saved(site, saved),
        }
        tally.note(moment, found, counts=not ranks.tell_of("saved", ranks.step + 2))
        try:
            ranks = Ranks(site)
        except T5TrainError as error:
            tally.note_faults("started again", {"cannot go on": [str(error)]})
            return
        if tag_of(ranks.step) != max(after):
            tally.note_faults("started again", {"cannot go on": [f"from {max(after)}, but from {ranks.step}"]})


def finish(site: Site) -> None:
    """Train to the end, with fewer checkpoints. What is saved then is only on the hosts."""
    spec = site.spec.with_settings({"storage.checkpoint_every_steps": _FEW_STEPS})
    ranks = Ranks(replace(site, spec=spec))
    ranks.begin()
    for _ in ranks.reply():
        pass
    ranks.join()


def otherwise_saved(site: Site, saved: Saved) -> list[str]:
    """Whole tags whose files differ from what is saved when nobody is killed."""
    whole = whole_tags(site.places)
    return [tag for tag in sorted(whole) if files_of([place / tag for place in site.places]) != saved[tag]]


def _train(rank: int, job: str, meeting: str, told: Connection) -> None:
    """Train as one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    log = os.open(Path(meeting) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    import deepspeed
    from torch import distributed

    from t5train.checkpoint import saving
    from t5train.train import loop

    distributed.init_process_group("gloo", f"file://{meeting}/meet", rank=rank, world_size=len(HOSTS))
    deepspeed.init_distributed("gloo")
    save = saving.save

    def reportable(engine: Any, job: TrainJob, step: int, *rest: Any) -> str:
        told.send(("saving", step, time.monotonic()))
        tag = save(engine, job, step, *rest)
        told.send(("saved", step, time.monotonic()))
        return tag

    with mock.patch.object(saving, "save", reportable):
        loop.Trainer(TrainJob.model_validate_json(job)).run()
