"""The plot of a run's training: small multiples in one PNG. matplotlib is imported when the first one is drawn."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from t5train.records.metrics import GENERATED, HIGHEST_EXPERT, LOWEST_EXPERT, UNIGRAM_OF_TARGETS, MetricsSeries, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES, _LOSS_INCHES, _ROW_INCHES, _DOTS_PER_INCH = 9.0, 3.4, 1.9, 100
_FEW_POINTS = 60
_LEVELS = 16


class _Line(NamedTuple):
    name: str
    label: str


class _Panel(NamedTuple):
    title: str
    lines: tuple[_Line, ...]


_LOSSES = _Panel(
    "Loss (nats per token)",
    (
        _Line("loss", "training, all target tokens"),
        _Line("validation_loss", "validation, all target tokens"),
        _Line("validation_content_loss", "validation, masked tokens"),
    ),
)
_BASELINE_LABEL, _BASELINE_OF_TARGETS_LABEL = "unigram baseline, masked tokens", "unigram baseline, all target tokens"
_RATE = "Tokens per second"
_SMALL = (
    _Panel(
        "Share of held-out pairs that is predicted right",
        (_Line("validation_exact_match", "whole targets"), _Line("validation_token_accuracy", "target tokens")),
    ),
    _Panel("Scores of generated text (0 to 100)", tuple(_Line(name, label) for name, label in GENERATED.items())),
    _Panel("Learning rate", (_Line("learning_rate", ""),)),
    _Panel(_RATE, (_Line("tokens_per_second", ""),)),
    _Panel("MFU (share of the accelerators' peak)", (_Line("mfu", ""),)),
    _Panel("Skipped steps so far", (_Line("skipped_steps", ""),)),
    _Panel(
        "Tokens of an expert (1 is an even share)",
        (_Line(LOWEST_EXPERT, "least used"), _Line(HIGHEST_EXPERT, "most used")),
    ),
    _Panel("Share of dropped tokens", (_Line("dropped_tokens", ""),)),
    _Panel("Wait for data (seconds of a step)", (_Line("data_wait_seconds", ""),)),
)
_FROM_ZERO = {"tokens_per_second", "mfu", "skipped_steps", LOWEST_EXPERT, "dropped_tokens", "data_wait_seconds"}


def training_plot(metrics: MetricsSeries, num_steps: int) -> bytes:
    """Return the PNG, 900 pixels wide: losses against the unigram baseline, and below them one panel for each series.

    A series without values, such as MFU on a CPU, has no panel. If a line stands for several steps per pixel, it is
    their mean, and a pale band is their range.
    """
    from matplotlib.figure import Figure

    panels = [panel for panel in _SMALL if any(line.name in metrics.series for line in panel.lines)]
    rows = -(-len(panels) // 2)
    height = _LOSS_INCHES + rows * _ROW_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(f"step {metrics.last_step:,} of {num_steps:,}", fontsize=10)
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=[_LOSS_INCHES, *[_ROW_INCHES] * rows])
    _draw_losses(figure.add_subplot(grid[0, :]), metrics)
    for number, panel in enumerate(panels):
        _draw(figure.add_subplot(grid[1 + number // 2, number % 2]), panel, metrics)
    return _png(figure)


def _draw_losses(axes: "Axes", metrics: MetricsSeries) -> None:
    _draw(axes, _LOSSES, metrics)
    if metrics.baseline is not None:
        label = _BASELINE_OF_TARGETS_LABEL if UNIGRAM_OF_TARGETS in metrics.newest else _BASELINE_LABEL
        axes.axhline(metrics.baseline, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.legend(fontsize=8, loc="upper right")


def _draw(axes: "Axes", panel: _Panel, metrics: MetricsSeries) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.title == _RATE:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_title(panel.title, fontsize=9, loc="left")
    for line in panel.lines:
        if line.name in metrics.series:
            _draw_line(axes, line, metrics.series[line.name])
    if _FROM_ZERO & {line.name for line in panel.lines}:
        axes.set_ylim(bottom=0, top=None if any(axes.dataLim.get_points()[:, 1]) else 1)
    if all(line.label for line in panel.lines):
        axes.legend(fontsize=8, loc="upper right")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _draw_line(axes: "Axes", line: _Line, series: Series) -> None:
    steps = [bucket.step for bucket in series.buckets]
    marker = "." if len(steps) <= _FEW_POINTS else ""
    (drawn,) = axes.plot(steps, _values(series, "mean"), linewidth=1, marker=marker, markersize=4, label=line.label)
    if any(bucket.points > 1 for bucket in series.buckets):
        axes.fill_between(
            steps, _values(series, "low"), _values(series, "high"), color=drawn.get_color(), alpha=0.2, linewidth=0
        )


def _values(series: Series, name: str) -> Sequence[float]:
    return [getattr(bucket, name) for bucket in series.buckets]


def _png(figure: "Figure") -> bytes:
    """Return the figure as a PNG with 16 levels of each colour, which halves the size of noisy curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    colours = np.asarray(canvas.buffer_rgba())[..., :3]
    step = 255 // (_LEVELS - 1)
    picture = io.BytesIO()
    imsave(picture, ((colours.astype(np.uint16) + step // 2) // step * step).astype(np.uint8), format="png")
    return picture.getvalue()
