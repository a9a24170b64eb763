"""The summary of a run: its losses, the plot of training, and the lineage from the text to the publication."""

from collections.abc import Iterable, Mapping, Sequence

from t5train.quantities import quantity
from t5train.records.metrics import Values
from t5train.records.stage_records import Publication, Record
from t5train.release.markdown import code, page, table
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
    return f"{quantity(len(saved), 'checkpoint')}, which paused training for {stood:.1f} s: {share:.2%} of its time"


def data_wait_line(lines: Iterable[Values]) -> str:
    """Return the share of the steps' time in which rank 0 waited for data."""
    taken = [(line.get("data_wait_seconds") or 0.0, line.get("seconds") or 0.0) for line in lines]
    waited, seconds = (sum(each) for each in zip(*taken, strict=True)) if taken else (0.0, 0.0)
    return f"waiting for data: {waited:.1f} s, {waited / seconds if seconds else 0.0:.2%} of the time of all steps"


def summary_report(
    spec: RunSpec,
    stages: Mapping[str, Record],
    publication: Publication,
    results: Sequence[str],
    picture: str,
    pages: Mapping[str, str],
) -> str:
    """Return the summary as Markdown.

    ``stages`` has the records of all stages by their titles, in their order. ``results`` are sentences such as the
    losses. ``picture`` is the URL of the plot, and ``pages`` has the URLs of the other reports by title.
    """
    return page(
        f"# {spec.run_name}",
        f"Recipe {code(spec.recipe)}, {quantity(spec.optimizer.num_steps, 'step')}.",
        f"Published with its certificate: {code(publication.url)}",
        " · ".join(f"[{title}]({url})" for title, url in pages.items()),
        "\n".join(f"- {each}" for each in results),
        f"![Training and validation loss]({picture})",
        "## Lineage",
        "Every stage records the fingerprints of what it was made from. The digest is the sha256 of its manifest, "
        "which lists the digest of every file.",
        table(
            ("stage", "made from", "fingerprint", "digest", "counts", "folder"),
            (_row(title, record) for title, record in stages.items()),
        ),
    )


def _row(title: str, record: Record) -> tuple[str, ...]:
    made_from = ", ".join(f"{name} {fingerprint[:12]}" for name, fingerprint in record.inputs.items())
    counts = ", ".join(f"{name} {value:,}" for name, value in record.counts.items())
    folder = record.url if isinstance(record, Publication) else record.path
    return title, made_from or "-", code(record.fingerprint[:12]), code(record.seal[:12]), counts, code(folder)
