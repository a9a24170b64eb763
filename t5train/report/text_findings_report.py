"""The report on what reading a whole text, and searching it for repetitions, showed: as rows, sentences and a plot."""

import io
from typing import TYPE_CHECKING

from t5train.data.checks.repetitions import COMPARED_SPLITS
from t5train.data.checks.whole_reading import TextFindings
from t5train.quantities import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPLIT_NAMES = ("train", "validation", "test", "test sets")
_KINDS = {
    "passages": "passages",
    "duplicates": "copies of an earlier passage of the split",
    "duplicates_across": "copies between training and held-out text",
    "near_duplicates": "near-duplicates of an earlier passage of the split",
    "near_duplicates_across": "near-duplicates between training and held-out text",
    "listed": "all these and listed pairs, of the split",
    "listed_across": "all these and listed pairs, between training and held-out text",
    "contaminated": "with 13 words in a row in training and held-out text",
    "short": "held-out passages of fewer than 13 words",
}
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 9.0, 3.4, 100


def repetition_rows(findings: TextFindings) -> list[list[str]]:
    """Return one row for each kind of repetition: what it is, and passages by split (``SPLIT_NAMES``).

    Empty if nothing was searched for. A dash stands for what was not.
    """
    counts = findings.repetitions or {}
    rows = [[label, *_of_splits(counts, kind)] for kind, label in _KINDS.items()]
    return [row for row in rows if set(row[1:]) != {"-"}]


def _of_splits(counts: dict[str, int], kind: str) -> list[str]:
    found = [counts.get(f"{split}_{kind}") for split in COMPARED_SPLITS]
    return ["-" if number is None else f"{number:,}" for number in found]


def repetition_lines(findings: TextFindings) -> list[str]:
    """Return sentences that explain the rows."""
    if findings.repetitions is None:
        return []
    lines = [
        "Held-out text is that of validation, test and test sets. Near-duplicates include copies, and are found by "
        "MinHash (5-word runs, 14 buckets of 8 hashes). Of held-out passages of fewer than 13 words, only copies and "
        "near-duplicates are found."
    ]
    if (listed := findings.listed) is not None:
        proposed = "Embeddings" if listed.index is None else f"The index {listed.index}"
        lines.append(
            f"Listed are {quantity(listed.pairs, 'pair')} in {quantity(listed.groups, 'group')} "
            f"(corpus.remove_listed, sha256 {listed.sha256[:12]}). {proposed} proposed {listed.candidates:,} pairs, of "
            f"the {listed.neighbours} nearest neighbours with a cosine of at least {listed.cosine}; the texts of those "
            f"listed share at least {listed.text} of their 5-word runs."
        )
    if (step := findings.repetitions.get("searched_one_run_in", 1)) > 1:
        lines.append(
            f"There is so much held-out text that only one in {step} of its 13-word runs was searched for: more "
            "passages share 13 words than were counted."
        )
    return lines


def length_rows(findings: TextFindings) -> list[list[str]]:
    """Return one row for each range of lengths: the range in bytes of UTF-8, and the number of passages."""
    return [
        [f"{1 << (bits - 1):,} to {(1 << bits) - 1:,} bytes", f"{number:,}"]
        for bits, number in findings.lengths.items()
    ]


def findings_plot(findings: TextFindings) -> bytes:
    """Return a PNG, 900 pixels wide: the lengths of passages, and the share that repeats others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, layout="constrained")
    lengths, repetitions = figure.subplots(1, 2)
    _draw_lengths(lengths, findings)
    _draw_repetitions(repetitions, findings)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _draw_lengths(axes: "Axes", findings: TextFindings) -> None:
    starts = [2.0 ** (bits - 1) for bits in findings.lengths]
    axes.bar(starts, list(findings.lengths.values()), width=starts, align="edge", edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a passage")
    axes.set_ylabel("passages")


def _draw_repetitions(axes: "Axes", findings: TextFindings) -> None:
    counts = findings.repetitions or {}
    kinds = [kind for kind in _KINDS if kind != "passages" and f"train_{kind}" in counts]
    splits = [split for split in COMPARED_SPLITS if counts.get(f"{split}_passages")]
    height = 0.8 / max(1, len(splits))
    for place, split in enumerate(splits):
        shares = [100 * counts[f"{split}_{kind}"] / counts[f"{split}_passages"] for kind in kinds]
        axes.barh([row + place * height for row in range(len(kinds))], shares, height, label=split.replace("_", " "))
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(kinds))], [each.replace("_", " ") for each in kinds])
    axes.invert_yaxis()
    axes.set_xlabel("% of the split's passages")
    if splits:
        axes.legend(fontsize=8)
