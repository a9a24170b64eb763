"""Gathers the newest complete checkpoint to the head before ranks start, wherever its parts are, and verifies it."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.head.hosts.code_shipping import hosts_with_code
from infra.head.hosts.nodes import Nodes
from infra.head.storage import checkpoint_record
from infra.head.storage.checkpoint_inventory import (
    FoundTag,
    Survey,
    complete_tags,
    finished_once,
    missing_parts,
    move_aside_on,
    require_listed,
    survey,
    unreadable,
)
from infra.head.storage.gather import collect, gather
from infra.head.storage.node_paths import NodeRun
from infra.node.attempts import attempt
from t5train.checkpoint.resume_point import is_asked_to_begin_again, last_complete
from t5train.errors import HostError, IncompleteCheckpoint, Unreadable
from t5train.files.atomic import set_aside
from t5train.files.run_folder import ATTEMPTS, METRICS, SET_ASIDE, WANDB_SENT, is_tag, tag_of
from t5train.progress import Progress
from t5train.records import metrics

_FORMER_ATTEMPTS = 3
_log = logging.getLogger(__name__)


def recover(run: NodeRun, progress: Progress) -> None:
    """Gather the newest checkpoint that is complete anywhere; does nothing if none ever was.

    Hosts that had parts of it and are no longer part of the run are asked, too. Newer checkpoints that are damaged are
    set aside everywhere. If the user asked to begin again, all checkpoints are set aside instead. On hosts that do not
    answer, this is done as soon as they do.

    Raises NothingVerifies if checkpoints were complete but none is now; Unreadable, UnknownVersion or UnlistedFile if
    this cannot be determined; and HostError if a host of the run does not answer.
    """
    former = former_hosts(run)
    if run.nodes.code is not None:  # the launch has shipped the code only to its own hosts
        former = hosts_with_code(run.nodes.transport, former, "cannot ask a former host for checkpoints")
    nodes = replace(run.nodes, hosts=(*run.nodes.hosts, *former))
    if is_asked_to_begin_again(run.folder):  # the head sets its own aside later, when it chooses a checkpoint
        _begin_again(run, nodes)
        return
    found = _survey(run, _begun_again(run, nodes))
    tag = _gathered(run, nodes, found, progress)
    if tag is None:
        return
    if newer := _once_complete_and_newer(run, found, tag.name):
        _move_aside(run, nodes, newer, f"it is damaged, and newer than {tag.name}, from which training resumes")
    checkpoint_record.note(run.folder, tag)
    _collect_metrics(run)


def _gathered(run: NodeRun, nodes: Nodes, found: Survey, progress: Progress) -> FoundTag | None:
    """Gather the newest intact checkpoint, and return it; None if none ever was complete."""
    doubtful, damaged = unreadable(found.found), list[str]()
    complete = complete_tags(found.found)
    unknown = sorted(doubtful.keys() - {tag.name for tag in complete}, reverse=True)
    for tag in complete:
        _require_known(doubtful, [name for name in unknown if name > tag.name])
        require_listed(tag, found.found)
        try:
            gather(nodes, run.name, tag, run.checkpoints, progress)
            if (best := _best_before(tag, complete)) is not None:
                require_listed(best, found.found)
                gather(nodes, run.name, best, run.checkpoints, progress)
        except IncompleteCheckpoint as error:
            needed = {tag.name, tag_of(tag.sidecars[0].best_step or tag.step)}
            _require_known(doubtful, sorted(needed & doubtful.keys(), reverse=True))
            _log.warning("skipping %s: %s", tag.name, error)
            damaged.append(f"{tag.name}: {error}")
            continue
        return tag
    _require_known(doubtful, unknown)
    if (lost := checkpoint_record.nothing_complete(run.folder, found, damaged)) is not None:
        raise lost
    return None


def _best_before(tag: FoundTag, complete: Sequence[FoundTag]) -> FoundTag | None:
    """Return the best checkpoint when ``tag`` was saved, if that is another one: training resumes only with it.

    Raises IncompleteCheckpoint if it is not complete anywhere.
    """
    step = tag.sidecars[0].best_step
    if step in (None, tag.step):
        return None
    if (found := next((each for each in complete if each.step == step), None)) is None:
        raise IncompleteCheckpoint(f"{tag.name} lacks the best checkpoint before it, that of step {step:,}")
    return found


def _require_known(doubtful: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise Unreadable for the first of these tags. It may be complete, so no older one must be used instead."""
    for name in names:
        if is_tag(name):
            raise Unreadable(f"{name} may be complete, but this cannot be checked now: {doubtful[name]}")


def _once_complete_and_newer(run: NodeRun, found: Survey, chosen: str) -> list[str]:
    """Tags newer than ``chosen`` that were complete once. Others, such as those of killed saves, may be overwritten."""
    last, finished = last_complete(run.folder), finished_once(found.found)
    names = sorted({name for inventory in found.found.values() for name in inventory if is_tag(name)})
    return [name for name in names if name > chosen and (name in finished or (last is not None and name <= last.tag))]


def _begun_again(run: NodeRun, nodes: Nodes) -> Nodes:
    """The nodes without checkpoints from before the run began again. Others are asked to set these aside first."""
    if late := [host for host in nodes.hosts if host in checkpoint_record.not_begun_again(run.folder)]:
        _begin_again(run, nodes.on(*late))
    without = checkpoint_record.not_begun_again(run.folder)
    return nodes.on(*(host for host in nodes.hosts if host not in without))


def _begin_again(run: NodeRun, nodes: Nodes) -> None:
    silent = _move_aside(run, nodes, None, "the run begins again at step 0")
    checkpoint_record.note_not_begun_again(
        run.folder, (checkpoint_record.not_begun_again(run.folder) - {*nodes.hosts}) | {*silent}
    )


def _move_aside(run: NodeRun, nodes: Nodes, tags: list[str] | None, why: str) -> list[str]:
    """Set tags (None: all) aside on nodes; named ones also on the head. Returns former hosts that did not answer."""
    silent = []
    for host, answer in move_aside_on(nodes, run.name, tags, why).items():
        if not isinstance(answer, HostError):
            _log.warning("%s moved %s aside: %s", host, ", ".join(answer) or "nothing", why)
        elif host in run.nodes.hosts:
            raise answer
        else:
            _log.warning("%s, which has trained this run before, keeps its checkpoints for now: %s", host, answer)
            silent.append(host)
    for tag in tags or ():
        set_aside(run.checkpoints / tag, run.folder / SET_ASIDE, why)
    return silent


def former_hosts(run: NodeRun) -> list[str]:
    """Return the hosts that may have parts of checkpoints and are no longer part of the run."""
    return [host for host in dict.fromkeys(_former(run.folder)) if host not in run.nodes.hosts]


def _survey(run: NodeRun, nodes: Nodes) -> Survey:
    found = survey(nodes, run.name, run.checkpoints)
    for host, error in found.silent.items():
        if host in run.nodes.hosts:
            raise error
        _log.warning("cannot ask %s, which has trained this run before, for checkpoints: %s", host, error)
    for name, why in missing_parts(found.found).items():
        _log.warning("skipping %s: %s", name, why)
    return found


def _former(run_folder: Path) -> Iterator[str]:
    """Hosts that may have parts of checkpoints."""
    yield from checkpoint_record.former_hosts(run_folder)
    for path in sorted((run_folder / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}"))[-_FORMER_ATTEMPTS:]:
        yield from attempt.read(path.parent).hosts or ()


def _collect_metrics(run: NodeRun) -> None:
    """Collect metrics if the first host has more of them. A new host has none, and one that came back has old ones.

    The same holds for the note on what Weights & Biases has got.
    """
    with TemporaryDirectory(prefix=".metrics-", dir=run.folder, ignore_cleanup_errors=True) as folder:
        collect(run.nodes, run.first, run.relative_path, [METRICS, WANDB_SENT], Path(folder))
        theirs, ours = Path(folder, METRICS), run.folder / METRICS
        if len(metrics.read(theirs)) > len(metrics.read(ours)):
            theirs.replace(ours)
        if _sent(Path(folder)) > _sent(run.folder):
            (run.folder / WANDB_SENT).parent.mkdir(mode=0o700, exist_ok=True)
            Path(folder, WANDB_SENT).replace(run.folder / WANDB_SENT)


def _sent(folder: Path) -> tuple[int, int]:
    """Return the number of the W&B run that a run's folder notes, and the last step that it got; (0, -1) for none."""
    try:
        noted = json.loads((folder / WANDB_SENT).read_bytes())
        return int(noted["number"]), int(noted["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, -1
