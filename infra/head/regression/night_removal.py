"""Removes old nights: their runs on hosts first, finished or not, then their folders here.

A night with a host that does not answer is kept and tried again the next night, because only its folder says what may
be removed on that host.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from infra.head.hosts.node_client import Nodes
from infra.head.hosts.reached_nodes import reached_nodes
from infra.head.runs.removal_plan import hosts_of_run, machines_of_run, plan_removal, removable_run
from infra.head.runs.run_removal import remove_run
from infra.head.runs.run_state import read_json
from t5train.errors import HostError, T5TrainError
from t5train.files.atomic import discard, remove_discarded
from t5train.files.presence import names_in, visible_in
from t5train.files.run_folder import RUN, RUNS, removing
from t5train.progress import Progress
from t5train.spec import MachinesSpec

Connect = Callable[[MachinesSpec, Iterable[str]], AbstractContextManager[tuple[Nodes, Mapping[str, HostError]]]]
_log = logging.getLogger(__name__)


def remove_nights(nights: Iterable[Path], progress: Progress, connect: Connect = reached_nodes) -> None:
    """Remove the folders of nights, and what hosts have of their runs. ``connect`` replaces ssh in tests."""
    old = list(nights)
    for number, night in enumerate(old, start=1):
        try:
            for run_name in list(_on_hosts(night)):
                _remove_run(night, run_name, connect)
            discard(night)
        except T5TrainError as error:
            _log.warning("kept the night %s, which is tried again the next night: %s", night, error)
        progress("old nights removed", number, len(old))
    if old:
        remove_discarded(old[0].parent)


def _on_hosts(night: Path) -> Iterator[str]:
    """Yield the names of the runs that used hosts, also of those whose removal was interrupted.

    Only these are read as this version reads them: other runs may have settings of an earlier version.
    """
    for folder in visible_in(night / RUNS):
        if read_json(folder / RUN).get("spec", {}).get("cluster", {}).get("hostfile") is not None:
            yield folder.name
    before, after = removing(Path("*")).name.split("*")
    for name in names_in(night / RUNS):
        if name.startswith(before) and name.endswith(after):
            yield name.removeprefix(before).removesuffix(after)


def _remove_run(night: Path, run_name: str, connect: Connect) -> None:
    """Remove a run here and on its hosts. Raises HostError if a host does not answer, RunLocked if it is in use."""
    run, folder = removable_run(night, run_name)
    machines = machines_of_run(folder, None)
    with connect(machines, hosts_of_run(folder, machines)) as (nodes, lacking):
        remove_run(plan_removal(run, folder, nodes, lacking, with_published=False), nodes)
    _log.info("%s: removed the run %s, also on %s", night.name, run_name, ", ".join(nodes.hosts))
