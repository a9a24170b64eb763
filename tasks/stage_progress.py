"""What Prefect shows of a stage while it works: a progress artifact, and the title of the run's page."""

import logging
import time

from t5train.progress import Progress, silent
from t5train.report.time_left import TimeLeft, duration
from tasks.artifacts import shown_progress
from tasks.run_title import show_in_title
from tasks.stages import Stage

SECONDS_UNTIL_SHOWN = 2.0
SECONDS_BETWEEN_UPDATES = 1.0
SECONDS_BETWEEN_TITLES = 10.0
SECONDS_BETWEEN_LINES = 10.0
_log = logging.getLogger(__name__)


class StageProgress:
    """A progress callback that updates one artifact, at most once per second, and logs every ten seconds.

    It also shows the progress in the title of the run's page, every ten seconds, and passes every call on to
    ``watcher``.

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
        self._unit = ""
        show_in_title(stage.title)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` units of ``what``. An existing artifact is always updated at the end."""
        self._watcher(f"{self._stage.title}: {what}", done, total)
        now = time.monotonic()
        sentence = self._sentence(now, what, done, total)
        ends = self._is_shown and done == total
        if ends or now - self._updated_at >= SECONDS_BETWEEN_UPDATES:
            self._updated_at, self._is_shown = now, True
            self._artifact.show(100 * done / total if total else 0.0, sentence)
        if now - self._titled_at >= SECONDS_BETWEEN_TITLES:
            self._titled_at = now
            show_in_title(f"{self._stage.title}: {sentence}")
        if now - self._logged_at >= SECONDS_BETWEEN_LINES:
            self._logged_at = now
            _log.info("%s: %s", self._stage.title, sentence)

    def _sentence(self, now: float, what: str, done: int, total: int | None) -> str:
        if not total:
            return f"{done:,} {what}"
        if (unit := what.partition(",")[0]) != self._unit:
            self._unit, self._time_left = unit, TimeLeft()
        left = self._time_left.seconds(now, done, total)
        return f"{done:,} of {total:,} {what}" + (f", {duration(left)} left" if left is not None and left > 0 else "")
