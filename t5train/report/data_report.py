"""The report on a run's data: the text, the vocabulary, and the tokens of each split."""

from t5train.data.checks.whole_reading import TextFindings
from t5train.data.passages import SPLITS
from t5train.data.samples.mixture import rates
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.held_out import tied_line
from t5train.data.vocabulary.unknown_pieces import unknown_line
from t5train.quantities import quantity
from t5train.records.locations import shown_text
from t5train.records.stage_records import (
    HELD_OUT_COMPARED,
    HELD_OUT_LEFT_OUT,
    HELD_OUT_TIED,
    REMOVED,
    UNKNOWN_PIECES,
    Corpus,
    TokenizerFiles,
    TokenShards,
)
from t5train.release.card_sections import MIXTURE, MixedText, mixture_rows, repeated_line
from t5train.release.markdown import code, escaped, page, table
from t5train.report.data_statistics import SPLIT_NAMES, SplitFacts, repetition_lines, repetition_rows
from t5train.spec import RunSpec

MOST_EPOCHS = 64
"""Up to this number, repeating the text did little harm to T5 (Raffel et al. 2020, section 3.4.2); 256 epochs did."""


def data_report(
    spec: RunSpec, corpus: Corpus, tokenizer: TokenizerFiles, shards: TokenShards, facts: SplitFacts
) -> str:
    """Return the report as Markdown. ``facts`` are those of ``train_split_facts``."""
    sources = ", ".join(code(shown_text(each)) for each in spec.corpus.named())
    return page(
        f"# Data of {spec.run_name}",
        f"Text from {sources}. A passage belongs to one split as a whole.",
        table(("", "amount"), _text_rows(corpus, tokenizer)),
        *_finding_blocks(TextFindings.of(corpus)),
        "## Tokens",
        table(("split", "passages", "tokens", "tokens per passage"), _split_rows(shards)),
        _unknown_line(shards, facts),
        repeated_line(shards.counts),
        _epochs_line(spec, facts),
        *(["## Mixture", table(MIXTURE, mixture)] if (mixture := _mixture_rows(spec, facts)) else []),
        *_tokenizer_blocks(shards),
        "## Digests",
        "Each is the sha256 of a manifest, which lists the digest of every file.",
        table(
            ("", "fingerprint", "manifest", "folder"),
            [
                (each.kind, code(each.fingerprint[:12]), code(each.seal), code(each.path))
                for each in (corpus, tokenizer, shards)
            ],
        ),
    )


def _mixture_rows(spec: RunSpec, facts: SplitFacts) -> list[MixedText]:
    """Return how much each text of a mixture is trained on; empty for one text, or if one has no sample."""
    if len(facts.of_texts) < 2 or not all(facts.of_texts):
        return []
    sequences = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences
    names = list(map(shown_text, spec.corpus.named()))
    return mixture_rows(names, facts.of_texts, spec.objective, sequences)


def _finding_blocks(findings: TextFindings | None) -> list[str]:
    if findings is None:
        return []
    odd = "\n".join(f"- {line}" for line in [*findings.odd_lines(), findings.repetition_warning()] if line)
    if not (rows := repetition_rows(findings)):
        return [odd]
    return [odd, "## Repetitions", table(("", *SPLIT_NAMES), rows), " ".join(repetition_lines(findings))]


def _text_rows(corpus: Corpus, tokenizer: TokenizerFiles) -> list[tuple[str, str]]:
    return [
        ("passages", f"{corpus.counts['passages']:,}"),
        ("empty passages, which are skipped", f"{corpus.counts['empty_passages']:,}"),
        *([("passages removed from training", f"{corpus.counts[REMOVED]:,}")] if REMOVED in corpus.counts else []),
        ("text, in UTF-8", f"{corpus.counts['text_bytes']:,} bytes"),
        ("vocabulary, with sentinels", f"{tokenizer.counts['vocab_size']:,} pieces"),
    ]


def _split_rows(shards: TokenShards) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for split in SPLITS:
        passages, tokens = (int(shards.counts[f"{split}_{unit}"]) for unit in ("documents", "tokens"))
        rows.append((split, f"{passages:,}", f"{tokens:,}", f"{tokens / passages:.1f}" if passages else "-"))
    return rows


def _unknown_line(shards: TokenShards, facts: SplitFacts) -> str:
    if warning := unknown_line({**shards.counts, UNKNOWN_PIECES: facts.unknown_pieces}):
        return f"**The training text has many unknown pieces.** {escaped(warning)}."
    share = facts.unknown_pieces / max(1, int(shards.counts["train_tokens"]))
    return f"Of the train split, {quantity(facts.unknown_pieces, 'token')} ({share:.4%}) became the unknown piece."


def data_lines(spec: RunSpec, shards: TokenShards, facts: SplitFacts) -> list[str]:
    """Return what a run will train on, in a few lines for a log. ``facts`` are those of ``train_split_facts``."""
    counts = {
        split: (int(shards.counts[f"{split}_documents"]), int(shards.counts[f"{split}_tokens"])) for split in SPLITS
    }
    of_splits = ", ".join(
        f"{tokens:,} in {quantity(passages, 'passage')} ({split})" for split, (passages, tokens) in counts.items()
    )
    lines = [f"tokens: {of_splits}", _epochs_line(spec, facts)]
    lines += [
        f"{each.name.strip('`')}: {each.share} of training, {each.epochs} epochs over its {each.samples} samples"
        for each in _mixture_rows(spec, facts)
    ]
    if repeated := repeated_line(shards.counts):
        lines.append(repeated)
    if max(_epochs(spec, facts)) > MOST_EPOCHS:
        lines.append(
            f"more than {MOST_EPOCHS} epochs: the model may learn the text by heart. Add text, or lower "
            + ("its share of the mixture or " if len(facts.of_texts) > 1 else "")
            + "optimizer.num_steps"
        )
    return lines


def _epochs(spec: RunSpec, facts: SplitFacts) -> list[float]:
    """Return the number of epochs over each text."""
    sequences = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences
    if len(facts.of_texts) < 2 or not all(facts.of_texts):
        return [sequences / max(1, facts.samples)]
    shares = rates(facts.of_texts, spec.objective)
    return [float(share * sequences / size) for share, size in zip(shares, facts.of_texts, strict=True)]


def _epochs_line(spec: RunSpec, facts: SplitFacts) -> str:
    epochs = _epochs(spec, facts)
    over = f"{epochs[0]:,.2f} epochs over the train split"
    if len(epochs) > 1:
        over = f"between {min(epochs):,.2f} and {max(epochs):,.2f} epochs over the texts"
    return (
        f"The run makes {over}: {quantity(spec.optimizer.num_steps, 'step')} of "
        f"{quantity(spec.optimizer.global_batch_sequences, 'sequence')}, and {quantity(facts.samples, 'sample')} of "
        f"{geometry(spec.objective).window_tokens} tokens of text{' in an epoch' if len(epochs) == 1 else ''}."
    )


def _tokenizer_blocks(shards: TokenShards) -> list[str]:
    """Return what the comparison with Hugging Face's tokenizer covered and left out; empty for shards without it."""
    if HELD_OUT_COMPARED not in shards.counts:
        return []
    compared, tied, left_out = (shards.counts[name] for name in (HELD_OUT_COMPARED, HELD_OUT_TIED, HELD_OUT_LEFT_OUT))
    lines = [
        f"Hugging Face's tokenizer was compared on {quantity(compared, 'passage')} of the validation split, from a few "
        f"shards. It gave {compared - tied:,} of them the ids of training, and {tied:,} other pieces that are as "
        "probable. Certification compares only passages with the ids of training."
    ]
    if line := tied_line(shards.counts):
        lines.append(f"Warning: {line}.")
    if left_out:
        lines.append(
            f"Left out: {quantity(left_out, 'passage')} that spell a control token (</s>, <pad>, <unk>, "
            "<extra_id_0>), also after normalisation, or have U+0085. Training reads control tokens in a text as text, "
            "but Hugging Face's tokenizer makes them control ids."
        )
    return ["## Tokenizer", *map(escaped, lines)]
