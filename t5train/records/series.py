"""A run's metrics as series of bounded size, read from the growing file without reading any line twice."""

import math
from collections.abc import Iterator
from pathlib import Path

from t5train.records.metrics import STARVING, UNIGRAM, VALIDATION, Values, parse_line

CAPACITY = 256
_EXPERT = "/expert_"
LOWEST_EXPERT, HIGHEST_EXPERT = "lowest_expert", "highest_expert"
"""Series of how many tokens the least and the most used expert of any layer got, relative to an even share."""
PLOTTED = (
    "loss",
    "validation_loss",
    "validation_content_loss",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "skipped_steps",
    "dropped_tokens",
    "data_wait_seconds",
)


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
        self.baseline = values.get(UNIGRAM) or self.baseline
        if values.get(VALIDATION) is not None:
            self.validated_step = step
        self.newest |= {name: value for name in (*PLOTTED, UNIGRAM) if (value := values.get(name)) is not None}
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
