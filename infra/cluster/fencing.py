"""Sees to it that nothing of a run's earlier attempts over hosts is left, also on hosts that do not answer."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from infra.attempts import attempt, lease
from infra.attempts.attempt import Attempt
from infra.cluster.gathering import gather, keep_own
from infra.cluster.launcher import ClusterLauncher
from infra.cluster.remote import Transport, node_command, run_everywhere
from infra.cluster.shipping import hosts_with_code
from infra.code_bundle import own_bundle
from infra.node_folder import head_folder
from infra.stop_signal import undisturbed
from t5train.atomic import write_json
from t5train.errors import HostError
from t5train.run_files import ATTEMPTS

ENDED = "ended.json"
"""In an attempt's folder, once nothing of it is left on any host."""
END_SECONDS = 20.0
"""More than a host needs to end an attempt."""
_TICK_SECONDS = 0.5
_log = logging.getLogger(__name__)


def end_earlier(run_folder: Path, transport: Transport, on_tick: Callable[[], None]) -> None:
    """End what is left of a run's attempts; hold ``run_lock``, so that no other head renews their leases.

    Hosts that do not answer are given the time in which ranks end by themselves.
    """
    for found in unended(run_folder):
        if unreachable := _end_by_own_code(found, transport):
            _wait(found, unreachable, on_tick)
            _end_by_own_code(found, transport)  # hosts that are back by now: what they have is gathered
            _conclude(found)


def unended(run_folder: Path) -> Iterator[Attempt]:
    """Attempts over hosts of which something may be left."""
    for path in sorted((run_folder / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}")):
        this = attempt.read(path.parent)
        if this.hosts is not None and not (path.parent / ENDED).exists():
            yield this


def end(this: Attempt, transport: Transport, without: Collection[str] = ()) -> list[str]:
    """End one attempt wherever that can be reached, and gather what it left; names the hosts that did not answer.

    Hosts ``without`` the code to do so are not asked, and are among those.
    """
    with undisturbed("ending the ranks on all hosts, which takes a minute at most"):
        ClusterLauncher(this.run_id).end()
        asked = [host for host in this.hosts or {} if host not in without]
        unreachable = [*without, *end_on_hosts(this, transport, asked)]
    settle(this, transport, unreachable)
    return unreachable


def settle(this: Attempt, transport: Transport, unreachable: list[str]) -> None:
    """Gather what an attempt left, all of whose processes have ended but perhaps on ``unreachable`` hosts."""
    gather(this, transport, [host for host in this.hosts or {} if host not in unreachable])
    keep_own(head_folder(this.run_id), this.folder)
    if not unreachable:
        _conclude(this)


def end_on_hosts(this: Attempt, transport: Transport, hosts: list[str]) -> list[str]:
    """End the attempt on some hosts; names those that did not answer."""
    request = json.dumps({"run_id": this.run_id}).encode() + b"\n"
    replies = run_everywhere(
        transport,
        hosts,
        node_command("end", this.code),
        stdin_of=lambda _host: request,
        deadline_seconds=END_SECONDS,
    )
    unreachable = []
    for host, reply in replies.items():
        try:
            if isinstance(reply, HostError):
                raise reply
            if left := reply.message()["left"]:
                _log.error("%s: processes %s do not end, not even by SIGKILL", host, left)
        except HostError as error:
            _log.warning("attempt %s may go on for a while on %s: %s", this.number, host, error)
            unreachable.append(host)
    return unreachable


def _end_by_own_code(this: Attempt, transport: Transport) -> list[str]:
    """An attempt whose code was sent to its hosts is ended by this head's: a host may have a new disk by now."""
    if this.code is None:
        return end(this, transport)
    hosts = list(this.hosts or {})
    having = hosts_with_code(transport, hosts, f"attempt {this.number} may go on for a while on a host")
    own = replace(this, code=own_bundle().digest)
    return end(own, transport, without=[host for host in hosts if host not in having])


def _conclude(this: Attempt) -> None:
    """Note that nothing of an attempt runs any more, on any host."""
    write_json(this.folder / ENDED, {"at": attempt.now()})
    shutil.rmtree(head_folder(this.run_id), ignore_errors=True)  # not there if the head was on another machine


def _wait(this: Attempt, unreachable: list[str], on_tick: Callable[[], None]) -> None:
    """Until ranks that hear nothing of a head have surely ended."""
    most = (this.lease_seconds or 0) + this.grace_seconds + END_SECONDS
    # How long the last head has been silent, if that was on this machine; else it may have been at work until now.
    known = lease.age_seconds(head_folder(this.run_id))
    seconds = most if known == float("inf") else max(0.0, most - known)
    _log.warning("waiting %.0f s until %s have ended attempt %s by themselves", seconds, unreachable, this.number)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        on_tick()
        time.sleep(_TICK_SECONDS)
