"""Decides when to stop retrying a run, and finds hosts that have failed twice.

Failures are recorded in the run's folder, so a host that fails once in each of two commands is found, too.
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
"""How long a failure counts against a host. The host may have been repaired after that."""
_THIS_COMMAND = secrets.token_hex(8)


@dataclass(frozen=True)
class _Failure:
    at: str
    command: str
    """Random id of the process that made this attempt."""
    kind: str
    text: str
    """First line of the error. Numbers are masked, because they differ between attempts."""
    hosts: tuple[str, ...]
    stands_at: str
    """Tag of the newest checkpoint. A failure after a new checkpoint is a different failure."""

    def is_like(self, other: "_Failure") -> bool:
        """Whether this is the same failure again, in the same command."""
        return asdict(self) | {"at": other.at} == asdict(other)


def judged(
    run_folder: Path, error: T5TrainError, is_replaced: Callable[[str], bool] = lambda _host: False
) -> T5TrainError:
    """Record a failure of a run, and return the error to raise. It names those of its hosts that have failed twice.

    Returns RepeatedFailure, which is not retried, for the third identical failure in a row in this command without a
    new checkpoint in between. Returns HostReplaced, which is retried, if the error is not retryable on the same hosts
    and the hosts that have failed twice do not train from now on (``is_replaced``).
    """
    text = re.sub(r"\d+", "#", str(error).partition("\n")[0])
    newest_tag = max((path.name for path in (run_folder / CHECKPOINTS).glob("step-*")), default="")
    this = _Failure(now(), _THIS_COMMAND, type(error).__name__, text, error.hosts, newest_tag)
    with open(run_folder / FAILURES, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(this)) + "\n")
    failures = _recorded(run_folder)
    last = failures[-MOST_ALIKE:]
    if error.retryable and len(last) == MOST_ALIKE and all(each.is_like(this) for each in last):
        return RepeatedFailure(f"training failed {MOST_ALIKE} times in a row with this error: {error}", error.hosts)
    named = {host: times for host, times in _failed_twice(failures).items() if host in error.hosts}
    if not named:
        return error
    # Another host can help, for example one with more memory or disk space.
    is_tried_elsewhere = isinstance(error, LaunchError) and not error.retryable and all(map(is_replaced, named))
    blamed = "; ".join(f"{host} has failed {times} times in the last week" for host, times in named.items())
    advice = f"Use --exclude {'@'.join(named)}, or --spares to replace such hosts"
    kind = HostReplaced if is_tried_elsewhere else type(error)
    return kind(f"{blamed}. {advice}. The last failure: {error}", error.hosts)


def unfit(run_folder: Path) -> dict[str, str]:
    """The hosts to replace because they have failed twice in the last week, with the reason."""
    return dict.fromkeys(_failed_twice(_recorded(run_folder)), "has failed twice")


def _recorded(run_folder: Path) -> list[_Failure]:
    """The failures of the last week, oldest first. Damaged lines are skipped."""
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


def _failed_twice(failures: Iterable[_Failure]) -> dict[str, int]:
    """The hosts that have failed at least twice, and how often."""
    count = Counter(host for failure in failures for host in set(failure.hosts))
    return {host: times for host, times in count.items() if times >= _UNFIT}
