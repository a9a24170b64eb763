"""Statistics of a run's tokens: lengths of passages, pieces per word, unknown pieces; as rows, and as a plot.

Lengths and unknown pieces are exact. Words are counted in a sample of the text that is spread over the corpus.
"""

import io
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from t5train.data.passages import SPLITS, Passage, Split
from t5train.data.samples.span_corruption import geometry
from t5train.data.segments import passages_in, read_segments
from t5train.data.shards import lengths_name
from t5train.data.vocabulary.sentencepiece_model import Encoder
from t5train.data.vocabulary.tokenizer import SPIECE
from t5train.data.vocabulary.unknown_pieces import lacked_characters, listed
from t5train.quantities import quantity
from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.release.card_sections import repeated_line
from t5train.report.data_report import train_split_facts
from t5train.spec import ObjectiveSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLE_BYTES = 4 << 20
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
QUANTILE_NAMES = ("shortest", "10%", "median", "90%", "99%", "longest")
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 9.0, 3.4, 100
_BINS = 60


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
    """Encode passages that are spread over the corpus, and count their words and unknown characters."""
    passages = list(_spread_passages(corpus))
    texts = [passage.text for passage in passages]
    encoded = encoder.encode(texts)
    return SampledText(
        passages=len(passages),
        words=sum(len(passage.text.split()) for passage in passages),
        pieces=sum(len(ids) for ids in encoded),
        bytes=sum(len(passage.text.encode()) for passage in passages),
        unknown=lacked_characters(texts, encoded, encoder),
    )


def _spread_passages(corpus: Corpus) -> Iterator[Passage]:
    """Yield passages of evenly spaced segments of the corpus, about ``SAMPLE_BYTES`` of text."""
    stride = -(-int(corpus.counts["text_bytes"]) // SAMPLE_BYTES)
    segments = [(file.source, each) for file in read_segments(corpus.path) for each in file.segments]
    return passages_in(segments[::stride])


def length_rows(statistics: DataStatistics) -> list[list[str]]:
    """Return one row per split: its name, passages, tokens and the quantiles of the passages' tokens."""
    return [
        [split, f"{len(each):,}", f"{int(each.sum(dtype=np.int64)):,}", *_quantiles(each)]
        for split, each in statistics.lengths.items()
    ]


def _quantiles(lengths: np.ndarray) -> list[str]:
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, layout="constrained")
    _draw_lengths(figure.add_subplot(), statistics, geometry(objective).window_tokens)
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
