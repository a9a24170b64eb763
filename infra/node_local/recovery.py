"""Before ranks start: the newest complete checkpoint, wherever its parts are, is had on the head, verified."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.attempts import attempt
from infra.cluster.shipping import ship
from infra.node_local import ledger
from infra.node_local.node_run import NodeRun
from infra.node_store.collect import collect
from infra.node_store.gather import gather
from infra.node_store.nodes import Nodes
from infra.node_store.survey import Survey, survey
from infra.node_store.tags import complete_tags, shortcomings
from t5train.errors import IncompleteCheckpoint
from t5train.progress import Progress
from t5train.run_files import ATTEMPTS, METRICS
from t5train.train import metrics

_FORMER_ATTEMPTS = 3
_log = logging.getLogger(__name__)


def recover(run: NodeRun, progress: Progress) -> None:
    """Have the gathered copy hold the newest checkpoint that is complete anywhere; none where none ever was.

    Asked are also hosts that had something of it and are not among the run's any more. Raises IncompleteCheckpoint
    where checkpoints were complete and are no more, and HostError when a host of the run does not answer.
    """
    former = [host for host in dict.fromkeys(_former(run.folder)) if host not in run.nodes.hosts]
    if run.nodes.code is not None:  # a launch has sent it to its own hosts alone
        ship(run.nodes.transport, former)
    nodes = replace(run.nodes, hosts=(*run.nodes.hosts, *former))
    found = _survey(run, nodes)
    damaged = []
    for tag in complete_tags(found.found):
        try:
            gather(nodes, run.name, tag, run.checkpoints, progress)
        except IncompleteCheckpoint as error:
            _log.warning("%s is passed over: %s", tag.name, error)
            damaged.append(f"{tag.name}: {error}")
            continue
        ledger.note(run.folder, tag)
        _collect_metrics(run)
        return
    if (lost := ledger.nothing_complete(run.folder, found, damaged)) is not None:
        raise lost


def _survey(run: NodeRun, nodes: Nodes) -> Survey:
    found = survey(nodes, run.name, run.checkpoints)
    for host, error in found.silent.items():
        if host in run.nodes.hosts:
            raise error
        _log.warning("%s, which has trained this run before, is not asked for checkpoints: %s", host, error)
    for name, why in shortcomings(found.found).items():
        _log.warning("%s is passed over: %s", name, why)
    return found


def _former(run_folder: Path) -> Iterator[str]:
    """Hosts that may have parts of checkpoints."""
    if (seen := ledger.last_seen(run_folder)) is not None:
        yield from sorted(seen.hosts)
    for path in sorted((run_folder / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}"))[-_FORMER_ATTEMPTS:]:
        yield from attempt.read(path.parent).hosts or ()


def _collect_metrics(run: NodeRun) -> None:
    """Steps that the head has not heard of; a node that is new has none, and one that is back has old ones."""
    with TemporaryDirectory(prefix=".metrics-", dir=run.folder) as folder:
        collect(run.nodes, run.first, run.place, [METRICS], Path(folder))
        theirs, ours = Path(folder, METRICS), run.folder / METRICS
        if len(metrics.read(theirs)) > len(metrics.read(ours)):
            theirs.replace(ours)
