"""What Prefect shows of a stage while it works: a progress artifact, and the title of the run's page."""

import logging
import re
import time

from t5train.progress import Progress, silent
from t5train.report.time_left import TimeLeft
from tasks.artifacts import shown_progress
from tasks.run_title import show_in_title
from tasks.stages import Stage

SECONDS_UNTIL_SHOWN = 2.0
SECONDS_BETWEEN_UPDATES = 1.0
SECONDS_BETWEEN_TITLES = 10.0
SECONDS_BETWEEN_LINES = 10.0
_FACTS_IN_TITLE, _FACTS_IN_LINES = 1, 2
"""Training reports the loss and the speed first. Titles and lines show no more, as the artifact shows everything."""
_log = logging.getLogger(__name__)


class StageProgress:
    """A progress callback that updates one artifact, at most once per second, and logs every ten seconds.

    It also shows the progress in the title of the run's page, every ten seconds, and passes every call on to
    ``watcher``. Title and log have fewer facts than the artifact.

    A stage that ends within two seconds creates no artifact and logs nothing. If the server does not respond, the
    artifact is not updated and the stage continues, so training survives a restart of the server.
    """

    def __init__(self, stage: Stage, watcher: Progress = silent) -> None:
        self._stage, self._watcher = stage, watcher
        started = time.monotonic()
        self._updated_at = started + SECONDS_UNTIL_SHOWN - SECONDS_BETWEEN_UPDATES
        self._titled_at = started + SECONDS_UNTIL_SHOWN - SECONDS_BETWEEN_TITLES
        self._logged_at = started
        self._artifact = shown_progress(f"progress-{stage.key}")
        self._is_shown = False
        self._time_left = TimeLeft()
        show_in_title(stage.title)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` units of ``what``. An existing artifact is always updated at the end."""
        self._watcher(f"{self._stage.title}: {what}", done, total)
        now = time.monotonic()
        left = self._time_left.text(now, what, done, total)
        ends = self._is_shown and done == total
        if ends or now - self._updated_at >= SECONDS_BETWEEN_UPDATES:
            self._updated_at, self._is_shown = now, True
            self._artifact.show(100 * done / total if total else 0.0, _sentence(what, done, total, None) + left)
        if now - self._titled_at >= SECONDS_BETWEEN_TITLES:
            self._titled_at = now
            shown = re.sub(r" \([^()]*\)", "", _sentence(what, done, total, _FACTS_IN_TITLE))
            show_in_title(f"{self._stage.title}: {shown}{left}")
        if now - self._logged_at >= SECONDS_BETWEEN_LINES:
            self._logged_at = now
            _log.info("%s: %s%s", self._stage.title, _sentence(what, done, total, _FACTS_IN_LINES), left)


def _sentence(what: str, done: int, total: int | None, most_facts: int | None) -> str:
    """Return what is done, with at most so many of the facts that follow the work in ``what``."""
    work, *facts = what.split(", ")
    amount = f"{done:,} of {total:,}" if total else f"{done:,}"
    return ", ".join([f"{amount} {work}", *facts[:most_facts]])
