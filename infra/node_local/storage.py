"""Storage of a run whose hosts have disks of their own, as a launch asks for it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.cluster.shipping import hosts_with_code
from infra.node_local import following, ledger
from infra.node_local.claim import claim, end_claim, require_claimed
from infra.node_local.following import Follower
from infra.node_local.node_run import NodeRun
from infra.node_local.providing import provide
from infra.node_local.recovery import former_hosts, recover
from infra.node_local.telling import told_here
from infra.node_store.collect import collect
from infra.node_store.inventory import HEAD, inventory_of
from infra.node_store.ownership import Owner
from infra.node_store.staging import release
from infra.node_store.survey import survey
from infra.node_store.tags import complete_tags
from infra.stop_signal import is_stop
from t5train.atomic import write_text
from t5train.errors import HostError, NotGathered, T5TrainError
from t5train.progress import Progress
from t5train.run_files import METRICS, TENSORBOARD, WITNESS_FOLDER
from t5train.train.job import TrainJob

_AGAIN_SECONDS = (5.0, 15.0)
"""After which a host that did not answer is asked again, when all that is left is to gather what it has."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeLocalStorage:
    """Each node's own disk; the head has copies."""

    run: NodeRun
    write_job: Callable[[Path], Path]
    """Writes the job that ranks on the head would have, in the folder of an attempt."""
    progress: Progress
    adopt: bool = False
    """Whether to take the run over from another head whose lease has expired."""

    @property
    def owner(self) -> str:
        """As RunStorage has it."""
        return self.run.owner.unique_id

    def claim(self, are_ranks_at_work: bool) -> None:
        """On the hosts of the run, and on those that have left it and answer."""
        former = former_hosts(self.run)
        if self.run.nodes.code is not None:  # a launch has sent it to its own hosts alone
            former = hosts_with_code(self.run.nodes.transport, former, "a former host is not asked whose run it has")
        hosts = self.run.nodes.hosts
        required, others = ((), (*hosts, *former)) if are_ranks_at_work else (hosts, former)
        if adopted := claim(self.run, required, others, self.adopt):
            self._report(adopted)

    def _report(self, adopted: Sequence[Owner]) -> None:
        """Also record the newest checkpoint: hosts that have the rest of it may not be among those of this head."""
        found = survey(self.run.nodes, self.run.name, self.run.checkpoints)
        ledger.note_adopted(self.run.folder, found)
        tags = list(dict.fromkeys(tag.name for tag in complete_tags(found.found)))
        what = f"{', '.join(tags)} complete, goes on from {tags[0]}" if tags else "no checkpoint complete"
        _log.warning("run %s is adopted from %s: %s", self.run.folder.name, "; ".join(map(str, adopted)), what)

    def require_claimed(self) -> None:
        """Asked while ranks are at work."""
        require_claimed(self.run.folder)

    def make_ready(self, attempt_folder: Path) -> Path:
        """Recover the newest checkpoint, and bring it and the token shards to those who read them."""
        told_here(partial(recover, self.run), self.progress)
        path = self.write_job(attempt_folder)
        job = TrainJob.read(path)
        told_here(partial(provide, self.run, job), self.progress)
        write_text(path, self.run.told(job).model_dump_json(indent=1) + "\n")
        return path

    @contextmanager
    def following(self, num_saved: Callable[[], int]) -> Iterator[None]:
        """Gather what is saved meanwhile; also what ranks have saved that were told to end, as hosts may go then."""
        follower = Follower(self.run, num_saved)
        try:
            yield
        except BaseException as error:
            follower.end()
            if is_stop(error):
                self._gather_if_possible()
            raise
        follower.end()

    def _gather_if_possible(self) -> None:
        try:
            told_here(partial(following.keep_up, self.run), self.progress)
        except T5TrainError as error:
            _log.warning("what was saved last is on the hosts alone: %s", error)

    def take_home(self) -> None:
        """Gather the last checkpoint, and collect the witness and the metrics.

        From then on what was staged for the run may give way to others. Raises NotGathered if a host does not answer,
        also when it is asked again.
        """
        for seconds in _AGAIN_SECONDS:
            try:
                return self._take_home()
            except HostError as error:
                _log.warning("training is done, and its result is not gathered yet: %s", error)
            time.sleep(seconds)
        try:
            self._take_home()
        except HostError as error:
            raise self._not_gathered(error) from error

    def _not_gathered(self, error: HostError) -> NotGathered:
        held = complete_tags({HEAD: inventory_of(self.run.checkpoints)})
        lost = ", ".join(error.hosts) or "the host"
        return NotGathered(
            f"training is done, but {lost} was lost before the head had all of the result: {error}. Start the same "
            f"command again when {lost} answers: it gathers the rest, and no step is trained again. If {lost} is gone "
            f"for good, let another host take its place (--exclude, --spares): training then goes on from "
            f"{held[0].name if held else 'the beginning'}",
            error.hosts,
        )

    def _take_home(self) -> None:
        told_here(partial(following.keep_up, self.run), self.progress)
        self.require_claimed()
        names = [METRICS, TENSORBOARD, WITNESS_FOLDER]
        collect(self.run.nodes, self.run.first, self.run.place, names, self.run.folder)
        end_claim(self.run.folder)
        for host, error in release(self.run.nodes, self.run.name).items():
            if error is not None:
                _log.warning("what was staged on %s for this run stays: %s", host, error)
