"""Sections of the model card that depend on what a run recorded. Each is Markdown, or empty."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from t5train.data.samples.mixture import rates
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.unknown_pieces import unknown_line
from t5train.quantities import quantity
from t5train.records.metrics import (
    OF_ONE_TASK,
    SHUFFLED_OF_TARGETS,
    UNIGRAM,
    UNIGRAM_OF_TARGETS,
    beside_baseline,
    has_learned_nothing,
)
from t5train.records.stage_records import OF_TEXT, REMOVED, REPEATED
from t5train.records.witness import TrainedModel, Witness
from t5train.release.markdown import code, escaped
from t5train.release.markdown import table as markdown_table
from t5train.spec import ObjectiveSpec
from t5train.spec.recipes import TRIAL_STEPS

MEANINGS = {
    "validation_content_loss": "Loss of masked tokens of the validation split. Its exponential is the perplexity.",
    "test_content_loss": "Loss of masked tokens of the test split, which is used for nothing else.",
    UNIGRAM: "The unigram baseline: loss of the same tokens of the validation split for a model that knows only how "
    "often each token occurs in the training split. A model that has learned anything is below it.",
    "shuffled_content_loss": "Loss of the same tokens if each target is paired with the input of another sequence. It "
    "is above the validation loss if the model uses its input.",
    "validation_loss": "Loss of all target tokens of the validation split.",
    "test_loss": "Loss of all target tokens of the test split.",
    "validation_exact_match": "Share of the pairs of the validation split whose target greedy decoding gives exactly: "
    "every token is the most likely one, given those before it.",
    "validation_token_accuracy": "Share of the target tokens that are the most likely ones, given those before them.",
    "test_exact_match": "The same share of the pairs of the test split, which is used for nothing else.",
    "test_token_accuracy": "The same share of the target tokens of the test split.",
    UNIGRAM_OF_TARGETS: "The unigram baseline: loss of the same tokens for a model that knows only how often each "
    "token occurs in the targets of the training split. A model that has learned anything is below it.",
    SHUFFLED_OF_TARGETS: "Loss of the same tokens if each target is paired with the source of another pair. It is "
    "above the validation loss if the model uses its input.",
    "validation_pairs": "Number of pairs of the validation split that were measured.",
    "validation_target_tokens": "Number of target tokens in these pairs.",
    "test_pairs": "Number of pairs of the test split that were measured.",
    "test_target_tokens": "Number of target tokens in these pairs.",
    "validation_sequences": "Number of sequences of the validation split that were measured. `t5-pretrain evaluate` "
    "measures all of the split, or as many as `--max-sequences` allows.",
    "validation_content_tokens": "Number of masked tokens in these sequences.",
    "test_sequences": "Number of sequences of the test split that were measured.",
    "validation_overflow": "Share of tokens in the validation beyond the capacity that an expert is expected to need. "
    "None of them was dropped.",
}
_CREATIVE_COMMONS = {
    *(f"cc-by-{version}" for version in ("2.0", "2.5", "3.0", "4.0")),
    *(f"cc-by-{kind}-{version}" for kind in ("sa", "nc", "nc-nd", "nc-sa") for version in ("3.0", "4.0")),
}
_HUB_LICENCES = {
    *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "unlicense", "unknown"),
    *("gfdl", "gpl", "gpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0", "eupl-1.1", "eupl-1.2"),
    *("cc", "cc0-1.0", "cc-by-nd-4.0", *_CREATIVE_COMMONS),
    *("cdla-sharing-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "odc-by", "odbl", "pddl", "etalab-2.0"),
}
"""Licences of text that the Hub knows by name (huggingface.co/docs/hub/repositories-licenses)."""
_SPLITS = ("train", "validation", "test")
_TRAINING = {
    "shape": "{num_layers} encoder and {num_decoder_layers} decoder layers, width {d_model}, feed-forward width "
    "{d_ff}, {num_heads} heads of width {d_kv}, {vocab_size:,} ids",
    "experts": "{num_experts} in each of {num_sparse_encoder_layers} encoder and {num_sparse_decoder_layers} decoder "
    "layers",
    "objective": "{noise_tokens} of {window_tokens} tokens of text masked in each sequence, in {spans} spans; "
    "{input_tokens} input and {target_tokens} target tokens with sentinels",
    "rows": "{input_tokens:,} tokens of sources and {target_tokens:,} of targets, {packing}; longer pairs: {too_long}",
    "loss": "cross-entropy of all target tokens, label smoothing {label_smoothing:g}, z-loss {z_loss:g}",
    "optimizer": "{kind}, betas {betas}, epsilon {epsilon:g}, weight decay {weight_decay:g}, {clipping}",
    "learning rate": "{peak_learning_rate:g} after {warmup_steps:,} steps of warm-up, then {decay}",
    "batch": "{global_batch_sequences:,} {samples} a step",
    "steps": "{num_steps:,}",
    "precision": "{precision}, with fp32 masters",
    "layout at the last step": "ranks: {ranks}, ZeRO stage: {zero_stage}, offload: {offload}, pipeline stages: "
    "{pipeline_stages}, expert parallelism: {expert_parallel_size}, sequences in a micro-batch: "
    "{micro_batch_sequences}",
    "seed": "{seed}",
}


class Words(NamedTuple):
    """What a card says of a model that depends on whether it learned from text or from pairs."""

    introduction: str
    use: str
    trained_on: str
    data: str
    measured: str


def table(headings: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """Return a table. Texts in the first column are as they are; numbers and texts in the second are formatted."""
    lines = [f"| {' | '.join((str(row[0]), cell(row[1], str(row[0])), *row[2:]))} |" for row in rows]
    return "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines])


def warning(witness: Witness) -> str:
    """Return warnings: of many unknown pieces in the text, and of a loss that is not below the unigram baseline."""
    unknown = unknown_line(witness.trained.data)
    told = f"\n**The training text has many unknown pieces.** {escaped(unknown)}.\n" if unknown else ""
    return told + _learned_nothing(witness)


def _learned_nothing(witness: Witness) -> str:
    if not has_learned_nothing(witness.validation):
        return ""
    loss, baseline = beside_baseline(witness.validation)
    token = "target token" if witness.trained.tasks else "masked token"
    why = (
        f" A trial of {quantity(witness.step, 'optimizer step')} is too short for more."
        if witness.step <= TRIAL_STEPS
        else ""
    )
    return (
        f"\n**This model predicts no better than the unigram baseline.** Its loss on held-out text is {loss:.4f} nats "
        f"per {token};\nthat of a model that knows only how often each token occurs is {baseline:.4f}.{why}\n"
    )


def ties(witness: Witness) -> str:
    """Return the note on transformers' remark about T5 v1.1."""
    if witness.huggingface_config.get("tie_word_embeddings", True):
        return ""
    return (
        "\ntransformers 5 remarks that `shared.weight` and `lm_head.weight` are not tied, as it does for Google's T5 "
        "v1.1. That is\ncorrect for T5 v1.1, and no value in `config.json` changes it: ignore the remark.\n"
    )


def languages(trained: TrainedModel) -> str:
    """Return a sentence, after a space, on the languages of the text; empty if they are not stated."""
    return f" Languages: {', '.join(trained.languages)}." if trained.languages else ""


def hub_licence(stated: str | None) -> dict[str, str]:
    """Return the front matter of a licence. The Hub refuses a name that it does not know in place of ``other``."""
    if stated is None:
        return {"license": "unknown"}
    name = re.sub("[^a-z0-9.+]+", "-", stated.lower()).strip("-")
    if name in _HUB_LICENCES:
        return {"license": name}
    return {"license": "other", "license_name": name.replace("+", "-or-later")}


def licence(trained: TrainedModel) -> str:
    """Return what is known of the licence of the text or the pairs."""
    data = "pairs have" if trained.tasks else "text has"
    if trained.license:
        return (
            f"The {data} the licence {code(trained.license)}, as\nstated when this model was trained; the header of "
            "this card repeats it."
        )
    return (
        f"The licence of this model follows from the one that the {data}, which this tool\ndoes not know. State it "
        "wherever you share the model, but not in this folder: a changed file no longer verifies."
    )


def data(witness: Witness) -> str:
    """Return passages and tokens of each split, and the number of epochs; empty if the run did not record them."""
    counts = witness.trained.data
    if not counts:
        return ""
    rows = [(split, f"{counts[f'{split}_documents']:,}", f"{counts[f'{split}_tokens']:,}") for split in _SPLITS]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    batch = witness.trained.settings["optimizer"]["global_batch_sequences"]
    sequences, samples = witness.step * batch, max(1, counts["train_samples"])
    return "\n".join(
        [
            "",
            "| split | passages | tokens |",
            "|---|---|---|",
            *lines,
            "",
            f"Training took {quantity(sequences, 'sequence')}: {sequences / samples:,.2f} epochs over the "
            f"{quantity(samples, 'sequence')} of the training split.",
            *_mixture_lines(witness, sequences),
            *(["", repeated] if (repeated := repeated_line(counts)) else []),
            *(["", removed] if (removed := removed_line(counts, witness.trained.settings)) else []),
            "",
        ]
    )


def _mixture_lines(witness: Witness, sequences: int) -> list[str]:
    """Return a table of the texts of a mixture; empty for one text."""
    counts, settings = witness.trained.data, witness.trained.settings
    names = [settings["corpus"]["source"], *settings["corpus"].get("mixed_with", [])]
    sizes = [counts[name] for text in range(len(names)) if (name := f"{OF_TEXT}{text}") in counts]
    if not sizes:
        return []
    objective = ObjectiveSpec.model_validate(settings["objective"])
    rows = mixture_rows(names, sizes, objective, sequences)
    return ["", markdown_table(MIXTURE, rows)]


MIXTURE = ("text", "different sequences", "share of training", "epochs")
"""The headings of ``mixture_rows``."""


class MixedText(NamedTuple):
    """How much one text of a mixture is trained on."""

    name: str
    samples: str
    share: str
    epochs: str


def mixture_rows(
    names: Iterable[str], sizes: Sequence[int], objective: ObjectiveSpec, sequences: int
) -> list[MixedText]:
    """Return a row for each text of a mixture. ``sequences`` is the number of them that training takes in all."""
    return [
        MixedText(code(name), f"{size:,}", f"{float(share):.2%}", f"{float(share * sequences / size):,.2f}")
        for name, share, size in zip(names, rates(sizes, objective), sizes, strict=True)
    ]


def repeated_line(counts: Mapping[str, Any]) -> str:
    """Return a sentence about passages that occur more than once; empty if there are none, or if that is unknown."""
    repeated, passages = int(counts.get(REPEATED, 0)), sum(int(counts[f"{split}_documents"]) for split in _SPLITS)
    if not repeated:
        return ""
    return (
        f"{quantity(repeated, 'passage')} of {passages:,} have the text of another one. Where copies are in different "
        "splits, losses on held-out text are lower than on new text."
    )


def removed_line(counts: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return a sentence about passages that were removed before training; empty if none were to be removed."""
    if REMOVED not in counts:
        return ""
    corpus = settings["corpus"]
    kinds = [each.replace("_", "-") for each in corpus.get("remove", ())]
    if corpus.get("remove_listed"):
        kinds.append("near-duplicates that were found by embeddings")
    removed = quantity(int(counts[REMOVED]), "passage")
    line = f"Removed from the training split before training: {removed} ({', '.join(kinds)})."
    if test_sets := corpus.get("test_sets"):
        line += f" Training text was also compared with {', '.join(map(code, test_sets))}."
    return line


def training(witness: Witness) -> str:
    """Return the table of the model's shape and the settings of training, as far as the run recorded them."""
    return "\n".join(["| | |", "|---|---|", *_training_rows(witness)])


def measured_at(witness: Witness) -> str:
    """Return at which step the model was measured: the last one, or the best one by a metric."""
    settings = witness.trained.settings
    if (metric := settings.get("evaluate", {}).get("best_metric")) is None:
        return "at the last step"
    steps = quantity(settings["optimizer"]["num_steps"], "step")
    return f"at step {witness.step:,}, the best by {metric} of a run of up to {steps}"


def _training_rows(witness: Witness) -> Iterator[str]:
    trained, config = witness.trained, witness.huggingface_config
    objective, optimizer = trained.settings.get("objective", {}), trained.settings.get("optimizer", {})
    values = {**config, **objective, **optimizer, **trained.layout, **_described(optimizer), "samples": "sequences"}
    if pairs := trained.settings.get("pairs"):
        packing = "several pairs in a row, which do not see each other" if pairs["pack"] else "one pair in a row"
        terms = {"label_smoothing": 0.0, "z_loss": 0.0}
        values = terms | values | pairs | {"packing": packing, "samples": "rows"}
    if objective:
        sample = geometry(ObjectiveSpec.model_validate(objective))
        values |= sample._asdict() | {"target_tokens": sample.target_tokens}
    for title, template in _TRAINING.items():
        try:
            yield f"| {title} | {template.format(**values)} |"
        except KeyError:  # not recorded, or a dense model
            continue


def _described(optimizer: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of the optimizer in words."""
    clip, schedule = optimizer.get("gradient_clip"), optimizer.get("schedule")
    to = f" to {optimizer.get('final_learning_rate', 0):g}" if schedule in {"cosine", "linear"} else ""
    return {
        "betas": " and ".join(f"{beta:g}" for beta in optimizer.get("betas", ())),
        "clipping": f"gradient norm clipped to {clip:g}" if clip else "gradients not clipped",
        "decay": f"{schedule}{to}",
    }


def measurements(recorded: Mapping[str, Any]) -> str:
    """Return the table of measurements, each with its meaning, the most important first; without those of one task."""
    others = (name for name in sorted(recorded.keys() - MEANINGS.keys()) if OF_ONE_TASK not in name)
    names = [*(name for name in MEANINGS if name in recorded), *others]
    return table(("measurement", "", "meaning"), [(name, recorded[name], MEANINGS.get(name, "")) for name in names])


def cell(value: Any, name: str = "") -> str:
    """Return a measurement of a name as Markdown: in percent if it can be compared with metrics of predictions."""
    if isinstance(value, float):
        return f"{value:.2%}" if name.endswith(("exact_match", "token_accuracy")) else f"{value:.4f}"
    return code(value)
