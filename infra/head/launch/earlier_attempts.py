"""Ends earlier attempts of a run over hosts, and collects the files of their ranks.

If hosts do not answer, the head waits until their ranks must have ended by themselves.
"""

import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from infra.head.hosts.code_shipping import hosts_with_code
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.log_collection import gather, keep_own
from infra.head.stop_signal import undisturbed
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import EndAttempt
from infra.node.code_bundle import own_bundle
from infra.node.node_folders import head_folder
from t5train.errors import HostError
from t5train.files.atomic import write_json
from t5train.files.run_folder import ATTEMPTS

ENDED = "ended.json"
"""File in an attempt's folder, written once no process of the attempt is left on any host."""
END_SECONDS = 20.0
"""Longer than a host needs to end an attempt."""
_TICK_SECONDS = 0.5
_log = logging.getLogger(__name__)


def end_earlier(run_folder: Path, transport: Transport, on_tick: Callable[[], None]) -> None:
    """End what is left of a run's attempts. The caller must hold ``run_lock``, so that no other head renews leases.

    If hosts do not answer, waits until their ranks must have ended by themselves.
    """
    for found in unended(run_folder):
        if unreachable := _end_by_own_code(found, transport):
            _wait(found, unreachable, on_tick)
            _end_by_own_code(found, transport)  # collects the files of hosts that answer again
            _conclude(found)


def unended(run_folder: Path) -> Iterator[Attempt]:
    """Attempts over hosts that may still have processes or files on them."""
    for path in sorted((run_folder / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}")):
        this = attempt.read(path.parent)
        if this.hosts is not None and not (path.parent / ENDED).exists():
            yield this


def end(this: Attempt, transport: Transport, without: Collection[str] = ()) -> list[str]:
    """End an attempt on all reachable hosts, and collect its files; returns the hosts that did not answer.

    Hosts ``without`` the code to do so are not asked. They are included in the result.
    """
    with undisturbed("ending the ranks on all hosts, which takes a minute at most"):
        ClusterLauncher(this.run_id).end()
        asked = [host for host in this.hosts or {} if host not in without]
        unreachable = [*without, *end_on_hosts(this, transport, asked)]
    settle(this, transport, unreachable)
    return unreachable


def settle(this: Attempt, transport: Transport, unreachable: list[str]) -> None:
    """Collect the files of an attempt whose processes have all ended, except perhaps on ``unreachable`` hosts."""
    gather(this, transport, [host for host in this.hosts or {} if host not in unreachable])
    keep_own(head_folder(this.run_id), this.folder)
    if not unreachable:
        _conclude(this)


def end_on_hosts(this: Attempt, transport: Transport, hosts: list[str]) -> dict[str, str]:
    """End the attempt on these hosts, over new connections; returns those that did not answer, and why."""
    answers = Nodes(transport, tuple(hosts), code=this.code).ask(EndAttempt(this.run_id), END_SECONDS)
    unreachable = dict[str, str]()
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            _log.warning("attempt %s may keep running for a while on %s: %s", this.number, host, answer)
            unreachable[host] = str(answer)
        elif answer.pids:
            _log.error(
                "%s: processes %s survived SIGKILL, so a disk or driver may hang: restart that host",
                host,
                list(answer.pids),
            )
    return unreachable


def _end_by_own_code(this: Attempt, transport: Transport) -> list[str]:
    """End an attempt. If its code was shipped, ship this head's and use it: a host may have a new disk by now."""
    if this.code is None:
        return end(this, transport)
    hosts = list(this.hosts or {})
    having = hosts_with_code(transport, hosts, f"attempt {this.number} may keep running for a while on a host")
    own = replace(this, code=own_bundle().digest)
    return end(own, transport, without=[host for host in hosts if host not in having])


def _conclude(this: Attempt) -> None:
    """Record that no process of an attempt is left on any host."""
    write_json(this.folder / ENDED, {"at": attempt.now()})
    shutil.rmtree(head_folder(this.run_id), ignore_errors=True)  # missing if the head was on another machine


def _wait(this: Attempt, unreachable: list[str], on_tick: Callable[[], None]) -> None:
    """Wait until ranks without contact with a head must have ended."""
    most = (this.lease_seconds or 0) + this.grace_seconds + END_SECONDS
    if this.is_stop_ordered:
        most += this.saving_seconds
    # If the last head was on this machine, this is how long ago it renewed the lease. Otherwise, it is infinite: that
    # head may have been running until now.
    known = head_lease.age_seconds(head_folder(this.run_id))
    seconds = most if known == float("inf") else max(0.0, most - known)
    _log.warning(
        "waiting %.0f s for %s, which cannot be reached, to end attempt %s by themselves",
        seconds,
        unreachable,
        this.number,
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        on_tick()
        time.sleep(_TICK_SECONDS)
