"""The loss curve of an export: a PNG that follows from the witness, so that certification can draw it again."""

import io
from pathlib import Path

from t5train.files.atomic import replacing
from t5train.records.metrics import UNIGRAM
from t5train.records.witness import Witness

LOSS_CURVE = "loss_curve.png"
_LABELS = {
    "loss": "training, all target tokens",
    "validation_loss": "validation, all target tokens",
    "validation_content_loss": "validation, masked tokens",
}
_BASELINE_LABEL = "unigram baseline, masked tokens"
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 8.0, 4.0, 100
_FEW_POINTS = 60


def write_loss_curve(witness: Witness, folder: Path) -> None:
    """Draw the loss curve into ``folder``, unless the witness has none."""
    if witness.curve:
        with replacing(folder / LOSS_CURVE) as file:
            file.write(loss_curve(witness))


def loss_curve(witness: Witness) -> bytes:
    """Return the picture. It depends only on the witness and the version of matplotlib, not on its configuration."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("default"):
        figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        for name, label in _LABELS.items():
            if points := witness.curve.get(name):
                steps, losses = zip(*points, strict=True)
                axes.plot(steps, losses, linewidth=1.2, marker="." if len(points) <= _FEW_POINTS else "", label=label)
        if (baseline := witness.validation.get(UNIGRAM)) is not None:
            axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label=_BASELINE_LABEL)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    return picture.getvalue()
