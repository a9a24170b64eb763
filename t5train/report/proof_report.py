"""The report on what consolidation and the certificate proved, from the certificate's own content."""

from collections.abc import Iterator

from t5train.quantities import quantity
from t5train.records.stage_records import Export, Weights
from t5train.release.certificate import CERTIFICATE, Certificate, ProbeComparison
from t5train.release.markdown import code, escaped, page, table


def proof_report(certificate: Certificate, weights: Weights, exported: Export) -> str:
    """Return the report on a certificate that passed, as Markdown."""
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
