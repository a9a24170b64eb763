"""Two DeepSpeed ranks, each on a host with its own disk, that train and are killed while they save."""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from infra.head.storage.checkpoint_sync import keep_up
from infra.node.compiled_operators import clear_stale_locks
from t5train.errors import T5TrainError
from t5train.files.run_folder import step_of, tag_of
from t5train.progress import silent
from t5train.spec.rank_job import TrainJob
from tests.acceptance.kills.independent_tags import files_of, find_complete_tags
from tests.acceptance.kills.kill_site import HOSTS, Site, wrong_choices
from tests.acceptance.kills.kill_tally import FoundFaults, Tally
from tests.acceptance.kills.killed_process import CONTEXT

_LONGEST_PAUSE_SECONDS = 0.1
_FINAL_CHECKPOINT_STEPS = 8
_LONGEST_SECONDS = 300.0
Saved = Mapping[str, Mapping[str, str]]
"""The sha256 of each file, by tag and name."""


class Ranks:
    """The ranks of an attempt, ready to start."""

    def __init__(self, site: Site) -> None:
        self._site, self._rendezvous_folder = site, tempfile.TemporaryDirectory()
        self._job = TrainJob.read(site.storage.make_ready(Path(self._rendezvous_folder.name)))
        keep_up(site.run, silent)
        self.complete_before = find_complete_tags(site.checkpoint_folders)
        self.step = step_of(self._job.resume_tag) if self._job.resume_tag else 0
        self._pipes = [CONTEXT.Pipe() for _ in HOSTS]
        self._processes: list[Any] = []

    def start(self) -> None:
        clear_stale_locks()  # of ranks that were killed while they compiled or loaded an operator
        for rank, (_, sender) in enumerate(self._pipes):
            job = self._site.job_of(rank, self._job).model_dump_json()
            self._processes.append(
                CONTEXT.Process(target=_train, args=(rank, job, self._rendezvous_folder.name, sender), daemon=True)
            )
            self._processes[-1].start()
            sender.close()

    def read_reports(self) -> Iterator[tuple[str, int, float]]:
        """Yield what rank 0 reports: "saving" and "saved", each with the step and the time."""
        while True:
            assert self._pipes[0][0].poll(_LONGEST_SECONDS), f"rank 0 has reported nothing for {_LONGEST_SECONDS:g} s"
            try:
                yield self._pipes[0][0].recv()
            except EOFError:
                return

    def await_saving(self, step: int) -> None:
        """Wait until the ranks begin to save a step. Raises AssertionError if they never do."""
        assert self.reports("saving", step), f"the ranks never began to save step {step}"

    def reports(self, what: str, step: int) -> bool:
        """Whether rank 0 reports this before it ends."""
        return any(each[:2] == (what, step) for each in self.read_reports())

    def kill(self, first: int, pause: float) -> None:
        """SIGKILL one rank, and the other one ``pause`` seconds later."""
        for rank, seconds in ((first, pause), (1 - first, 0.0)):
            self._processes[rank].kill()
            self._processes[rank].join()
            time.sleep(seconds)
        self._rendezvous_folder.cleanup()

    def join(self) -> None:
        """Wait until the ranks end. Raises AssertionError if one fails."""
        for process in self._processes:
            process.join()
            log = Path(self._rendezvous_folder.name) / "log"
            assert process.exitcode == 0, log.read_text("utf-8", "replace")[-4000:]
        self._rendezvous_folder.cleanup()


def train_undisturbed(site: Site) -> tuple[float, Saved]:
    """The median time of a save, in seconds, and what is saved when nobody is killed."""
    ranks, began, seconds, saved = Ranks(site), dict[int, float](), list[float](), dict[str, Mapping[str, str]]()
    ranks.start()
    for what, step, at in ranks.read_reports():
        if what == "saving":
            began[step] = at
            continue
        seconds.append(at - began[step])
        tag = tag_of(step)
        assert tag in find_complete_tags(site.checkpoint_folders)
        folders = [folder / tag for folder in site.checkpoint_folders if (folder / tag).exists()]
        saved[tag] = files_of(folders)
        for folder in folders:
            shutil.rmtree(folder)
    ranks.join()
    return statistics.median(seconds), saved


def kill_saves(site: Site, saved: Saved, tally: Tally, kills: int) -> None:
    """Kill the ranks ``kills`` times.

    Each time, they resume from the newest complete tag, save once, and are killed during the next save.
    """
    rng, ranks = random.Random(f"{tally.seed} whom, and how long before the other"), Ranks(site)
    while len(tally.moments) < kills and ranks.step + 2 < site.spec.optimizer.num_steps:
        ranks.start()
        ranks.await_saving(ranks.step + 2)
        moment = tally.draw()
        time.sleep(moment)
        ranks.kill(rng.randrange(len(HOSTS)), rng.uniform(0, _LONGEST_PAUSE_SECONDS))
        before, after = ranks.complete_before | {tag_of(ranks.step + 1)}, find_complete_tags(site.checkpoint_folders)
        found: FoundFaults = {
            "incomplete chosen": wrong_choices(site),
            "complete lost": sorted(before - after),
            "different result": different_saves(site, saved),
        }
        tally.record(moment, found, counts=not ranks.reports("saved", ranks.step + 2))
        try:
            ranks = Ranks(site)
        except T5TrainError as error:
            tally.record_faults("restarted", {"cannot resume": [str(error)]})
            return
        if tag_of(ranks.step) != max(after):
            tally.record_faults(
                "restarted", {"cannot resume": [f"expected {max(after)}, resumed from step {ranks.step}"]}
            )


def finish(site: Site) -> None:
    """Train to the end, with fewer checkpoints. What is saved then is only on the hosts."""
    spec = site.spec.with_settings({"storage.checkpoint_every_steps": _FINAL_CHECKPOINT_STEPS})
    ranks = Ranks(replace(site, spec=spec))
    ranks.start()
    for _ in ranks.read_reports():
        pass
    ranks.join()


def different_saves(site: Site, saved: Saved) -> list[str]:
    """Complete tags whose files differ from what is saved when nobody is killed."""
    complete = find_complete_tags(site.checkpoint_folders)
    return [
        tag for tag in sorted(complete) if files_of([folder / tag for folder in site.checkpoint_folders]) != saved[tag]
    ]


def _train(rank: int, job: str, rendezvous_folder: str, connection: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    log = os.open(Path(rendezvous_folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    import deepspeed
    from torch import distributed

    from t5train.checkpoint import running_save, saving
    from t5train.train import loop

    distributed.init_process_group("gloo", f"file://{rendezvous_folder}/meet", rank=rank, world_size=len(HOSTS))
    deepspeed.init_distributed("gloo")
    begin, note_saved = saving.begin, saving.note_saved

    def report(what: str, step: int) -> None:
        if rank == 0:  # nobody reads what others would report, which then wait once their pipe is full
            connection.send((what, step, time.monotonic()))

    def report_and_begin(engine: Any, job: TrainJob, step: int, *rest: Any, **options: Any) -> Callable[[], None]:
        report("saving", step)
        return begin(engine, job, step, *rest, **options)

    def note_and_report(job: TrainJob, step: int) -> None:
        note_saved(job, step)
        report("saved", step)

    with (
        mock.patch.object(saving, "begin", report_and_begin),
        mock.patch.object(running_save, "note_saved", note_and_report),
    ):
        loop.Trainer(TrainJob.model_validate_json(job)).run()
