"""The report on pairs to fine-tune on: how many there are, how long they are in tokens, and how the model sees them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from t5train.data.pairs.packing import best_shape, row_shapes
from t5train.data.pairs.pairs import Pair, Task, count_of, finding_lines, read_pairs, tasks_of
from t5train.data.pairs.task_rates import TaskShare
from t5train.data.passages import SPLITS
from t5train.data.vocabulary.sentencepiece_model import EOS_ID, UNK_ID
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.data.vocabulary.unknown_pieces import lacked_characters, listed
from t5train.quantities import quantity
from t5train.records.stage_records import Pairs, TokenizerFiles
from t5train.release.markdown import code, escaped, page, table
from t5train.report.data_samples import shown
from t5train.report.data_statistics import QUANTILE_NAMES, quantiles_of
from t5train.spec import PairsSpec, RowLengths

SAMPLED_PAIRS = 20_000
"""Of a task with more pairs, as many are encoded, evenly spaced."""
_SHOWN_PAIRS = 2
_MANY_CUT = 0.01  # share of the pairs; if more are longer than a row, the report warns
_SIDES = ("source", "target")
_BECOMES = {"cut": "will be cut", "drop": "will be left out", "refuse": "will be refused"}


class _Side(NamedTuple):
    """The sources or targets of the sampled pairs of a task, in tokens."""

    lengths: np.ndarray
    """int64 [pairs], EOS included."""
    with_unknown: int
    """How many have an unknown piece."""
    unknown_pieces: int
    lacked: Counter[str]
    """How often each character occurs that has no piece."""


class _Measured(NamedTuple):
    """What the sampled pairs of a task show."""

    task: Task
    sides: tuple[_Side, _Side]
    are_all: bool
    """Whether all pairs of the task were measured."""

    @property
    def pairs(self) -> int:
        return len(self.sides[0].lengths)


def pairs_report(pairs: Pairs, tokenizer: TokenizerFiles, spec: PairsSpec, shares: Sequence[TaskShare] = ()) -> str:
    """Return the report as Markdown. ``spec`` has the lengths of rows; how full others would be is in it, too.

    ``shares`` is what a run trains on of each task. At most ``SAMPLED_PAIRS`` pairs of each task are encoded.
    """
    vocabulary, tasks = Tokenizer.load(tokenizer.path), tasks_of(pairs)
    measured = [_measured(pairs, number, task, vocabulary) for number, task in enumerate(tasks)]
    lengths = RowLengths(spec.input_tokens, spec.target_tokens)
    return page(
        f"# Pairs of {escaped(', '.join(task.task for task in tasks))}",
        table(("task", "prefix", *SPLITS, "empty", "repeated", "contaminated", "removed"), _count_rows(pairs, tasks)),
        "\n".join(f"- Warning: {escaped(line)}." for line in finding_lines(pairs)),
        "\n".join(f"- {escaped(share_line(share))}." for share in shares),
        "## Lengths",
        f"In tokens, EOS included{_sampled(measured)}.",
        table(("task", "side", *QUANTILE_NAMES), _length_rows(measured)),
        "\n".join(f"- {escaped(line)}." for each in measured for line in _long_lines(each, lengths, spec.too_long)),
        *(_row_blocks(measured, lengths, pairs.counts["train_pairs"]) if spec.pack else []),
        "## Unknown pieces",
        "\n".join(f"- {escaped(line)}." for each in measured for line in _unknown_lines(each)),
        "## As the model sees them",
        *[block for number, task in enumerate(tasks) for block in _samples(pairs, number, task, vocabulary, lengths)],
    )


def share_line(share: TaskShare) -> str:
    """Return what a run trains on of a task, as a line."""
    return (
        f"task {share.task}: {quantity(share.pairs, 'pair')} to train on in {quantity(share.rows, 'row')}, "
        f"{share.rate:.1%} of the pairs that are trained on, each used {share.epochs:,.2f} times"
    )


def _measured(pairs: Pairs, number: int, task: Task, vocabulary: Tokenizer) -> _Measured:
    total = sum(count_of(pairs, f"{split}_pairs", number) for split in SPLITS)
    stride = max(1, -(-total // SAMPLED_PAIRS))
    every = chain.from_iterable(read_pairs(pairs, split, number) for split in SPLITS)
    sampled = list(islice(every, None, None, stride))
    one, other = (_side([pair[side] for pair in sampled], vocabulary) for side in range(len(_SIDES)))
    return _Measured(task, (one, other), are_all=stride == 1)


def _side(texts: list[str], vocabulary: Tokenizer) -> _Side:
    encoded = vocabulary.encode(texts, add_eos=True)
    unknown = np.array([np.count_nonzero(ids == UNK_ID) for ids in encoded])
    lengths = np.array([len(ids) for ids in encoded])
    lacked = lacked_characters(texts, encoded, vocabulary)
    return _Side(lengths, int(np.count_nonzero(unknown)), int(unknown.sum()), lacked)


def _count_rows(pairs: Pairs, tasks: Sequence[Task]) -> Iterator[list[str]]:
    counted = [f"{split}_pairs" for split in SPLITS]
    counted += ["empty_pairs", "duplicate_pairs", "contaminated_pairs", "removed_pairs"]
    for number, task in enumerate(tasks):
        prefix = code(f"{task.prefix}...") if task.prefix else "none"
        yield [escaped(task.task), prefix, *(f"{count_of(pairs, name, number):,}" for name in counted)]


def _sampled(measured: Sequence[_Measured]) -> str:
    some = [f"{quantity(each.pairs, 'pair')} of {each.task.task}" for each in measured if not each.are_all]
    return f", in a sample of {' and '.join(some)}" if some else ""


def _length_rows(measured: Sequence[_Measured]) -> Iterator[list[str]]:
    for each in measured:
        for name, side in zip(_SIDES, each.sides, strict=True):
            yield [escaped(each.task.task), name, *quantiles_of(side.lengths)]


def _long_lines(measured: _Measured, lengths: RowLengths, too_long: str) -> Iterator[str]:
    for name, setting, side, length in zip(_SIDES, RowLengths._fields, measured.sides, lengths, strict=True):
        over = int(np.count_nonzero(side.lengths > length))
        warning = "Warning: " if over > _MANY_CUT * measured.pairs else ""
        becomes = f", and {_BECOMES[too_long]} (pairs.too_long)" if over else ""
        if over and name == "target" and too_long == "cut":
            becomes += ": held-out ones are no exact match, whatever the model gives"
        yield (
            f"{warning}{measured.task.task}: {quantity(over, name)} of {measured.pairs:,} "
            f"({over / max(1, measured.pairs):.2%}) have more than {length} tokens (pairs.{setting}){becomes}"
        )


def _row_blocks(measured: Sequence[_Measured], own: RowLengths, train_pairs: int) -> list[str]:
    """Return how full rows of several lengths are, which are the best, and about how many an epoch has."""
    lengths = np.concatenate([np.stack([side.lengths for side in each.sides], axis=1) for each in measured])
    shapes = row_shapes(lengths, own)
    best = best_shape(shapes)
    rows = [
        (
            f"{each.input_tokens} / {each.target_tokens}",
            f"{each.real_share:.3f}",
            f"{each.longer_share:.2%}",
            f"{each.pairs:.1f}",
        )
        for each in shapes
    ]
    choice = f"pairs.input_tokens={best.input_tokens} and pairs.target_tokens={best.target_tokens}"
    advice = "" if best[:2] == own else f" The best rows have {choice}."
    return [
        "## Rows",
        table(("tokens of source / target", "share that is not padding", "pairs that are longer", "pairs a row"), rows),
        f"Pairs are packed into rows of {own.input_tokens} and {own.target_tokens} tokens, about "
        f"{quantity(math.ceil(train_pairs / shapes[0].pairs), 'row')} an epoch.{advice}",
    ]


def _unknown_lines(measured: _Measured) -> Iterator[str]:
    for name, side in zip(_SIDES, measured.sides, strict=True):
        share = side.unknown_pieces / max(1, int(side.lengths.sum()))
        of_texts = side.with_unknown / max(1, measured.pairs)
        limit = ", of which the model cannot write every character" if name == "target" and side.with_unknown else ""
        lacked = f". Characters without a piece: {listed(side.lacked)}" if side.lacked else ""
        yield (
            f"{measured.task.task}: {quantity(side.unknown_pieces, 'unknown piece')} ({share:.4%} of the tokens) in "
            f"{quantity(side.with_unknown, name)} ({of_texts:.2%}){limit}{lacked}"
        )


def _samples(pairs: Pairs, number: int, task: Task, vocabulary: Tokenizer, lengths: RowLengths) -> Iterator[str]:
    """Yield the first pairs to train on, as text of the pieces that they become."""
    for pair in islice(read_pairs(pairs, "train", number), _SHOWN_PAIRS):
        source, target = _as_seen(pair, vocabulary, lengths)
        yield f"{escaped(task.task)}: {code(source)} becomes {code(target)}"


def _as_seen(pair: Pair, vocabulary: Tokenizer, lengths: RowLengths) -> Iterator[str]:
    for ids, length in zip(vocabulary.encode(list(pair), add_eos=True), lengths, strict=True):
        cut = ids if len(ids) <= length else np.append(ids[: length - 1], EOS_ID)
        yield shown(vocabulary, cut)
