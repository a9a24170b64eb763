"""``measure``: what an export predicts for the held-out pairs of its run."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.terminal import say, stage_display
from infra.head.predicting.hosts_predictor import evaluating_hosts
from infra.head.preflight.remote_starts import with_start_here
from t5train.checkpoint.resume import load_run_spec
from t5train.errors import InputError
from t5train.inference.evaluation.export_evaluation import evaluate_export
from t5train.records.evaluation_metrics import recorded_metrics
from t5train.records.stage_records import Export, Pairs
from t5train.report.result_reports import metrics_lines


def measure(
    exported: Annotated[Path, typer.Argument(metavar="EXPORT", help="Folder made by `export`", readable=False)],
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help="Folder of the run's pairs", readable=False)],
    run: Annotated[Path, typer.Option(help="Folder of the run that trained it", readable=False)],
) -> None:
    """Predict the held-out pairs of a run with its export, before `certify`, and add predictions and metrics to it.

    $ t5-pretrain measure model work/pairs/PAIRS --run work/runs/mine
    """
    spec = load_run_spec(run)
    if not spec.predicts_held_out:
        raise InputError(
            f"{run} has no held-out pairs to predict: its settings have no pairs.train, or evaluate.max_pairs=0. Name "
            "the folder of a run of `finetune`"
        )
    with stage_display() as progress:
        hosts, stages = partial(evaluating_hosts, spec, progress), (Export.load(exported), Pairs.load(pairs))
        made = evaluate_export(*stages, with_start_here(spec), run, progress, hosts)
    metrics = recorded_metrics(made.path, made.files)
    for line in metrics_lines(metrics) if metrics is not None else []:
        say(line)
    say(f"{made.kind}: {made.path}{' (reused)' if made.reused else ''}")
