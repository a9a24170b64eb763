"""The reports of a run as Markdown artifacts, and as files in the run's folder."""

import logging
import time
from pathlib import Path
from typing import Any, TypeVar

from t5train.data.pairs.task_rates import task_shares
from t5train.files.run_folder import EXPORT, METRICS, WITNESS_FOLDER
from t5train.records.evaluation_metrics import recorded_metrics
from t5train.records.locations import shown_text
from t5train.records.metrics import loss_lines, read
from t5train.records.stage_records import (
    Corpus,
    Export,
    Pairs,
    PairShards,
    Publication,
    Record,
    TokenizerFiles,
    TokenShards,
    Weights,
)
from t5train.records.witness import Witness
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.report.data_report import data_lines, data_report
from t5train.report.data_statistics import train_split_facts
from t5train.report.pairs_report import pairs_report, share_line
from t5train.report.report_folder import (
    DATA,
    EVALUATION,
    PROOF,
    PUBLICATION,
    STAGES,
    SUMMARY,
    TRAINING,
    remove_failure,
    report_path,
    write_report,
    write_table,
)
from t5train.report.result_reports import (
    best_lines,
    counts_text,
    data_wait_line,
    earlier_lines,
    evaluation_report,
    metrics_lines,
    predicting_lines,
    proof_report,
    publication_report,
    saving_line,
    summary_report,
)
from t5train.spec import RunSpec
from t5train.spec.recipes import TRIAL_STEPS
from tasks.run_page import artifact_pages, data_url, not_disturbing, shown_markdown, shown_table
from tasks.stages import Stage, numbered

_PAGES = {"data": "Data", "training": "Plot of training", "evaluation": "Evaluation", "proof": "Proof"}
_PAGES |= {"published": "Published model"}
_FILES = {"Data": DATA, "Plot of training": TRAINING, "Proof": PROOF, "Published model": PUBLICATION}
_TITLE = "Result of each stage"
R = TypeVar("R", bound=Record)
_log = logging.getLogger(__name__)


def show_data(spec: RunSpec, corpus: Corpus, tokenizer: TokenizerFiles, shards: TokenShards) -> None:
    """Report on the text, the vocabulary and the tokens."""
    with not_disturbing("the data report"):
        facts = train_split_facts(shards, spec.objective)
        sources = ", ".join(map(shown_text, spec.corpus.named()))
        _log.info("text: %s, %s passages", sources, f"{corpus.counts['passages']:,}")
        for line in data_lines(spec, shards, facts):
            _log.info("%s", line)
        text = data_report(spec, corpus, tokenizer, shards, facts)
        write_report(spec.run_folder, DATA, text)
        shown_markdown("data").show(text, "Text, vocabulary and tokens")


def show_pairs(spec: RunSpec, pairs: Pairs, tokenizer: TokenizerFiles, shards: PairShards) -> None:
    """Report on the pairs, and on what the run trains on of each task."""
    with not_disturbing("the data report"):
        shares = task_shares(shards, spec)
        for share in shares:
            _log.info("%s", share_line(share))
        text = pairs_report(pairs, tokenizer, spec.pairs, shares)
        write_report(spec.run_folder, DATA, text)
        shown_markdown("data").show(text, "Pairs, vocabulary and rows")


def show_evaluation(spec: RunSpec, exported: Export) -> None:
    """Report on what the export predicts for held-out pairs."""
    with not_disturbing("the evaluation"):
        metrics = recorded_metrics(exported.path, exported.files)
        if metrics is None:
            return
        text = evaluation_report(metrics)
        write_report(spec.run_folder, EVALUATION, text)
        shown_markdown("evaluation").show(text, "Predictions of held-out pairs")


def show_proof(spec: RunSpec, weights: Weights, exported: Export) -> None:
    """Report on what consolidation and the certificate proved."""
    with not_disturbing("the proof"):
        path = exported.path / CERTIFICATE
        text = proof_report(Certificate.parse(path.read_bytes(), str(path)), weights, exported)
        write_report(spec.run_folder, PROOF, text)
        shown_markdown("proof").show(text, "What consolidation and the certificate proved")


def show_publication(spec: RunSpec, publication: Publication) -> None:
    """Report on the publication: where it is, and the commands that verify, fetch and load it."""
    with not_disturbing("the publication"):
        text = publication_report(publication, spec.run_name)
        write_report(spec.run_folder, PUBLICATION, text)
        shown_markdown("published").show(text, f"published: {publication.url}")


def show_summary(spec: RunSpec, stages: dict[str, Record], publication: Publication) -> None:
    """Report on the whole run, log its losses, and remove the report on an earlier failure."""
    witness = Witness.load(spec.run_folder / WITNESS_FOLDER)
    is_trial = spec.optimizer.num_steps <= TRIAL_STEPS
    metrics = read(spec.run_folder / METRICS)
    results = [
        *loss_lines(witness.validation, witness.trained.task_names, is_trial=is_trial),
        *best_lines(witness),
        *earlier_lines(witness.validation, metrics),
        saving_line(metrics),
        *predicting_lines(metrics),
        data_wait_line(metrics),
    ]
    for line in results:
        _log.info("%s", line)
    evaluated = recorded_metrics(spec.run_folder / EXPORT, publication.files)
    results += metrics_lines(evaluated) if evaluated is not None else []
    with not_disturbing("the summary"):
        files = _FILES | ({"Evaluation": EVALUATION} if evaluated is not None else {})
        text = summary_report(spec, stages, publication, results, TRAINING, files)
        write_report(spec.run_folder, SUMMARY, text)
        remove_failure(spec.run_folder)
        plot = data_url(report_path(spec.run_folder, TRAINING).read_bytes())
        found = artifact_pages()
        pages = {title: found[key] for key, title in _PAGES.items() if key in found}
        shown_markdown("summary").show(
            summary_report(spec, stages, publication, results, plot, pages), "Summary of the run"
        )


class StageTable:
    """Collects the records of a flow run by the title of their stage, in the order of the stages, and shows them."""

    def __init__(self, run_folder: Path, *, predicts: bool = False) -> None:
        """``predicts`` is as in ``stages.numbered``."""
        self._run_folder, self._predicts = run_folder, predicts
        self.records: dict[str, Record] = {}
        self._rows: list[dict[str, Any]] = []
        self._added_at = time.monotonic()
        self._artifact = shown_table("stages")

    def add(self, stage: Stage, record: R) -> R:
        """Add a stage's result and the time since the previous result; return the record."""
        now = time.monotonic()
        self.records[stage.title] = record
        self._rows.append(line := row(stage, record, now - self._added_at))
        _log.info("%s: %s %s", numbered(stage, predicts=self._predicts), line["result"], record.location)
        self._added_at = now
        with not_disturbing("the stages in the run's folder"):
            write_table(self._run_folder, STAGES, _TITLE, self._rows)
        self._artifact.show(self._rows, _TITLE)
        return record


def row(stage: Stage, record: Record, seconds: float) -> dict[str, Any]:
    """Return one row of the table. The widest cells are last, because the UI shows only about half of the columns."""
    return {
        "stage": stage.title,
        "result": "reused" if record.reused else "made",
        "seconds": round(seconds, 1),
        "files": len(record.files),
        "bytes": f"{sum(digest.size for digest in record.files.values()):,}",
        "fingerprint": record.fingerprint[:12],
        "folder": record.location,
        "counts": counts_text(record),
    }
