"""The storage of a run during a launch over hosts: a root that all hosts share, or each host's own disk."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from infra.head.hosts.code_shipping import hosts_with_code
from infra.head.stop_signal import is_stop
from infra.head.storage import checkpoint_record, checkpoint_sync
from infra.head.storage.checkpoint_inventory import complete_tags, survey
from infra.head.storage.checkpoint_sync import CheckpointSync
from infra.head.storage.claim import Claim
from infra.head.storage.gather import collect
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.provisioning import provide, release
from infra.head.storage.recovery import former_hosts, recover
from infra.head.storage.staged_bytes import StagedBytes
from infra.node.attempts.run_ownership import Owner
from infra.node.storage.stored_checkpoints import HEAD, inventory_of
from t5train.errors import HostError, NotGathered, T5TrainError
from t5train.files.atomic import write_text
from t5train.files.run_folder import MONITORED, WITNESS_FOLDER
from t5train.progress import Progress, relayed
from t5train.spec.rank_job import TrainJob


class RunStorage(Protocol):
    """Where the files of a run are while its ranks are running."""

    @property
    def owner(self) -> str | None:
        """Unique id of the run that owns the files on the hosts' own disks; None if hosts have no such files."""
        ...

    def claim(self, are_ranks_running: bool) -> None:
        """Claim the run's files on its hosts for this head. Raises RunOwned if another head owns them.

        If ranks are already running, hosts that do not answer are tolerated.
        """
        ...

    def make_ready(self, attempt_folder: Path) -> Path:
        """Put the files that ranks begin from where ranks read them; returns their job's file, in this folder."""
        ...

    def syncing(self, num_saved: Callable[[], int]) -> AbstractContextManager[None] | None:
        """Return a context in which ranks run; None if nothing has to be copied while they do.

        ``num_saved`` returns how many sidecars hosts have reported.
        """
        ...

    def take_home(self) -> None:
        """Collect the results of finished ranks on the head."""
        ...


@dataclass(frozen=True)
class SharedStorage:
    """A root that all hosts share."""

    write_job: Callable[[Path], Path]

    @property
    def owner(self) -> None:
        """None, because hosts have no files of their own."""

    def claim(self, are_ranks_running: bool) -> None:
        """Does nothing: the lock of the run's folder is enough."""

    def make_ready(self, attempt_folder: Path) -> Path:
        """Only write the job: no files have to be copied."""
        return self.write_job(attempt_folder)

    def syncing(self, num_saved: Callable[[], int]) -> None:
        """None: ranks save to the root itself."""

    def take_home(self) -> None:
        """Does nothing."""


_AGAIN_SECONDS = (5.0, 15.0)
"""Delays between attempts to collect the results of finished ranks from a host that does not answer."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeLocalStorage:
    """Each node's own disk, with copies on the head."""

    run: NodeRun
    write_job: Callable[[Path], Path]
    """Writes the job, with the head's paths, to the folder of an attempt; returns the file."""
    progress: Progress
    host_claim: Claim
    """The claim of the HeldRun, which is also renewed between two attempts."""
    adopt: bool = False
    """Whether to take over the run from another head whose lease has expired."""
    staged: StagedBytes = field(default_factory=StagedBytes)
    """Gets the bytes that each host needs before ranks start."""

    @property
    def owner(self) -> str:
        """See RunStorage."""
        return self.run.owner.unique_id

    def claim(self, are_ranks_running: bool) -> None:
        """Claim the run on its hosts, and on former hosts that answer."""
        former = former_hosts(self.run)
        if self.run.nodes.code is not None:  # the launch has shipped the code only to its own hosts
            former = hosts_with_code(
                self.run.nodes.transport, former, "cannot ask a former host which head owns the run"
            )
        hosts = self.run.nodes.hosts
        required, others = ((), (*hosts, *former)) if are_ranks_running else (hosts, former)
        if adopted := self.host_claim.take(self.run, required, others, self.adopt):
            self._report(adopted)

    def _report(self, adopted: Sequence[Owner]) -> None:
        """Log the adoption, and record the newest checkpoint. Hosts unknown to this head may have parts of it."""
        found = survey(self.run.nodes, self.run.name, self.run.checkpoints)
        checkpoint_record.note_adopted(self.run.folder, found)
        tags = list(dict.fromkeys(tag.name for tag in complete_tags(found.found)))
        what = f"{', '.join(tags)} complete, resuming from {tags[0]}" if tags else "no checkpoint is complete"
        _log.warning("run %s was adopted from %s: %s", self.run.folder.name, "; ".join(map(str, adopted)), what)

    def make_ready(self, attempt_folder: Path) -> Path:
        """Recover the newest checkpoint, and copy the files that ranks begin from to their nodes."""
        relayed(partial(recover, self.run), self.progress, "gathering the checkpoint to resume from")
        path = self.write_job(attempt_folder)
        job = TrainJob.read(path)
        relayed(partial(provide, self.run, job, staged=self.staged), self.progress, "copying files to the hosts")
        write_text(path, self.run.job_on_nodes(job).model_dump_json(indent=1) + "\n")
        return path

    @contextmanager
    def syncing(self, num_saved: Callable[[], int]) -> Iterator[None]:
        """Gather checkpoints as they are saved; after SIGTERM or Ctrl-C the last ones, too: hosts may go down then."""
        sync = CheckpointSync(self.run, num_saved)
        try:
            yield
        except BaseException as error:
            sync.end()
            if is_stop(error):
                self._gather_if_possible()
            raise
        sync.end()

    def _gather_if_possible(self) -> None:
        try:
            relayed(partial(checkpoint_sync.keep_up, self.run), self.progress, "gathering the last checkpoint")
        except T5TrainError as error:
            _log.warning("the last checkpoint was not gathered, and is only on the hosts: %s", error)
        try:
            checkpoint_sync.bring_monitored(self.run)  # rank 0 writes traces after its last checkpoint
        except T5TrainError as error:
            _log.warning("the last metrics and traces are only on %s: %s", self.run.first, error)

    def take_home(self) -> None:
        """Gather the last checkpoint, and collect the witness and the metrics.

        After that, nodes may remove what was staged for the run to free space. Raises NotGathered if a host still does
        not answer after several tries.
        """
        for seconds in _AGAIN_SECONDS:
            try:
                return self._take_home()
            except HostError as error:
                _log.warning("training is done, but its result is not gathered yet, will retry: %s", error)
            time.sleep(seconds)
        try:
            self._take_home()
        except HostError as error:
            raise self._not_gathered(error) from error

    def _not_gathered(self, error: HostError) -> NotGathered:
        held = complete_tags({HEAD: inventory_of(self.run.checkpoints)})
        lost = ", ".join(error.hosts) or "the host"
        return NotGathered(
            f"training is done, but {lost} was lost before the head had the whole result: {error}. Start the same "
            f"command again when {lost} answers: the rest is then gathered, and no step is trained again. If {lost} is "
            f"gone for good, replace that host (--exclude, --spares): training then resumes from "
            f"{held[0].name if held else 'the beginning'}",
            error.hosts,
        )

    def _take_home(self) -> None:
        relayed(partial(checkpoint_sync.keep_up, self.run), self.progress, "gathering the last checkpoint")
        self.host_claim.require_kept()
        names = [*MONITORED, WITNESS_FOLDER]
        collect(self.run.nodes, self.run.first, self.run.relative_path, names, self.run.folder)
        self.host_claim.release()
        for host, error in release(self.run.nodes, self.run.name).items():
            if error is not None:
                _log.warning("files staged on %s for this run are not released: %s", host, error)
