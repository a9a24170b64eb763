"""The metrics of a run: written by rank 0 as lines, for TensorBoard and as a table, and read as lines or as series.

``metrics.jsonl`` has one line per step. Series have a bounded size; they are read from the growing file without reading
any line twice.
"""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from t5train.files.atomic import write_text

Values = dict[str, float | int | None]
_log = logging.getLogger(__name__)


class Metrics:
    """Appends to ``metrics.jsonl``, to TensorBoard's folder and, if asked for, to ``metrics.csv``; a context manager.

    ``recorded`` has the last values in the lines of earlier attempts, by name.
    """

    def __init__(self, path: Path, tensorboard: Path, resume_step: int, csv: Path | None = None) -> None:
        """Remove the lines of steps after ``resume_step``: they are from an earlier attempt, and are trained again.

        ``csv`` is the path of ``metrics.csv``; None: it is not written.
        """
        from torch.utils.tensorboard import SummaryWriter  # imported here: the head reads metrics without torch

        path.parent.mkdir(parents=True, exist_ok=True)  # the head may have created it on its own disk only
        kept = drop_after(path, resume_step)
        self.recorded = {name: value for line in kept for name, value in line.items()}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - this object is the context manager
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=resume_step + 1)
        self._csv = None if csv is None else MetricsCsv(csv, kept)

    def write(self, step: int, values: Values) -> None:
        """Write one line ``{"step": step, **values}`` and flush it to the kernel."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._csv:
            self._csv.write({"step": step, **values})
        for name, value in values.items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._csv:
            self._csv.close()
        self._tensorboard.close()


def read(path: Path) -> list[Values]:
    """Return all complete lines; the last one may still be incomplete. Damaged lines are skipped with a warning."""
    if not path.exists():
        return []
    found: list[Values] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        if (values := parse_line(line)) is None:
            _log.warning("%s: skipped a damaged line: %.80r", path, line)
        else:
            found.append(values)
    return found


def parse_line(line: bytes) -> Values | None:
    """Return the values of a line; None for a damaged one, because a damaged log must not stop a run."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def drop_after(path: Path, step: int) -> list[Values]:
    """Remove the lines of steps after ``step``, which an earlier attempt wrote; return the others."""
    kept = [line for line in read(path) if int(line["step"] or 0) <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


_TAIL_BYTES = 64 << 10


def last_metrics(path: Path) -> Values | None:
    """Return the newest complete line with a loss. Reads only the end of the file, as it is called twice a second."""
    steps = (parse_line(line) for line in reversed(_last_lines(path)) if b'"loss"' in line)
    return next((step for step in steps if step is not None), None)


def recent_metrics(path: Path) -> list[Values]:
    """Return the complete lines at the end of the file, some hundreds, oldest first. Damaged lines are skipped."""
    return [values for line in _last_lines(path) if (values := parse_line(line)) is not None]


def _last_lines(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


STARVING = "starving_experts"
TRAINING_LOSS = "training loss (all target tokens)"
"""How the loss of a step is labelled: it includes sentinels, so it compares with neither of the next two."""
UNIGRAM = "unigram_content_loss"
VALIDATION = "validation_content_loss"
VALIDATION_OF_TARGETS = "validation_loss"
TEST = "test_content_loss"
LOSSES = {
    VALIDATION: "validation, masked tokens",
    UNIGRAM: "unigram baseline, the same tokens",
    "shuffled_content_loss": "validation, the same tokens, encoder inputs shuffled across the batch",
}
"""The three losses (nats per token) that show whether the model learned from its inputs."""
UNIGRAM_OF_TARGETS, SHUFFLED_OF_TARGETS = "unigram_loss", "shuffled_loss"
LOSSES_OF_PAIRS = {
    VALIDATION_OF_TARGETS: "validation, target tokens",
    UNIGRAM_OF_TARGETS: "unigram baseline, the same tokens",
    SHUFFLED_OF_TARGETS: "validation, the same tokens, sources shuffled across the batch",
}
"""The same of a run on pairs, where every target token counts."""
EXACT_MATCH = "validation_exact_match"
"""The share of the pairs of the validation split of which every target token is predicted right."""
GENERATED = {
    "validation_bleu": "BLEU",
    "validation_chrf": "chrF",
    "validation_rougeL": "ROUGE-L",
    "validation_generated_exact_match": "exact match of generated text",
}
"""The metrics of validations that are scores of generated text, from 0 to 100, and their names for people."""
PREDICT_SHARE, PREDICTED_PAIRS = "predict_share", "predicted_pairs"
"""The share of an attempt's time that went into predictions of its validations so far, and how many pairs each has."""
_SHARES = {
    "token_accuracy": "target tokens that are predicted right, given those before them",
    "exact_match": "exact match, pairs of which every target token is predicted right",
}


OF_ONE_TASK = "_of_task_"


def of_task(metric: str, task: int) -> str:
    """Return the name of a metric or count of one task of a run on several; tasks are numbered as in pairs.train."""
    return f"{metric}{OF_ONE_TASK}{task}"


def loss_lines(losses: Mapping[str, Any], tasks: Sequence[str] = (), *, is_trial: bool = False) -> list[str]:
    """Return the losses as text, one line each, and a last line if the model has learned nothing.

    Of a run on pairs, shares that are predicted right follow the losses, with the names of ``tasks`` for those of
    single tasks. Of a trial, which has few steps, having learned nothing is expected.
    """
    shown = LOSSES | {TEST: "test split, masked tokens"}
    if UNIGRAM_OF_TARGETS in losses:
        shown = LOSSES_OF_PAIRS | {"test_loss": "test split, target tokens"}
    lines = [
        f"{losses[name]:.4f} nats/token: {meaning}" for name, meaning in shown.items() if losses.get(name) is not None
    ]
    for split, title in (("validation", "validation"), ("test", "test split")):
        lines += _share_lines(losses, split, title, tasks)
    if has_learned_nothing(losses) and is_trial:
        lines.append(
            "The trial has succeeded. So few steps cannot teach a model more than the unigram baseline knows: a trial "
            "shows that the layout trains, saves and exports, not how well it learns"
        )
    elif has_learned_nothing(losses):
        data = "pairs" if UNIGRAM_OF_TARGETS in losses else "text"
        lines.append(
            "The model predicts no better than the unigram baseline. If the validation loss was lower before, train "
            f"for fewer steps or on more {data}; otherwise train for more steps, or lower optimizer.peak_learning_rate"
        )
    return lines


def _share_lines(losses: Mapping[str, Any], split: str, title: str, tasks: Sequence[str]) -> Iterator[str]:
    """Yield the shares of a split that are predicted right and, of several tasks, the exact match of each."""
    for name, meaning in _SHARES.items():
        if (share := losses.get(f"{split}_{name}")) is not None:
            yield f"{share:.2%}: {title}, {meaning}"
    if of_tasks := exact_matches(losses, split, tasks):
        shares = ", ".join(f"{task} {share:.2%}" for task, share in of_tasks.items())
        yield f"exact match of each task, {title}: {shares}"


def exact_matches(losses: Mapping[str, Any], split: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the exact match of each of several tasks that was measured, by name; empty for a single one."""
    found = {task: losses.get(of_task(f"{split}_exact_match", number)) for number, task in enumerate(tasks)}
    return {task: share for task, share in found.items() if share is not None} if len(tasks) > 1 else {}


def has_learned_nothing(losses: Mapping[str, Any]) -> bool:
    """Return whether both losses are known, and that on held-out text is not below the unigram baseline."""
    loss, baseline = beside_baseline(losses)
    return loss is not None and baseline is not None and loss >= baseline


def beside_baseline(losses: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the loss on held-out text, and the unigram baseline's loss of the same tokens; None if not known."""
    if UNIGRAM_OF_TARGETS in losses:
        return losses.get(VALIDATION_OF_TARGETS), losses[UNIGRAM_OF_TARGETS]
    return losses.get(VALIDATION), losses.get(UNIGRAM)


COLUMNS = (
    *("step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "tokens_seen"),
    *("memory_bytes", "host_memory_bytes", "data_wait_seconds", "skipped_steps"),
    *("seconds", "cpu_seconds", "process_cpu_seconds", "save_seconds"),
    *("router_loss", "dropped_tokens"),
    *("validation_loss", "validation_content_loss", "unigram_content_loss", "shuffled_content_loss"),
    *("test_loss", "test_content_loss"),
    "validate_seconds",
    *("real_tokens_per_second", "validation_token_accuracy", "validation_exact_match", "unigram_loss", "shuffled_loss"),
    *("test_token_accuracy", "test_exact_match"),
    *(*GENERATED, "predict_seconds", PREDICT_SHARE, PREDICTED_PAIRS),
)
"""The columns, in order. Later versions add new ones at the end only. Single experts and tasks have no column."""


class MetricsCsv:
    """Appends rows to ``metrics.csv``; a value that a line does not have is an empty field."""

    def __init__(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the file with one row for each of ``lines``, the current content of ``metrics.jsonl``.

        After a resume, this removes the rows of steps that will be trained again. It also fills in earlier steps if the
        file is enabled partway through a run.
        """
        table = io.StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for line in lines if (row := _row(line)))
        write_text(path, table.getvalue())
        self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 - stays open until close() is called
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one row and flush it to the kernel; a line with no value in any column is left out."""
        if row := _row(line):
            self._writer.writerow(row)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(line: Mapping[str, Any]) -> list[Any]:
    row = [line.get(name) for name in COLUMNS]
    return row if any(value is not None for value in row[1:]) else []


CAPACITY = 256
_EXPERT = "/expert_"
LOWEST_EXPERT, HIGHEST_EXPERT = "lowest_expert", "highest_expert"
"""Series of how many tokens the least and the most used expert of any layer got, relative to an even share."""
PLOTTED = (
    "loss", "validation_loss", "validation_content_loss", "learning_rate", "tokens_per_second", "mfu", "skipped_steps",
    "dropped_tokens", "data_wait_seconds", "validation_token_accuracy", "validation_exact_match", *GENERATED,
)  # fmt: skip


CURVE = ("loss", "validation_loss", "validation_content_loss")
"""The series of a loss curve."""


class Bucket:
    """Values of consecutive points: their number, the first step, and the sum, minimum and maximum of the values."""

    __slots__ = ("high", "low", "points", "step", "total")

    def __init__(self, step: int, value: float) -> None:
        self.points, self.step = 1, step
        self.total = self.low = self.high = value

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return self.total / self.points

    def add(self, later: "Bucket") -> None:
        """Add the points of a later bucket."""
        self.points += later.points
        self.total += later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)


class Series:
    """Points in at most ``CAPACITY`` buckets. If there are more points, buckets hold two, four, eight ... of them."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._points_per_bucket = 1

    def add(self, step: int, value: float) -> None:
        """Add a point; steps must not decrease."""
        point = Bucket(step, value)
        if self.buckets and self.buckets[-1].points < self._points_per_bucket:
            self.buckets[-1].add(point)
            return
        if len(self.buckets) == CAPACITY:
            self._halve()
        self.buckets.append(point)

    def _halve(self) -> None:
        for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            first.add(second)
        self.buckets = self.buckets[::2]
        self._points_per_bucket *= 2


class MetricsSeries:
    """The series of one run, and the loss of its unigram baseline once that is known.

    ``newest`` has the newest value of each series and of the baseline. ``validated_step`` is the step after which the
    newest validation took place.
    """

    def __init__(self, path: Path) -> None:
        """``path`` is the run's ``metrics.jsonl``, which need not exist yet."""
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.series: dict[str, Series] = {}
        self.newest: dict[str, float] = {}
        self.baseline: float | None = None
        self.last_step = self.validated_step = 0
        self._offset, self._remembered = 0, b""

    def refresh(self) -> None:
        """Read the lines that were added since the last call.

        If the last of these is no longer there, because training resumed at an earlier step, reads the whole file.
        """
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._remembered))
            if file.read(len(self._remembered)) != self._remembered:
                self._begin()
                file.seek(0)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                self._remembered = line
                if (values := parse_line(line)) is not None:
                    self._add(values)

    def _add(self, values: Values) -> None:
        step = int(values["step"] or 0)
        self.last_step = max(self.last_step, step)
        self.baseline = values.get(UNIGRAM) or values.get(UNIGRAM_OF_TARGETS) or self.baseline
        if values.get(VALIDATION_OF_TARGETS) is not None:
            self.validated_step = step
        named = (*PLOTTED, UNIGRAM, UNIGRAM_OF_TARGETS, PREDICT_SHARE, PREDICTED_PAIRS)
        self.newest |= {name: value for name in named if (value := values.get(name)) is not None}
        plotted = [(name, value) for name in PLOTTED if (value := values.get(name)) is not None]
        shares = _expert_shares(values) if STARVING in values else ()
        for name, value in [*plotted, *shares]:
            if math.isfinite(value):
                self.series.setdefault(name, Series()).add(step, value)


def loss_curve_points(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points (step, mean loss) of the series in CURVE, at most ``CAPACITY`` of each."""
    found = MetricsSeries(metrics)
    found.refresh()
    return {
        name: [(bucket.step, bucket.mean) for bucket in found.series[name].buckets]
        for name in CURVE
        if name in found.series
    }


def _expert_shares(values: Values) -> Iterator[tuple[str, float]]:
    """Yield the smallest and the largest share of any expert, relative to an even share of its layer's tokens."""
    layers: dict[str, list[float]] = {}
    for name, tokens in values.items():
        if _EXPERT in name:
            layers.setdefault(name.partition(_EXPERT)[0], []).append(tokens or 0.0)
    shares = [count * len(counts) / sum(counts) for counts in layers.values() if sum(counts) for count in counts]
    if shares:
        yield LOWEST_EXPERT, min(shares)
        yield HIGHEST_EXPERT, max(shares)
