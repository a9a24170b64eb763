"""Scores of predictions as rows and as a report."""

from collections.abc import Iterator, Mapping, Sequence

from t5train.inference.score.scores import PairedTest, Scores
from t5train.quantities import quantity
from t5train.release.markdown import code, escaped, page, table

ALL_ROWS = "all rows"
SCORE_COLUMNS = ["task", "metric", "score", "interval of 95%"]
DIFFERENCE_COLUMNS = ["task", "metric", "first", "second", "difference", "p"]
CLASS_COLUMNS = ["task", "class", "rows", "predicted", "accuracy"]
_MEANING = """\
Scores are from 0 to 100. BLEU and chrF are those of sacrebleu, and ROUGE is the mean F1 of rouge-score, which compares
only the letters a to z and digits. `exact_match` counts hypotheses that equal their reference, but for white space at
the ends. `token_f1` is the mean F1 of words as in SQuAD: without case, ASCII punctuation and English articles.
Intervals are of {resamples} with seed {seed}."""
_TESTED = """\
Differences are the second file's score less the first's. The p-value is that of sacrebleu's paired bootstrap test, for
all metrics on the same resamples: how probable a difference of this size is if the files are equally good. Of many
tests, some have a low p-value by chance."""


def score_rows(scores: Scores) -> list[list[str]]:
    """Return one row for each score, with the columns ``SCORE_COLUMNS``."""
    return [
        [each.task or ALL_ROWS, each.metric, f"{each.score:.2f}", f"{each.mean:.2f} ± {each.half_interval:.2f}"]
        for each in scores.scores
    ]


def difference_rows(tests: Sequence[PairedTest]) -> list[list[str]]:
    """Return one row for each test, with the columns ``DIFFERENCE_COLUMNS``."""
    return [
        [
            *(each.task or ALL_ROWS, each.metric, f"{each.baseline:.2f}", f"{each.other:.2f}"),
            *(f"{each.difference:+.2f}", f"{each.p_value:.4f}"),
        ]
        for each in tests
    ]


def class_rows(scores: Scores) -> list[list[str]]:
    """Return one row for each class, with the columns ``CLASS_COLUMNS``."""
    return [
        [each.task or ALL_ROWS, each.label, f"{each.rows:,}", f"{each.predicted:,}", f"{each.accuracy:.2f}"]
        for each in scores.classes
    ]


def count_lines(scores: Scores) -> Iterator[str]:
    """Yield what was scored of each task, as lines."""
    for each in scores.groups:
        empty = "1 hypothesis is" if each.empty == 1 else f"{each.empty:,} hypotheses are"
        yield f"{each.task or ALL_ROWS}: {quantity(each.rows, 'row')}; {empty} empty, {each.cut:,} cut before their end"


def signature_lines(scores: Scores) -> list[str]:
    """Return the metrics of each signature, as lines."""
    metrics: dict[str, dict[str, None]] = {}
    for each in scores.scores:
        metrics.setdefault(each.signature, {})[each.metric] = None
    return [f"{', '.join(names)}: {signature}" for signature, names in metrics.items()]


def scores_report(files: Mapping[str, Scores], tests: Sequence[PairedTest] = ()) -> str:
    """Return the report on the scores of one or two files by name, as Markdown, with the tests of their differences."""
    first = next(iter(files.values()))
    compared = ["## Comparison", _markdown(DIFFERENCE_COLUMNS, difference_rows(tests)), _TESTED] if tests else []
    return page(
        "# Scores",
        *compared,
        *[block for name, scores in files.items() for block in _of_file(name, scores)],
        "## How they are computed",
        _MEANING.format(resamples=quantity(first.resamples, "resample"), seed=first.seed),
        "\n".join(f"- {escaped(line)}" for line in signature_lines(first)),
    )


def _of_file(file: str, scores: Scores) -> Iterator[str]:
    yield f"## {code(file)}"
    yield "\n".join(f"- {escaped(line)}" for line in count_lines(scores))
    yield _markdown(SCORE_COLUMNS, score_rows(scores))
    if scores.classes:
        yield "The references are classes, and `accuracy` is the percentage of the rows of a class that are predicted."
        yield _markdown(CLASS_COLUMNS, class_rows(scores))


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(columns, [[escaped(cell) for cell in row] for row in rows])
