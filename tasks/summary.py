"""The summary of a run: losses, loss curve, time spent on saving checkpoints, and the publication's URL."""

import base64
import io
import logging
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from t5train import metrics
from t5train.files.run_folder import METRICS, WITNESS_FOLDER
from t5train.locations import local_folder
from t5train.metrics import Values, loss_lines
from t5train.records.stage_records import Checkpoint, Publication
from t5train.records.witness import Witness
from t5train.spec import RunSpec


def saving_line(lines: Iterable[Values]) -> str:
    """Return how long saving paused training, in seconds and as a share of the time for steps and saving together.

    Steps that were lost and trained again are counted once.
    """
    saved, trained = [], 0.0
    for line in lines:
        trained += line.get("seconds") or 0.0
        if (seconds := line.get("save_seconds")) is not None:
            saved.append(seconds)
    stood = sum(saved)
    share = stood / (stood + trained) if saved else 0.0
    return f"{len(saved)} checkpoints, which paused training for {stood:.1f} s: {share:.2%} of its time"


TRAINING, VALIDATION = "loss", "validation_loss"


def loss_curve_png(path: Path) -> bytes:
    """Plot training and validation loss by step, from a run's ``metrics.jsonl``; return the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = metrics.read(path)
    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(*_series(lines, TRAINING), linewidth=1, label="training")
    axes.plot(*_series(lines, VALIDATION), marker="o", markersize=4, label="validation")
    axes.set(xlabel="optimizer step", ylabel="nats per target token, including sentinels")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def data_url(png: bytes) -> str:
    """Return the picture as a data URL, because an artifact cannot have attached files."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _series(lines: list[Values], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"] or 0, line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value or 0.0 for _, value in points]


_log = logging.getLogger(__name__)


@task(name="summary", cache_policy=NO_CACHE)
def summarise(spec: RunSpec, checkpoint: Checkpoint, publication: Publication) -> None:
    """Create artifacts: a summary with the loss curve, and a link to the publication."""
    losses = Witness.load(spec.run_folder / WITNESS_FOLDER).validation
    lines = [*loss_lines(losses), saving_line(metrics.read(spec.run_folder / METRICS))]
    for line in lines:
        _log.info("%s", line)
    curve = data_url(loss_curve_png(spec.run_folder / METRICS))
    create_markdown_artifact(page(spec, checkpoint, publication, lines, curve), "summary", "Summary of the run")
    check = f"To verify it: t5-pretrain verify {shlex.quote(publication.url)}"
    create_link_artifact(link(publication.url), f"published: {publication.url}", key="published", description=check)


def page(spec: RunSpec, checkpoint: Checkpoint, publication: Publication, reached: Sequence[str], curve: str) -> str:
    """Return the summary as Markdown; ``curve`` is the URL of the picture."""
    parts = [
        f"# {spec.run_name}",
        f"Recipe `{spec.recipe}`, {checkpoint.step:,} steps, run `{checkpoint.fingerprint[:12]}`.",
        f"Published with its certificate: `{publication.url}`",
        f"![Training and validation loss]({curve})",
        "\n".join(f"- {line}" for line in reached),
    ]
    return "\n\n".join(parts) + "\n"


def link(url: str) -> str:
    """Return the URL itself, or a ``file://`` URL for a local folder."""
    folder = local_folder(url)
    return folder.as_uri() if folder else url
