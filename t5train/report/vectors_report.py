"""What was found about a FAISS index and about near-duplicates: as rows, JSON values and plots."""

from typing import TYPE_CHECKING, Any

import numpy as np

from t5train.data.vectors.index_check import IndexReport
from t5train.data.vectors.near_duplicates import BINS, NearDuplicates, Thresholds
from t5train.quantities import quantity
from t5train.report.data_statistics import plots_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHECK_COLUMNS = ["check", "expected", "found", "result"]


def check_rows(report: IndexReport) -> list[list[str]]:
    """Return one row per check, with the columns ``CHECK_COLUMNS``."""
    return [[each.what, each.expected, each.found, "passed" if each.passed else "FAILED"] for each in report.checks]


def index_lines(report: IndexReport) -> list[str]:
    """Return sentences about an index."""
    lines = []
    if report.facts is not None:
        lines.append(f"{report.facts.kind}, {quantity(report.size_bytes, 'byte')}")
    if report.recall:
        shown = {1, len(report.recall) // 2, len(report.recall)} - {0}
        lines.append(", ".join(f"recall@{rank} {report.recall[rank - 1]:.4f}" for rank in sorted(shown)))
    if report.recorded is not None:
        lines.append(f"recall recorded for later checks: {report.recorded}")
    return lines


def index_values(report: IndexReport) -> dict[str, Any]:
    """Return the same as JSON values; docs/reference/json.md describes them."""
    facts = report.facts
    return {
        "passed": report.passed,
        "kind": facts and facts.kind,
        "vectors": facts and facts.vectors,
        "dimension": facts and facts.dimension,
        "metric": facts and facts.metric,
        "bytes": report.size_bytes,
        "checks": [each._asdict() for each in report.checks],
        "recall": report.recall,
        "recorded": None if report.recorded is None else str(report.recorded),
    }


def near_duplicate_rows(found: NearDuplicates) -> list[list[str]]:
    """Return rows of two columns: what was counted, and the number."""
    return [
        ["passages", f"{found.passages:,}"],
        ["pairs with similar embeddings", f"{found.candidates:,}"],
        ["pairs with similar texts", f"{found.pairs:,}"],
        ["groups", f"{found.groups:,}"],
        ["passages that are not the first of their group", f"{found.copies:,}"],
    ]


def near_duplicate_values(found: NearDuplicates, thresholds: Thresholds) -> dict[str, Any]:
    """Return the same and the thresholds as JSON values; docs/reference/json.md describes them."""
    return {**found._asdict(), **thresholds._asdict()}


def recall_plot(report: IndexReport) -> bytes:
    """Return a PNG: recall by the number of neighbours."""

    def draw(axes: "Axes") -> None:
        axes.plot(range(1, len(report.recall) + 1), report.recall, marker="o")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("neighbours (k)")
        axes.set_ylabel("recall@k")

    return plots_png(draw)


def similarity_plot(found: NearDuplicates, thresholds: Thresholds) -> bytes:
    """Return a PNG: pairs with similar embeddings by the similarity of their texts."""

    def draw(axes: "Axes") -> None:
        axes.stairs(found.histogram, np.linspace(0, 1, BINS + 1), fill=True)
        axes.axvline(thresholds.text, color="grey", linestyle=":", label=f"near-duplicates from {thresholds.text}")
        axes.set_xlabel("similarity of the texts (Jaccard index of word 5-grams)")
        axes.set_ylabel("pairs with similar embeddings")
        axes.legend(fontsize=8)

    return plots_png(draw)
