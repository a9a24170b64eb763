"""``score``: metrics of a file of predictions, or of two for the same rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import JsonOption, require_writable_names
from flows.cli.terminal import say, show_json, show_table, stage_display
from t5train.files.atomic import write_text
from t5train.inference.predict.predictions import Prediction, read_predictions
from t5train.inference.score.scores import Comparison, PairedTest, Scores, ScoreSpec, compare
from t5train.inference.score.scores import score as scores_of
from t5train.report.scores_report import (
    CLASS_COLUMNS,
    DIFFERENCE_COLUMNS,
    SCORE_COLUMNS,
    class_rows,
    count_lines,
    difference_rows,
    score_rows,
    scores_report,
    signature_lines,
)

_USUAL = ScoreSpec()


def score(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS",
            help="File or folder of predict, or - for standard input",
            readable=False,
            show_default=False,
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Predictions of the same rows, to compare with", readable=False),
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Bootstrap resamples, for intervals and p-values")
    ] = (_USUAL.resamples),
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap")] = _USUAL.seed,
    classes: Annotated[
        int, typer.Option(min=0, help="References of a task are classes if they are at most so many different texts")
    ] = _USUAL.classes,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a report to this file (.md)", metavar="FILE", readable=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score predictions: BLEU, chrF, ROUGE, exact match, token F1, accuracy of classes. Or compare two files.

    $ t5-pretrain score work/predicted
    $ t5-pretrain score work/predicted work/other --report scores.md
    $ t5-pretrain predict MODEL wmt.jsonl | t5-pretrain score -
    """
    require_writable_names(report=report)
    spec = ScoreSpec(resamples, seed, classes)
    found: Scores | Comparison
    with stage_display() as progress:
        if other is None:
            found = scores_of(_read(predictions), spec, progress)
            files, tests = {str(predictions): found}, []
        else:
            found = compare(_read(predictions), _read(other), spec, progress)
            files, tests = {str(predictions): found.baseline, str(other): found.other}, found.tests
    if report is not None:
        write_text(report, scores_report(files, tests))
    if as_json:
        show_json(found.model_dump())
    else:
        _show(files, tests)


def _read(predictions: Path) -> Iterator[Prediction]:
    return read_predictions(Path("/dev/stdin") if predictions == Path("-") else predictions)


def _show(files: Mapping[str, Scores], tests: Sequence[PairedTest]) -> None:
    if tests:
        show_table(DIFFERENCE_COLUMNS, difference_rows(tests))
    for name, scores in files.items():
        if tests:
            say(f"{name}:")
        else:
            show_table(SCORE_COLUMNS, score_rows(scores))
        if scores.classes:
            show_table(CLASS_COLUMNS, class_rows(scores))
        for line in count_lines(scores):
            say(line)
    for line in signature_lines(next(iter(files.values()))):
        say(line)
