"""What is shown of a stage while it works: progress in an artifact, in the title of the run's page, and in the log.

Of training, Prefect and the run's folder also show a plot that grows, and the bytes staged on hosts.
"""

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

from infra.head.storage.staged_bytes import StagedBytes
from t5train.files.run_folder import METRICS
from t5train.progress import Progress, silent
from t5train.records.metrics import MetricsSeries
from t5train.report.report_folder import STAGING, TRAINING, write_report, write_table
from t5train.report.time_left import TimeLeft
from t5train.report.training_plot import training_plot
from t5train.spec import RunSpec
from tasks.run_page import not_disturbing, show_in_title, shown_png, shown_progress, shown_table
from tasks.stages import TRAIN, Stage

SECONDS_UNTIL_SHOWN = 2.0
SECONDS_BETWEEN_UPDATES = 1.0
SECONDS_BETWEEN_TITLES = 10.0
SECONDS_BETWEEN_LINES = 10.0
SECONDS_UNTIL_METRICS, SECONDS_BETWEEN_PLOTS = 2.0, 30.0
SECONDS_BETWEEN_TABLES = 1.0
_STAGING_TITLE = "Bytes staged on each host's own disk"
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


class TrainingView:
    """The progress callback of training, and a context manager.

    ``staged`` is to be filled with the bytes that are staged on hosts. The plot is drawn in a thread, at most every 30
    seconds, and once more at the end, so that the supervision of ranks never waits for it.
    """

    def __init__(self, spec: RunSpec, watcher: Progress = silent) -> None:
        self.staged = StagedBytes()
        self._run_folder = spec.run_folder
        self._staging = shown_table("staging")
        self._progress, self._plot = StageProgress(TRAIN, watcher), _Plot(spec)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plot")
        self._drawing: Future[None] | None = None
        self._plotted_at = self._tabled_at = 0.0
        self._rows: list[dict[str, Any]] = []

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report progress, and refresh the plot and the table of hosts if they are due."""
        self._progress(what, done, total)
        now = time.monotonic()
        if now - self._tabled_at >= SECONDS_BETWEEN_TABLES:
            self._tabled_at = now
            self._show_staging()
        seconds = SECONDS_BETWEEN_PLOTS if self._plot.is_drawn else SECONDS_UNTIL_METRICS
        if now - self._plotted_at >= seconds and (self._drawing is None or self._drawing.done()):
            self._plotted_at = now
            self._drawing = self._thread.submit(_in_this_context(self._plot.draw))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=error is None, cancel_futures=True)
        self._show_staging()
        if error is None:
            self._plot.draw()

    def _show_staging(self) -> None:
        rows = [
            {
                "host": host,
                "bytes needed": f"{each.needed:,}",
                "bytes copied": f"{each.copied:,}",
                "already there": f"{each.already_there:,}",
            }
            for host, each in self.staged.by_host().items()
        ]
        if rows != self._rows:
            self._rows = rows
            with not_disturbing("the staged bytes in the run's folder"):
                write_table(self._run_folder, STAGING, _STAGING_TITLE, rows)
            self._staging.show(rows, _STAGING_TITLE)


def _in_this_context(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that finds this thread's task run, to which an artifact belongs, in any thread."""
    context = copy_context()
    return lambda: context.run(function)


class _Plot:
    def __init__(self, spec: RunSpec) -> None:
        self._run_folder, self._num_steps = spec.run_folder, spec.optimizer.num_steps
        self._metrics = MetricsSeries(spec.run_folder / METRICS)
        self._artifact = shown_png("training")
        self.is_drawn = False

    def draw(self) -> None:
        """Read the new metrics, draw the plot, write it to the run's folder and show it."""
        with not_disturbing("the plot of training"):
            self._metrics.refresh()
            if "loss" not in self._metrics.series:
                return
            png = training_plot(self._metrics, self._num_steps)
            self.is_drawn = True
            write_report(self._run_folder, TRAINING, png)
            self._artifact.show(png, f"Training up to step {self._metrics.last_step:,} of {self._num_steps:,}")
