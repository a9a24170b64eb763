"""Earlier attempts of a run over hosts: ranks that are still running are taken over, others are ended.

A flow's steps before training may take longer than ranks run without a head, so leases are renewed from the moment the
run is held. If hosts do not answer, the head waits until their ranks have ended by themselves.
"""

import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.head.hosts.code_shipping import hosts_with_code
from infra.head.hosts.hostfile import Hosts
from infra.head.hosts.node_client import Nodes
from infra.head.hosts.ssh import SSH_CONFIG, Ssh, Transport
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.log_collection import gather, keep_own
from infra.head.launch.supervision import Supervision
from infra.head.stop_signal import undisturbed
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import EndAttempt
from infra.node.attempts.run_lock import run_lock
from infra.node.code_bundle import own_bundle
from infra.node.node_folders import head_folder
from t5train.errors import HostError
from t5train.files.atomic import write_json
from t5train.files.run_folder import ATTEMPTS
from t5train.spec import ClusterSpec

ENDED = "ended.json"
"""File in an attempt's folder, written once nothing of it is left on any host."""
END_SECONDS = 20.0
"""More than a host needs to end an attempt."""
_TICK_SECONDS = 0.5
_log = logging.getLogger(__name__)


def end_earlier(run_folder: Path, transport: Transport, on_tick: Callable[[], None]) -> None:
    """End what is left of a run's attempts. The caller must hold ``run_lock``, so that no other head renews leases.

    If hosts do not answer, waits until their ranks have ended by themselves.
    """
    for found in unended(run_folder):
        if unreachable := _end_by_own_code(found, transport):
            _wait(found, unreachable, on_tick)
            _end_by_own_code(found, transport)  # hosts may be back by now: their files are collected
            _conclude(found)


def unended(run_folder: Path) -> Iterator[Attempt]:
    """Attempts over hosts that may still have processes or files on them."""
    for path in sorted((run_folder / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}")):
        this = attempt.read(path.parent)
        if this.hosts is not None and not (path.parent / ENDED).exists():
            yield this


def end(this: Attempt, transport: Transport, without: Collection[str] = ()) -> list[str]:
    """End one attempt on all reachable hosts, and collect what it left; returns the hosts that did not answer.

    Hosts ``without`` the code to do so are not asked, and are included in the result.
    """
    with undisturbed("ending the ranks on all hosts, which takes a minute at most"):
        ClusterLauncher(this.run_id).end()
        asked = [host for host in this.hosts or {} if host not in without]
        unreachable = [*without, *end_on_hosts(this, transport, asked)]
    settle(this, transport, unreachable)
    return unreachable


def settle(this: Attempt, transport: Transport, unreachable: list[str]) -> None:
    """Collect what an attempt left after all its processes have ended, except perhaps on ``unreachable`` hosts."""
    gather(this, transport, [host for host in this.hosts or {} if host not in unreachable])
    keep_own(head_folder(this.run_id), this.folder)
    if not unreachable:
        _conclude(this)


def end_on_hosts(this: Attempt, transport: Transport, hosts: list[str]) -> list[str]:
    """End the attempt on some hosts; returns those that did not answer."""
    answers = Nodes(transport, tuple(hosts), code=this.code).ask(EndAttempt(this.run_id), END_SECONDS)
    unreachable = []
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            _log.warning("attempt %s may keep running for a while on %s: %s", this.number, host, answer)
            unreachable.append(host)
        elif answer.pids:
            _log.error("%s: processes %s do not end, even after SIGKILL", host, list(answer.pids))
    return unreachable


def _end_by_own_code(this: Attempt, transport: Transport) -> list[str]:
    """End an attempt. If its code was sent to its hosts, this head's is used: a host may have a new disk by now."""
    if this.code is None:
        return end(this, transport)
    hosts = list(this.hosts or {})
    having = hosts_with_code(transport, hosts, f"attempt {this.number} may keep running for a while on a host")
    own = replace(this, code=own_bundle().digest)
    return end(own, transport, without=[host for host in hosts if host not in having])


def _conclude(this: Attempt) -> None:
    """Record that nothing of an attempt is running on any host any more."""
    write_json(this.folder / ENDED, {"at": attempt.now()})
    shutil.rmtree(head_folder(this.run_id), ignore_errors=True)  # not there if the head was on another machine


def _wait(this: Attempt, unreachable: list[str], on_tick: Callable[[], None]) -> None:
    """Wait until ranks that have no contact with a head must have ended."""
    most = (this.lease_seconds or 0) + this.grace_seconds + END_SECONDS
    # How long the last head has been silent, if it was on this machine; otherwise it may have been running until now.
    known = head_lease.age_seconds(head_folder(this.run_id))
    seconds = most if known == float("inf") else max(0.0, most - known)
    _log.warning("waiting %.0f s until %s have ended attempt %s by themselves", seconds, unreachable, this.number)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        on_tick()
        time.sleep(_TICK_SECONDS)


_kept: dict[Path, Supervision] = {}


@contextmanager
def hold_run(run_folder: Path) -> Iterator[None]:
    """``run_lock``. Within the block, ranks on hosts that an earlier head of this machine left running keep running.

    ``adopt`` takes them over; if it is not called, they are ended with the block.
    """
    with run_lock(run_folder):
        if run_folder in _kept or (found := _at_work(run_folder)) is None:
            yield
            return
        _log.warning("attempt %s of %s is still at work: continuing it", found.number, found.run_name)
        _kept[run_folder] = Supervision(found, transport_of(found), ClusterLauncher(found.run_id).folder, None)
        try:
            yield
        finally:
            if (supervision := adopt(run_folder)) is not None:
                supervision.close()
                end(found, transport_of(found))


def adopt(run_folder: Path) -> Supervision | None:
    """The supervision of ranks that were found running; the caller is responsible for them from now on."""
    return _kept.pop(run_folder, None)


def hosts_at_work(run_folder: Path) -> Hosts | None:
    """The hosts of ranks that were found running and have not been adopted yet."""
    if (kept := _kept.get(run_folder)) is None:
        return None
    return Hosts.of(kept.this.hosts or {})


def end_all(run_folder: Path, cluster: ClusterSpec, on_tick: Callable[[], None]) -> None:
    """End what earlier attempts have left on hosts, including ranks that were found running."""
    if (supervision := adopt(run_folder)) is not None:
        supervision.close()
    if not any(unended(run_folder)):
        return
    with TemporaryDirectory(prefix="t5-ssh-") as folder:
        end_earlier(run_folder, Ssh.configured(cluster, Path(folder)), on_tick)


def transport_of(this: Attempt) -> Ssh:
    """The transport to the hosts of an attempt that was started on this machine."""
    return Ssh(ClusterLauncher(this.run_id).folder / SSH_CONFIG)


def _at_work(run_folder: Path) -> Attempt | None:
    """The run's newest attempt, if its launcher is alive here and its ranks are still waiting for a head."""
    newest = max(unended(run_folder), key=lambda this: this.number, default=None)
    if newest is None or newest.lease_seconds is None:
        return None
    launcher = ClusterLauncher(newest.run_id)
    return newest if launcher.is_alive and head_lease.age_seconds(launcher.folder) < newest.lease_seconds else None
