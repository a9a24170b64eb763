"""The reports on a run's results: what was proven, where the model is published, and the summary of the whole run."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from t5train.quantities import quantity
from t5train.records.evaluation_metrics import SYSTEMS, EvaluationMetrics
from t5train.records.locations import local_folder
from t5train.records.metrics import OF_ONE_TASK, UNIGRAM_OF_TARGETS, VALIDATION_OF_TARGETS, Values
from t5train.records.stage_records import Export, Publication, Record, Weights
from t5train.records.witness import Witness
from t5train.release.card_sections import measured_at
from t5train.release.certificate import CERTIFICATE, Certificate, ProbeComparison
from t5train.release.markdown import code, code_block, escaped, page, table
from t5train.release.object_store.bucket import is_in_s3
from t5train.release.pair_card import SHOWN_METRICS, evaluation_section
from t5train.spec import RunSpec

_LOADS = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
"""
_FETCHES = """\
import fsspec

filesystem, path = fsspec.url_to_fs({url!r})
filesystem.get(path + "/", {folder!r} + "/", recursive=True)
"""


def proof_report(certificate: Certificate, weights: Weights, exported: Export) -> str:
    """Return, as Markdown, what consolidation and a certificate that passed have proven."""
    return page(
        "# Proof that the export is the model that was trained",
        f"The certificate passed. At step {certificate.step:,}, the training engine recorded a witness of its own "
        "weights. A new process loaded the export with plain transformers and compared it with that witness.",
        "## What was compared",
        table(("in the export", "compared with", "result"), _comparisons(certificate)),
        "## What was not compared",
        "\n".join(f"- {each}" for each in _left_out(certificate)),
        "## Consolidation",
        f"{weights.counts['tensors']:,} tensors with {weights.counts['parameters']:,} parameters "
        f"({weights.counts['bytes']:,} bytes in fp32) were joined from the parts that the ranks saved at step "
        f"{weights.counts['step']:,}. The export was made from them, so the comparison of tensors covers them, too.",
        "## Digests",
        table(("", "sha256"), _digests(certificate, exported)),
        f"Compared on {escaped(certificate.device)}; the engine ran on {escaped(certificate.witness_device)}. "
        f"{_tolerance(certificate)} The whole certificate is {code(exported.path / CERTIFICATE)}.",
    )


def _comparisons(certificate: Certificate) -> Iterator[tuple[str, str, str]]:
    tensors = f"{certificate.tensors_compared:,} tensors, {certificate.elements_compared:,} parameters"
    yield tensors, "sha256 of each fp32 master of the engine", "equal"
    if (adapter := certificate.adapter) is not None:
        merged = f"{quantity(adapter.tensors_merged, 'tensor')} with an adapter, {adapter.tensors_unchanged:,} without"
        yield merged, "the start model plus the product of the exported adapter", "equal"
    if (evaluation := certificate.evaluation) is not None:
        computed = f"{quantity(evaluation.metrics, 'metric')} of held-out pairs"
        yield computed, "what the exported predictions give", "equal"
    for name, probe in certificate.probes.items():
        shape = " x ".join(map(str, probe.shape))
        yield f"logits on probe {name} ({shape})", "logits of the engine's masters", _closeness(probe)
    if (generated := certificate.generation) is not None:
        amount = f"{quantity(generated.tokens_compared, 'token')} of {quantity(generated.sequences, 'sequence')}"
        yield f"greedy generation, {amount}", "what the engine's masters generate", "equal"
    yield (
        f"token ids of {quantity(certificate.passages_compared, 'held-out passage')}",
        "ids that training used",
        "equal",
    )
    yield ", ".join(certificate.documents), "every value that training recorded", "equal"


def _left_out(certificate: Certificate) -> Iterator[str]:
    """Yield what the comparisons leave out by design."""
    yield (
        "Held-out passages are some of those whose ids Hugging Face's tokenizer gave when the token shards were made. "
        "The data report counts the others: passages that spell control tokens, and those with other pieces that are "
        "as probable."
    )
    yield "Of passages with unknown characters, the ids are compared, but not the text that they are decoded to."
    if certificate.evaluation is not None:
        yield (
            f"{quantity(certificate.evaluation.predictions, 'prediction')} of held-out pairs were not made again, and "
            "the pairs not compared with their files. Their metrics were computed again."
        )
    if certificate.generation is not None:
        yield (
            "A generated sequence is compared up to the first choice that was too close to be reproducible, so "
            f"{quantity(certificate.generation.tokens_compared, 'token')} in all."
        )


def _closeness(probe: ProbeComparison) -> str:
    if probe.bit_equal:
        return "equal bits"
    return f"differ by at most {probe.max_relative_difference:.2g} of the largest"


def _tolerance(certificate: Certificate) -> str:
    if certificate.relative_tolerance == 0:
        return "Logits had to have equal bits."
    reason = escaped(certificate.tolerance_reason)
    return f"Logits may differ by {certificate.relative_tolerance:g} of the largest: {reason}."


def _digests(certificate: Certificate, exported: Export) -> Iterator[tuple[str, str]]:
    files = {**certificate.files, CERTIFICATE: exported.files[CERTIFICATE], **certificate.witness}
    for name, digest in sorted(files.items()):
        yield code(name), code(digest.sha256)
    yield "fingerprint of the run", code(certificate.run_fingerprint)
    yield "fingerprint of the consolidated weights", code(certificate.weights_fingerprint)
    yield "fingerprint of the export", code(certificate.export_fingerprint)


def evaluation_report(metrics: EvaluationMetrics) -> str:
    """Return what the export predicts for held-out pairs, as Markdown."""
    return page("# Evaluation", evaluation_section(metrics))


def metrics_lines(metrics: EvaluationMetrics) -> list[str]:
    """Return the metrics of each split and system, of all tasks together, one line each."""
    wholes = [group for group in metrics.groups if group.task is None] or metrics.groups
    return [
        f"{quantity(group.pairs, 'pair')} of the {group.split} split, {what}: "
        + ", ".join(f"{label} {found[name].value:.2f}" for name, label in SHOWN_METRICS.items() if name in found)
        for group in wholes
        for system, what in SYSTEMS.items()
        if (found := group.systems.get(system)) is not None
    ]


def publication_report(publication: Publication, run_name: str) -> str:
    """Return where the model is, and how to verify, fetch and load it, as Markdown.

    ``run_name`` names the folder into which a remote publication is fetched.
    There is no link: web pages cannot open folders (``file://``), and browsers do not know ``s3://`` and the like.
    """
    local = local_folder(publication.url)
    folder = str(local) if local else run_name
    if is_in_s3(publication.url):
        fetching = code_block(f"t5-pretrain fetch {shlex.quote(publication.url)} {shlex.quote(folder)}", "sh")
    else:
        fetching = code_block(_FETCHES.format(url=publication.url, folder=folder), "python")
    return page(
        "# Published model",
        f"published: {escaped(publication.url)}",
        code_block(str(local or publication.url)),
        "Verify every byte of it:",
        code_block(f"t5-pretrain verify {shlex.quote(publication.url)}", "sh"),
        "" if local else "Fetch it, with credentials where the store's own client reads them:",
        "" if local else fetching,
        "Load it:",
        code_block(_LOADS.format(folder=folder), "python"),
        table(
            ("", ""),
            [
                ("fingerprint", code(publication.fingerprint)),
                ("manifest", code(publication.seal)),
                ("files", f"{len(publication.files):,}"),
                ("bytes", f"{sum(digest.size for digest in publication.files.values()):,}"),
            ],
        ),
    )


def saving_line(lines: Iterable[Values]) -> str:
    """Return how long saving paused training, in seconds and as a share of the time for steps and saving together.

    Steps that were lost and trained again are counted once.
    """
    return _paused(lines, "save_seconds", "checkpoint")


def predicting_lines(lines: Sequence[Values]) -> list[str]:
    """Return the same of the predictions that chose the best checkpoint; nothing if none did."""
    if not any("predict_seconds" in line for line in lines):
        return []
    return [_paused(lines, "predict_seconds", "prediction", " of held-out pairs")]


def best_lines(witness: Witness) -> list[str]:
    """Return which step is published, and the value that chose it; nothing if the last one always is."""
    if (metric := witness.trained.settings.get("evaluate", {}).get("best_metric")) is None:
        return []
    value, remedy = witness.validation[metric], ""
    if value == 0 and metric != "validation_loss":
        remedy = ". All were 0, so the first one counted: train longer, or set another evaluate.best_metric"
    return [f"chosen: the model {measured_at(witness)}: {value:.4f}{remedy}"]


def _paused(lines: Iterable[Values], name: str, counted: str, rest: str = "") -> str:
    pauses, trained = [], 0.0
    for line in lines:
        trained += line.get("seconds") or 0.0
        if (seconds := line.get(name)) is not None:
            pauses.append(seconds)
    stood = sum(pauses)
    share = stood / (stood + trained) if pauses else 0.0
    return f"{quantity(len(pauses), counted)}{rest}, which paused training for {stood:.1f} s: {share:.2%} of its time"


_MUCH_LOWER = 0.95


def earlier_lines(published: Mapping[str, Any], lines: Iterable[Values]) -> list[str]:
    """Return a sentence if the validation loss of a run on pairs was much lower at another step; otherwise nothing.

    ``published`` are the held-out measurements of the published model.
    """
    measured = [(loss, line["step"]) for line in lines if (loss := line.get(VALIDATION_OF_TARGETS)) is not None]
    if UNIGRAM_OF_TARGETS not in published or not measured:
        return []
    (lowest, step), loss = min(measured), published[VALIDATION_OF_TARGETS]
    if lowest > _MUCH_LOWER * loss:
        return []
    return [
        f"The validation loss was lower at another step: {lowest:.4f} after step {step:,}, and {loss:.4f} of the "
        "published model. evaluate.best_metric=validation_loss publishes that step; more pairs or more dropout "
        "(model.dropout_rate) may lower it further"
    ]


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
    most = "" if spec.evaluate.patience is None else "up to "
    return page(
        f"# {spec.run_name}",
        f"Recipe {code(spec.recipe)}, {most}{quantity(spec.optimizer.num_steps, 'step')}.",
        f"Published with its certificate: {code(publication.url)}",
        " · ".join(f"[{title}]({url})" for title, url in pages.items()),
        "\n".join(f"- {each}" for each in results),
        f"![Training and validation loss]({picture})",
        "## Lineage",
        "Every stage records the fingerprints of what it was made from. The digest is the sha256 of its manifest, "
        "which lists the digest of every file.",
        table(
            ("stage", "made from", "fingerprint", "digest", "counts", "folder"),
            (_lineage_row(title, record) for title, record in stages.items()),
        ),
    )


def counts_text(record: Record) -> str:
    """Return the counts of a record, without those of single tasks, of which the data report shows what matters."""
    return ", ".join(f"{name} {value:,}" for name, value in record.counts.items() if OF_ONE_TASK not in name)


def _lineage_row(title: str, record: Record) -> tuple[str, ...]:
    made_from = ", ".join(f"{name} {fingerprint[:12]}" for name, fingerprint in record.inputs.items())
    counts = counts_text(record)
    folder = record.url if isinstance(record, Publication) else record.path
    return title, made_from or "-", code(record.fingerprint[:12]), code(record.seal[:12]), counts, code(folder)
