"""The losses of a run as a picture."""

import base64
import io
from pathlib import Path

from t5train.train.metrics import Values, read

TRAINING, VALIDATION = "loss", "validation_loss"


def loss_curve_png(metrics: Path) -> bytes:
    """Training and validation loss by step, as PNG, from a run's ``metrics.jsonl``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read(metrics)
    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(*_series(lines, TRAINING), linewidth=1, label="training")
    axes.plot(*_series(lines, VALIDATION), marker="o", markersize=4, label="validation")
    axes.set(xlabel="optimizer step", ylabel="nats per target token, sentinels too")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def data_url(png: bytes) -> str:
    """The picture as a URL that carries it, as an artifact has no files beside it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _series(lines: list[Values], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"] or 0, line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value or 0.0 for _, value in points]
