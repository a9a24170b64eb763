"""When to stop retrying a run, and which hosts have failed twice.

Failures are recorded in the run's folder, so a host that fails once in each of several commands is found as well.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from infra.node.attempts.attempt import now
from t5train.errors import HostReplaced, LaunchError, RepeatedFailure, T5TrainError
from t5train.files.run_folder import CHECKPOINTS, FAILURES

MOST_ALIKE = 3
_UNFIT = 2
_REMEMBERED = timedelta(days=7)
"""How long a failure counts against a host: it may have been repaired since."""
_THIS_COMMAND = secrets.token_hex(8)


@dataclass(frozen=True)
class _Failure:
    at: str
    command: str
    """Drawn at random by each process that tries again."""
    kind: str
    text: str
    """Its first line, without numbers, in which attempts differ."""
    hosts: tuple[str, ...]
    stands_at: str
    """The newest checkpoint: where one came in between, a failure is another."""

    def is_like(self, other: "_Failure") -> bool:
        """Whether it is the same failure once more, in the same command."""
        return asdict(self) | {"at": other.at} == asdict(other)


_silent: dict[Path, set[str]] = {}


def judged(
    run_folder: Path, error: T5TrainError, is_replaced: Callable[[str], bool] = lambda _host: False
) -> T5TrainError:
    """Record a failure of the run; what to raise for it: with the hosts named that have failed before.

    RepeatedFailure, which is not tried again, for the third in a row of this command that is like the two before it,
    without a new checkpoint meanwhile. HostReplaced, which is, where the error is never tried again on the same hosts
    and all that failed repeatedly are ``is_replaced`` from now on.
    """
    text = re.sub(r"\d+", "#", str(error).partition("\n")[0])
    this = _Failure(now(), _THIS_COMMAND, type(error).__name__, text, error.hosts, _newest_tag(run_folder))
    _record(run_folder, this)
    failures = _recorded(run_folder)
    last = failures[-MOST_ALIKE:]
    if error.retryable and len(last) == MOST_ALIKE and all(each.is_like(this) for each in last):
        return RepeatedFailure(f"this has failed alike {MOST_ALIKE} times in a row: {error}", error.hosts)
    named = [host for host in _failed_twice(failures) if host in error.hosts]
    if not named:
        return error
    kind = HostReplaced if _is_tried_elsewhere(error) and all(map(is_replaced, named)) else type(error)
    return kind(f"{_blame(failures, named)}: {error}", error.hosts)


def set_aside(run_folder: Path, hosts: Iterable[str]) -> None:
    """Do without hosts that did not answer before the run had begun: nothing is lost by not waiting for them."""
    _silent.setdefault(run_folder, set()).update(hosts)


def unfit(run_folder: Path) -> dict[str, str]:
    """Hosts to do without, and why: those that were set aside, or failed twice in the last week."""
    silent = dict.fromkeys(sorted(_silent.get(run_folder, ())), "does not answer")
    return silent | dict.fromkeys(_failed_twice(_recorded(run_folder)), "has failed twice")


def _is_tried_elsewhere(error: T5TrainError) -> bool:
    """Whether another host can help, such as against too little memory or disk space."""
    return isinstance(error, LaunchError) and not error.retryable


def _record(run_folder: Path, failure: _Failure) -> None:
    with open(run_folder / FAILURES, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(failure)) + "\n")


def _recorded(run_folder: Path) -> list[_Failure]:
    """Those that count, the oldest first. A line that was cut off is passed over."""
    try:
        lines = (run_folder / FAILURES).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    since = (datetime.now(UTC) - _REMEMBERED).isoformat()
    read = [found for line in lines if (found := _parsed(line)) is not None]
    return [failure for failure in read if failure.at >= since]


def _parsed(line: str) -> _Failure | None:
    try:
        facts = json.loads(line)
        return _Failure(**{**facts, "hosts": tuple(facts["hosts"])})
    except (ValueError, TypeError, KeyError):
        return None


def _failed_twice(failures: Iterable[_Failure]) -> list[str]:
    count = Counter(host for failure in failures for host in set(failure.hosts))
    return [host for host, times in count.items() if times >= _UNFIT]


def _newest_tag(run_folder: Path) -> str:
    return max((path.name for path in (run_folder / CHECKPOINTS).glob("step-*")), default="")


def _blame(failures: Iterable[_Failure], named: list[str]) -> str:
    kinds = {host: [each.kind for each in failures if host in each.hosts] for host in named}
    blamed = "; ".join(f"{host} has failed {len(kinds[host])} times ({', '.join(kinds[host])})" for host in named)
    return f"{blamed}; use --exclude {'@'.join(named)}, or --spares to have other hosts take over"
