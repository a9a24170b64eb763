"""What is known of a run's text and tokens, as rows, sentences and plots.

- statistics of the tokens: lengths of passages, pieces per word, unknown pieces. Lengths and unknown pieces are exact;
  words are counted in a sample of the text that is spread over the corpus.
- what reading the whole text, and searching it for repetitions, showed.
"""

import io
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from t5train.data.checks.repetitions import COMPARED_SPLITS
from t5train.data.checks.whole_reading import TextFindings
from t5train.data.passages import SPLITS, Split
from t5train.data.samples.loader import windows_of_texts
from t5train.data.samples.span_corruption import geometry
from t5train.data.segments import passages_in, read_segments
from t5train.data.shards import lengths_name
from t5train.data.vocabulary.sentencepiece_model import Encoder
from t5train.data.vocabulary.tokenizer import SPIECE
from t5train.data.vocabulary.unknown_pieces import counts_with_unknown, lacked_characters, listed
from t5train.quantities import quantity
from t5train.records.stage_records import UNKNOWN_PIECES, Corpus, TokenizerFiles, TokenShards
from t5train.release.card_sections import repeated_line
from t5train.spec import ObjectiveSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLE_BYTES = 4 << 20
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
QUANTILE_NAMES = ("shortest", "10%", "median", "90%", "99%", "longest")
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 9.0, 3.4, 100
_BINS = 60
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


class SplitFacts(NamedTuple):
    """Facts about a train split that are in the shards' files, but not in their record."""

    unknown_pieces: int
    """How many tokens are the unknown piece."""
    of_texts: list[int]
    """The number of samples of each text: windows of consecutive tokens of one shard that do not overlap."""

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return sum(self.of_texts)


def train_split_facts(shards: TokenShards, objective: ObjectiveSpec) -> SplitFacts:
    """Return the facts about the train split. Reads a few bytes for each shard."""
    return SplitFacts(
        unknown_pieces=counts_with_unknown(shards)[UNKNOWN_PIECES],
        of_texts=windows_of_texts(shards, "train", geometry(objective).window_tokens),
    )


class SampledText(NamedTuple):
    """What a sample of the text shows."""

    passages: int
    words: int
    """Stretches of text between white space."""
    pieces: int
    """Tokens, without the EOS of each passage."""
    bytes: int
    unknown: Counter[str]
    """How often each character occurs that has no piece of its own."""


class DataStatistics(NamedTuple):
    """Statistics of token shards."""

    lengths: dict[Split, np.ndarray]
    """Tokens of each passage, EOS included: uint32, one array per split."""
    repeated: str
    """A sentence about passages that occur more than once; empty if there are none, or if that is unknown."""
    unknown_pieces: int
    """Unknown pieces in the train split."""
    train_tokens: int
    sampled: SampledText


def data_statistics(
    corpus: Corpus, tokenizer: TokenizerFiles, shards: TokenShards, objective: ObjectiveSpec
) -> DataStatistics:
    """Read the lengths of all passages, and a sample of about 4 MiB of the text."""
    numbers = range(int(shards.counts["num_shards"]))
    lengths = {
        split: np.concatenate([np.fromfile(shards.path / lengths_name(split, number), "<u4") for number in numbers])
        for split in SPLITS
    }
    facts = train_split_facts(shards, objective)
    sampled = sample_text(corpus, Encoder(tokenizer.path / SPIECE))
    return DataStatistics(
        lengths, repeated_line(shards.counts), facts.unknown_pieces, int(shards.counts["train_tokens"]), sampled
    )


def sample_text(corpus: Corpus, encoder: Encoder) -> SampledText:
    """Encode passages of evenly spaced segments, about ``SAMPLE_BYTES``; count their words and unknown characters."""
    stride = -(-int(corpus.counts["text_bytes"]) // SAMPLE_BYTES)
    segments = [(file.source, each) for file in read_segments(corpus.path) for each in file.segments]
    passages = list(passages_in(segments[::stride]))
    texts = [passage.text for passage in passages]
    encoded = encoder.encode(texts)
    return SampledText(
        passages=len(passages),
        words=sum(len(passage.text.split()) for passage in passages),
        pieces=sum(len(ids) for ids in encoded),
        bytes=sum(len(passage.text.encode()) for passage in passages),
        unknown=lacked_characters(texts, encoded, encoder),
    )


def length_rows(statistics: DataStatistics) -> list[list[str]]:
    """Return one row per split: its name, passages, tokens and the quantiles of the passages' tokens."""
    return [
        [split, f"{len(each):,}", f"{int(each.sum(dtype=np.int64)):,}", *quantiles_of(each)]
        for split, each in statistics.lengths.items()
    ]


def quantiles_of(lengths: np.ndarray) -> list[str]:
    """Return the quantiles that ``QUANTILE_NAMES`` names as text."""
    if not len(lengths):
        return ["-"] * len(_QUANTILES)
    return [f"{int(value):,}" for value in np.quantile(lengths, _QUANTILES, method="nearest")]


def word_lines(statistics: DataStatistics) -> list[str]:
    """Return sentences about pieces per word and unknown pieces."""
    sampled = statistics.sampled
    share = statistics.unknown_pieces / max(1, statistics.train_tokens)
    per_word, per_piece = sampled.pieces / max(1, sampled.words), sampled.bytes / max(1, sampled.pieces)
    lines = [
        f"{per_word:.2f} pieces per word and {per_piece:.2f} bytes per piece, in a sample of "
        f"{quantity(sampled.passages, 'passage')} with {quantity(sampled.words, 'word')}",
        f"unknown pieces: {quantity(statistics.unknown_pieces, 'token')} of the train split ({share:.4%})",
        *([statistics.repeated] if statistics.repeated else []),
    ]
    if sampled.unknown:
        lines.append(
            f"characters of the sample without a piece: {listed(sampled.unknown)}. A vocabulary that is trained with "
            "a higher tokenizer.character_coverage has more characters"
        )
    return lines


def data_plot(statistics: DataStatistics, objective: ObjectiveSpec) -> bytes:
    """Return a PNG, 900 pixels wide: how many passages of each split have which number of tokens."""
    return plots_png(lambda axes: _draw_lengths(axes, statistics, geometry(objective).window_tokens))


def plots_png(*draw: "Callable[[Axes], None]") -> bytes:
    """Return a PNG, 900 pixels wide, of plots beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, layout="constrained")
    for each, axes in zip(draw, figure.subplots(1, len(draw), squeeze=False)[0], strict=True):
        each(axes)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _draw_lengths(axes: "Axes", statistics: DataStatistics, window_tokens: int) -> None:
    longest = max((int(each.max()) for each in statistics.lengths.values() if len(each)), default=1)
    bins = np.unique(np.geomspace(1, max(longest, 2), _BINS).round()).tolist()
    for split, each in statistics.lengths.items():
        if len(each):
            axes.hist(each, bins=bins, weights=np.full(len(each), 1 / len(each)), histtype="step", label=split)
    axes.axvline(window_tokens, color="grey", linestyle=":", label=f"a sample ({window_tokens} tokens)")
    axes.set_xscale("log")
    axes.set_xlabel("tokens of a passage")
    axes.set_ylabel("share of the split's passages")
    axes.legend(fontsize=8)


def repetition_rows(findings: TextFindings) -> list[list[str]]:
    """Return one row for each kind of repetition: what it is, and passages by split (``SPLIT_NAMES``).

    Empty if nothing was searched for. A dash stands for what was not.
    """
    counts = findings.repetitions or {}
    rows = []
    for kind, label in _KINDS.items():
        found = [counts.get(f"{split}_{kind}") for split in COMPARED_SPLITS]
        if any(number is not None for number in found):
            rows.append([label, *("-" if number is None else f"{number:,}" for number in found)])
    return rows


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


def size_rows(findings: TextFindings) -> list[list[str]]:
    """Return one row for each range of lengths: the range in bytes of UTF-8, and the number of passages."""
    return [
        [f"{1 << (bits - 1):,} to {(1 << bits) - 1:,} bytes", f"{number:,}"]
        for bits, number in findings.lengths.items()
    ]


def findings_plot(findings: TextFindings) -> bytes:
    """Return a PNG, 900 pixels wide: the lengths of passages, and the share that repeats others."""
    return plots_png(lambda axes: _draw_sizes(axes, findings), lambda axes: _draw_repetitions(axes, findings))


def _draw_sizes(axes: "Axes", findings: TextFindings) -> None:
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
