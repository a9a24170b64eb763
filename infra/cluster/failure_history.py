"""Failures of a run that were tried again in this process: when to stop, and which hosts to do without."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from infra.cluster.hosts import Host, Hosts
from t5train.errors import RepeatedFailure, T5TrainError
from t5train.run_files import CHECKPOINTS

MOST_ALIKE = 3
_UNFIT = 2
_log = logging.getLogger(__name__)


class _Failure(NamedTuple):
    kind: str
    text: str
    """Its first line, without numbers, in which attempts differ."""
    hosts: tuple[str, ...]
    stands_at: str
    """The newest checkpoint: where one came in between, a failure is another."""


_failures: dict[Path, list[_Failure]] = {}
_silent: dict[Path, set[str]] = {}


def judged(run_folder: Path, error: T5TrainError) -> T5TrainError:
    """Remember a failure of the run; what to raise for it: with the hosts named that have failed before.

    RepeatedFailure, which is not tried again, for the third in a row that is like the two before it, without a new
    checkpoint meanwhile. What is never tried again is left as it is.
    """
    if not error.retryable:
        return error
    text = re.sub(r"\d+", "#", str(error).partition("\n")[0])
    failures = _failures.setdefault(run_folder, [])
    failures.append(_Failure(type(error).__name__, text, error.hosts, _newest_tag(run_folder)))
    if len(failures) >= MOST_ALIKE and len(set(failures[-MOST_ALIKE:])) == 1:
        return RepeatedFailure(f"this has failed alike {MOST_ALIKE} times in a row: {error}", error.hosts)
    if named := [host for host in _failed_twice(run_folder) if host in error.hosts]:
        return type(error)(f"{_blame(run_folder, named)}: {error}", error.hosts)
    return error


def set_aside(run_folder: Path, hosts: Iterable[str]) -> None:
    """Do without hosts that did not answer before the run had begun: nothing is lost by not waiting for them."""
    _silent.setdefault(run_folder, set()).update(hosts)


def unfit(run_folder: Path) -> dict[str, str]:
    """Hosts to do without, and why: those that were set aside, or failed twice."""
    silent = dict.fromkeys(sorted(_silent.get(run_folder, ())), "does not answer")
    return silent | dict.fromkeys(_failed_twice(run_folder), "has failed twice")


def with_spares(hosts: Hosts, spares: Hosts, unfit_hosts: Mapping[str, str]) -> Hosts:
    """The hosts, those that are unfit replaced by spares with slots enough, as far as there are any."""
    left = [spare for spare in spares.all if spare.name not in unfit_hosts]
    return Hosts(
        tuple(_or_spare(host, why, left) if (why := unfit_hosts.get(host.name)) else host for host in hosts.all)
    )


def _or_spare(host: Host, why: str, left: list[Host]) -> Host:
    for spare in left:
        if len(spare.slots) >= len(host.slots):
            left.remove(spare)
            _log.warning("%s %s: %s takes its place", host.name, why, spare.name)
            return Host(spare.name, spare.slots[: len(host.slots)])
    return host


def _failed_twice(run_folder: Path) -> list[str]:
    count = Counter(host for failure in _failures.get(run_folder, []) for host in set(failure.hosts))
    return [host for host, times in count.items() if times >= _UNFIT]


def _newest_tag(run_folder: Path) -> str:
    return max((path.name for path in (run_folder / CHECKPOINTS).glob("step-*")), default="")


def _blame(run_folder: Path, named: list[str]) -> str:
    kinds = {host: [each.kind for each in _failures[run_folder] if host in each.hosts] for host in named}
    return "; ".join(f"{host} has failed {len(kinds[host])} times ({', '.join(kinds[host])})" for host in named)
