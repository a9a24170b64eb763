"""Checkpoint sync: gathers finished checkpoints and removes old ones while ranks run, without disturbing the ranks."""

import logging
import threading
import time
from collections.abc import Callable

from infra.head.storage import checkpoint_record
from infra.head.storage.checkpoint_inventory import (
    FoundTag,
    Inventories,
    Survey,
    complete_tags,
    prunable,
    prune_on,
    survey,
    unreadable,
)
from infra.head.storage.gather import collect, gather
from infra.head.storage.node_paths import NodeRun
from infra.node.storage.file_channel import Refused
from infra.node.storage.stored_checkpoints import HEAD, inventory_of
from t5train.errors import DigestMismatch, IncompleteCheckpoint, StorageError, T5TrainError, Unreadable
from t5train.files.atomic import discard, remove_discarded
from t5train.files.os_errors import in_one_line
from t5train.files.run_folder import METRICS, METRICS_CSV, MONITORED, TENSORBOARD, is_tag, is_tag_or_removed
from t5train.progress import Interrupted, Interruptible, Progress

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 10.0
_METRICS_SECONDS = 5.0
_WAIT_SECONDS = 30.0
_METRICS_SHARE = 0.05
"""Maximum share of the time that is spent on collecting metrics."""
_COLLECTING = threading.Lock()
"""Held while metrics are collected: two collections would write to the same partial files."""
_METRICS = (METRICS, METRICS_CSV, TENSORBOARD)
_BESIDE_METRICS = tuple(name for name in MONITORED if name not in _METRICS)
"""What can be large, as profiler traces are, and is collected with each checkpoint only."""
_log = logging.getLogger(__name__)


class CheckpointSync:
    """Gathers and prunes checkpoints in one thread, and collects metrics in another. Failures are logged and retried.

    A gather may take much longer than the metrics may be old.
    """

    def __init__(self, run: NodeRun, num_saved: Callable[[], int]) -> None:
        """Start the threads. ``num_saved`` returns a number that grows when ranks have saved a part of a checkpoint."""
        self._run, self._num_saved = run, num_saved
        self._stop_requested, self._progress = threading.Event(), Interruptible()
        self._metrics_after_seconds = _METRICS_SECONDS
        self._threads = [
            threading.Thread(target=self._gather_until_stopped, name="checkpoint sync", daemon=True),
            threading.Thread(target=self._collect_until_stopped, name="metrics", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop the threads. A transfer in progress is interrupted, and can be resumed later."""
        self._progress.must_stop = True
        self._stop_requested.set()
        for thread in self._threads:
            thread.join()

    def _gather_until_stopped(self) -> None:
        seen, gather_at = 0, 0.0
        while not self._stop_requested.wait(_LOOK_SECONDS):
            if (saved := self._num_saved()) != seen and time.monotonic() >= gather_at:
                if self._try("cannot gather the newest checkpoint", lambda: keep_up(self._run, self._progress)):
                    seen = saved
                gather_at = time.monotonic() + _RETRY_SECONDS * (seen != saved)

    def _collect_until_stopped(self) -> None:
        while not self._stop_requested.wait(self._metrics_after_seconds):
            self._metrics_after_seconds = _RETRY_SECONDS
            self._try("cannot collect metrics", self._collect_metrics)

    def _collect_metrics(self) -> None:
        began = time.monotonic()
        bring_metrics(self._run)
        self._metrics_after_seconds = max(_METRICS_SECONDS, (time.monotonic() - began) / _METRICS_SHARE)

    def _try(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Interrupted:
            return False
        except Exception as error:
            _log.warning("%s, will retry: %s", what, in_one_line(error))
            return False
        return True


def keep_up(run: NodeRun, progress: Progress) -> None:
    """Gather the complete checkpoints that are to be kept, newest first; then remove old ones everywhere.

    Damaged checkpoints are skipped. If a node does not answer, raises its HostError before anything is done. If a
    checkpoint may be complete but cannot be checked now, raises Unreadable at the end.
    """
    found = survey(run.nodes, run.name, run.checkpoints)
    for error in found.silent.values():
        raise error
    passed_over = set[str]()
    for tag in _lacking(run, found):
        _log.info("gathering %s", tag.name)
        _try_to_bring_metrics(run)
        try:
            gather(run.nodes, run.name, tag, run.checkpoints, progress)
        except IncompleteCheckpoint as error:
            _log.warning("%s is not gathered: %s", tag.name, error)
            passed_over.add(tag.name)
            continue
        _bring(run, _BESIDE_METRICS)
    prune(run, found)
    _require_known(found, passed_over)


def _try_to_bring_metrics(run: NodeRun) -> None:
    """Collect the metrics until a checkpoint, which are stored with it (infra.head.storage.checkpoint_copies).

    A collection that hangs, as one from a disk that hangs does, does not keep a checkpoint from being gathered.
    """
    if not _COLLECTING.acquire(timeout=_WAIT_SECONDS):
        _log.warning("the metrics are collected later: another collection has not ended for %.0f s", _WAIT_SECONDS)
        return
    try:
        _collect_metrics(run)
    except T5TrainError as error:
        _log.info("the metrics are collected later: %s", error)
    finally:
        _COLLECTING.release()


def _require_known(found: Survey, passed_over: set[str]) -> None:
    """Raise Unreadable for a tag that may be complete, if it was passed over or is newer than all complete ones."""
    complete = complete_tags(found.found)
    for name, why in unreadable(found.found).items():
        if is_tag(name) and (name in passed_over or not complete or name > complete[0].name):
            raise Unreadable(f"{name} may be complete, but cannot be gathered now: {why}")


def _lacking(run: NodeRun, found: Survey) -> list[FoundTag]:
    """Complete checkpoints that the head should have but lacks. Records the newest complete one."""
    complete = complete_tags(found.found)
    if complete:
        checkpoint_record.note(run.folder, complete[0])
    held = {tag.name for tag in complete_tags({HEAD: found.found[HEAD]})}
    return [tag for tag in complete if tag.name not in held.union(_prunable(run, found.found))]


def _prunable(run: NodeRun, found: Inventories) -> list[str]:
    return prunable(found, run.keep.keep_last, run.keep.keep_every_steps, run.keep.checkpoint_bytes)


def bring_metrics(run: NodeRun) -> None:
    """Collect the metrics that rank 0 has written, as far as they are small enough to be read every few seconds."""
    with _COLLECTING:
        _collect_metrics(run)


def _collect_metrics(run: NodeRun) -> None:
    collect(run.nodes, run.first, run.relative_path, _METRICS, run.folder)


def bring_monitored(run: NodeRun) -> None:
    """Collect all that rank 0 writes for people to watch. What is replaced meanwhile is left for the next time."""
    with _COLLECTING:
        _bring(run, MONITORED)


def _bring(run: NodeRun, names: tuple[str, ...]) -> None:
    try:
        collect(run.nodes, run.first, run.relative_path, names, run.folder)
    except (DigestMismatch, Refused) as error:
        _log.info("the rest is collected, and this later: %s", error)


def prune(run: NodeRun, found: Survey) -> None:
    """Remove checkpoints that are not to be kept from nodes and head, and leftovers of interrupted removals.

    Checkpoints that are newer than the newest gathered one are not touched. One whose best checkpoint is not gathered
    does not count, because training cannot resume from it alone.
    """
    gathered = complete_tags({HEAD: inventory_of(run.checkpoints)})
    steps = {None, *(tag.step for tag in gathered)}
    newest = next((tag.name for tag in gathered if tag.sidecars[0].best_step in steps), None)
    if newest is None:
        return
    old = {
        place: {tag: copy for tag, copy in inventory.items() if is_tag_or_removed(tag) and tag <= newest}
        for place, inventory in {**found.found, HEAD: inventory_of(run.checkpoints)}.items()
    }
    tags = _prunable(run, old)
    for host, error in prune_on(run.nodes, run.name, tags).items():
        if error is not None:
            _log.warning("%s keeps old checkpoints (%s) for now: %s", host, ", ".join(tags), error)
    try:
        for tag in tags:
            discard(run.checkpoints / tag)
        remove_discarded(run.checkpoints)
    except StorageError as error:
        _log.warning("the head keeps old checkpoints for now: %s", error)
