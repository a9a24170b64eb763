"""A head that starts anew finds its ranks at work, and answers for them from then on.

What a flow does before it trains may take longer than ranks go on without a head, so leases are renewed from the
moment the run is held.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.attempts import lease
from infra.attempts.attempt import Attempt
from infra.cluster import fencing
from infra.cluster.hosts import Hosts
from infra.cluster.launcher import ClusterLauncher
from infra.cluster.remote import SSH_CONFIG, Ssh
from infra.cluster.supervision import Supervision
from infra.run_lock import run_lock
from t5train.spec import ClusterSpec

_kept: dict[Path, Supervision] = {}
_log = logging.getLogger(__name__)


@contextmanager
def hold_run(run_folder: Path) -> Iterator[None]:
    """``run_lock``; within the block, ranks on hosts that an earlier head of this machine has left at work go on.

    ``adopt`` takes them over; where nobody has, they are ended with the block.
    """
    with run_lock(run_folder):
        if run_folder in _kept or (found := _at_work(run_folder)) is None:
            yield
            return
        _log.warning("attempt %s of %s is still at work: going on with it", found.number, found.run_name)
        _kept[run_folder] = Supervision(found, transport_of(found), ClusterLauncher(found.run_id).folder, None)
        try:
            yield
        finally:
            if (supervision := adopt(run_folder)) is not None:
                supervision.close()
                fencing.end(found, transport_of(found))


def adopt(run_folder: Path) -> Supervision | None:
    """The supervision of ranks that were found at work; the caller answers for them now."""
    return _kept.pop(run_folder, None)


def hosts_at_work(run_folder: Path) -> Hosts | None:
    """Those of ranks that were found at work and that nobody has adopted yet."""
    if (kept := _kept.get(run_folder)) is None:
        return None
    return Hosts.of(kept.this.hosts or {})


def end_all(run_folder: Path, cluster: ClusterSpec, on_tick: Callable[[], None]) -> None:
    """End what earlier attempts have left on hosts, ranks that were found at work among them."""
    if (supervision := adopt(run_folder)) is not None:
        supervision.close()
    if not any(fencing.unended(run_folder)):
        return
    with TemporaryDirectory(prefix="t5-ssh-") as folder:
        fencing.end_earlier(run_folder, Ssh.configured(cluster, Path(folder)), on_tick)


def transport_of(this: Attempt) -> Ssh:
    """The way to the hosts of an attempt of this machine's."""
    return Ssh(ClusterLauncher(this.run_id).folder / SSH_CONFIG)


def _at_work(run_folder: Path) -> Attempt | None:
    """The run's newest attempt, if its launcher is alive here and its ranks have not given up waiting for a head."""
    newest = max(fencing.unended(run_folder), key=lambda this: this.number, default=None)
    if newest is None or newest.lease_seconds is None:
        return None
    launcher = ClusterLauncher(newest.run_id)
    return newest if launcher.is_alive and lease.age_seconds(launcher.folder) < newest.lease_seconds else None
