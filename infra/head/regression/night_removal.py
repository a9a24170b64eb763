"""Removes old nights: their copies on hosts first, then their folders here.

A night with a host that does not answer is kept and tried again the next night, because only its folder says what may
be removed on that host.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from infra.head.hosts.code_shipping import ship, shipped_code
from infra.head.hosts.hostfile import chosen_hosts
from infra.head.hosts.node_client import Nodes
from infra.head.hosts.ssh import Ssh
from infra.head.storage.garbage_collection import finished_runs, free_on, garbage_on, known_attempts, verified
from infra.node.node_folders import ATTEMPTS
from infra.node.storage.garbage import Garbage
from t5train.checkpoint.resume import load_run_spec
from t5train.errors import HostError, T5TrainError
from t5train.files.atomic import discard, remove_discarded
from t5train.files.presence import is_there, visible_in
from t5train.files.run_folder import RUN, RUNS
from t5train.progress import Progress
from t5train.spec import RunSpec

T = TypeVar("T")
Connect = Callable[[RunSpec], AbstractContextManager[Nodes]]
_log = logging.getLogger(__name__)


def remove_nights(nights: Iterable[Path], progress: Progress, connect: Connect | None = None) -> None:
    """Remove the folders of nights, and what hosts have of their runs. ``connect`` replaces ssh in tests."""
    old = list(nights)
    for number, night in enumerate(old, start=1):
        try:
            for spec in _on_hosts(night):
                with (connect or _nodes)(spec) as nodes:
                    _free_on_hosts(night, nodes, progress)
            discard(night)
        except T5TrainError as error:
            _log.warning("kept the night %s, which is tried again the next night: %s", night, error)
        progress("old nights removed", number, len(old))
    if old:
        remove_discarded(old[0].parent)


def _on_hosts(night: Path) -> Iterator[RunSpec]:
    """Yield the spec of one run for each hostfile that the night used; that is one at most."""
    runs = [folder for folder in visible_in(night / RUNS) if is_there(folder / RUN)]
    specs = [load_run_spec(folder) for folder in runs if _names_hosts(folder / RUN)]
    of_hosts = {spec.cluster.hostfile: spec for spec in specs if spec.cluster.hostfile is not None}
    yield from of_hosts.values()


def _names_hosts(run: Path) -> bool:
    """Whether a run used hosts. Other runs may be of an earlier version, whose settings this one does not know."""
    try:
        return json.loads(run.read_bytes())["cluster"]["hostfile"] is not None
    except (ValueError, KeyError):
        return True  # damaged: loading its spec says so


def _free_on_hosts(night: Path, nodes: Nodes, progress: Progress) -> None:
    """Remove finished runs and attempts of the night on its hosts. Raises HostError if a host does not answer."""
    attempts = known_attempts(night)
    runs = list(finished_runs(night))
    checked = list(verified(runs, {run.name for run in runs}, progress))
    found = {host: _of_night(each) for host, each in _answered(garbage_on(nodes, checked, attempts)).items()}
    freed = _answered(free_on(nodes, checked, attempts, found))
    _log.info("%s: removed %d folders on %d hosts", night.name, sum(map(len, freed.values())), len(freed))


def _of_night(found: Iterable[Garbage]) -> list[Garbage]:
    """Return runs and attempts. Staged files stay, because they are the same every night."""
    return [each for each in found if each.relative_path.startswith((f"{RUNS}/", f"{ATTEMPTS}/"))]


@contextmanager
def _nodes(spec: RunSpec) -> Iterator[Nodes]:
    cluster = spec.cluster
    hosts, code = chosen_hosts(cluster).names, shipped_code(cluster)
    with tempfile.TemporaryDirectory(prefix="t5-nights-") as folder:
        transport = Ssh.configured(cluster, Path(folder))
        for error in ship(transport, hosts).values() if code else ():
            raise error
        yield Nodes(transport, hosts, spec.storage.scratch, code)


def _answered(answers: Mapping[str, T | HostError]) -> dict[str, T]:
    found = {}
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            raise answer
        found[host] = answer
    return found
