"""The last page of a run: what it reached, its loss curve, and where it is published."""

import logging
import shlex
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from t5train.locations import local_folder
from t5train.records import Checkpoint, Publication
from t5train.run_files import METRICS, WITNESS_FOLDER
from t5train.spec import RunSpec
from t5train.train import metrics
from t5train.witness import Witness
from tasks.loss_curve import data_url, loss_curve_png
from tasks.loss_lines import loss_lines
from tasks.saving_time import saving_line

_log = logging.getLogger(__name__)


@task(name="summary", cache_policy=NO_CACHE)
def summarise(spec: RunSpec, checkpoint: Checkpoint, publication: Publication) -> None:
    """Leave a summary with the loss curve, and a link to what was published."""
    losses = Witness.load(spec.run_folder / WITNESS_FOLDER).validation
    lines = [*loss_lines(losses), saving_line(metrics.read(spec.run_folder / METRICS))]
    for line in lines:
        _log.info("%s", line)
    curve = data_url(loss_curve_png(spec.run_folder / METRICS))
    create_markdown_artifact(page(spec, checkpoint, publication, lines, curve), "summary", "What the run reached")
    check = f"To verify it: t5-pretrain verify {shlex.quote(publication.url)}"
    create_link_artifact(link(publication.url), f"published: {publication.url}", key="published", description=check)


def page(spec: RunSpec, checkpoint: Checkpoint, publication: Publication, reached: Sequence[str], curve: str) -> str:
    """Markdown; ``curve`` is the URL of the picture."""
    parts = [
        f"# {spec.run_name}",
        f"Recipe `{spec.recipe}`, {checkpoint.step:,} steps, run `{checkpoint.fingerprint[:12]}`.",
        f"Published with its certificate: `{publication.url}`",
        f"![Training and validation loss]({curve})",
        "\n".join(f"- {line}" for line in reached),
    ]
    return "\n\n".join(parts) + "\n"


def link(url: str) -> str:
    """The URL itself, or one for a folder of this machine."""
    folder = local_folder(url)
    return folder.as_uri() if folder else url
