"""Unknown pieces: how much of the training text a vocabulary lacks, and which characters.

They are counted in the whole training split. The characters are looked for in a sample of the text.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from t5train.data.passages import SourceFile
from t5train.data.segments import Stretch, passages_in
from t5train.data.vocabulary.sentencepiece_model import TRAINERS_UNKNOWN, UNK_ID, Encoder
from t5train.errors import InputError
from t5train.quantities import quantity
from t5train.records.stage_records import LACKED_CHARACTER, TRAIN_TOKENS, UNKNOWN_PIECES, TokenShards

UNIGRAM_DTYPE = "<i8"
_COUNT_BYTES = int(UNIGRAM_DTYPE[-1])
_WARNING_SHARE = 0.01
_MOST_CHARACTERS = 10
_SAMPLE_BYTES = 4 << 20
_MOST_TOKENS_PER_BYTE = 7  # a passage of U+FDFA alone (3 bytes) has a space, 18 characters and EOS; others have less
_REMEDY = (
    "Train the vocabulary with a higher tokenizer.character_coverage, choose one that has these characters "
    "(tokenizer.path), or remove such text. Write decomposed characters (NFD) in their composed form (NFC)"
)
_log = logging.getLogger(__name__)


def unigram_name(number: int) -> str:
    """Return the name of the file with the counts of ids in the train split of shard ``number``."""
    return f"train-{number:05d}.unigram"


def unknown_in(folder: Path, number: int) -> int:
    """Return how many tokens of the train split of a shard are the unknown piece."""
    with open(folder / unigram_name(number), "rb") as file:
        file.seek(UNK_ID * _COUNT_BYTES)
        return int.from_bytes(file.read(_COUNT_BYTES), "little", signed=True)


def counts_with_unknown(shards: TokenShards) -> dict[str, int]:
    """Return the counts of shards, with their unknown pieces.

    Earlier versions did not record these: then a few bytes of each shard are read.
    """
    if UNKNOWN_PIECES in shards.counts:
        return shards.counts
    numbers = range(int(shards.counts["num_shards"]))
    return {**shards.counts, UNKNOWN_PIECES: sum(unknown_in(shards.path, number) for number in numbers)}


class UnknownPieces:
    """Counts unknown pieces while shards are made, and refuses too many of them as soon as that is certain."""

    def __init__(self, plan: Sequence[Sequence[Stretch]], spiece: Path, max_share: float) -> None:
        """``plan`` has the text of each shard, and ``max_share`` is the largest share of tokens that is accepted."""
        self._plan, self._spiece, self._max_share = plan, spiece, max_share
        self._of_shards: dict[int, int] = {}
        self._tokens = 0
        self._remaining_bytes = sum(map(_text_bytes, plan))

    def add(self, number: int, tokens: int, unknown: int) -> None:
        """Count the train split of a finished shard. Raises InputError if the whole text has too many unknown pieces.

        They are too many if they were so even with as many other tokens as the remaining text can have.
        """
        self._of_shards[number] = unknown
        self._tokens += tokens
        self._remaining_bytes -= _text_bytes(self._plan[number])
        most_tokens = self._tokens + _MOST_TOKENS_PER_BYTE * self._remaining_bytes
        if sum(self._of_shards.values()) > self._max_share * most_tokens:
            require_known(self.counts(), self._max_share)

    def counts(self) -> dict[str, int]:
        """Return the counts so far, for a record: of tokens, unknown pieces and, if these are many, of characters."""
        counts = {TRAIN_TOKENS: self._tokens, UNKNOWN_PIECES: sum(self._of_shards.values())}
        if not _are_many(counts):
            return counts
        worst = max(self._of_shards, key=self._of_shards.__getitem__)
        return counts | lacked_counts(_lacked_in(self._plan[worst], Encoder(self._spiece)))


def _text_bytes(stretches: Sequence[Stretch]) -> int:
    return sum(stretch.segment.text_bytes for stretch in stretches)


def _lacked_in(stretches: Sequence[Stretch], encoder: Encoder) -> Counter[str]:
    """Return the characters without a piece in about 4 MiB of text, in evenly spaced segments."""
    stride = -(-_text_bytes(stretches) // _SAMPLE_BYTES)
    segments = [(SourceFile(Path(each.path), each.name), each.segment) for each in stretches[::stride]]
    texts = [passage.text for passage in passages_in(segments)]
    return lacked_characters(texts, encoder.encode(texts), encoder)


def lacked_characters(texts: Sequence[str], encoded: Iterable[np.ndarray], encoder: Encoder) -> Counter[str]:
    """Return how often each character that has no piece of its own occurs in texts. ``encoded`` has their ids."""
    found = Counter[str]()
    for text, ids in zip(texts, encoded, strict=True):
        if (ids == UNK_ID).any():
            found.update(text)
    return Counter({character: count for character, count in found.items() if _is_lacked(character, encoder)})


def lacked_counts(lacked: Counter[str]) -> dict[str, int]:
    """Return the most frequent of the characters as counts of a record."""
    return {f"{LACKED_CHARACTER}{ord(each):04X}": n for each, n in lacked.most_common(_MOST_CHARACTERS)}


def _is_lacked(character: str, encoder: Encoder) -> bool:
    (ids,) = encoder.encode([character])
    return bool((ids == UNK_ID).any())


def listed(lacked: Counter[str]) -> str:
    """Return the most frequent of the characters as text."""
    return ", ".join(
        f"{character!r} (U+{ord(character):04X}) {quantity(count, 'time')}"
        for character, count in lacked.most_common(_MOST_CHARACTERS)
    )


def recorded_unknown(counts: Mapping[str, int]) -> dict[str, int]:
    """Return those of a record's counts that are about unknown pieces."""
    return {name: n for name, n in counts.items() if name == UNKNOWN_PIECES or name.startswith(LACKED_CHARACTER)}


def _are_many(counts: Mapping[str, int]) -> bool:
    return counts.get(UNKNOWN_PIECES, 0) > _WARNING_SHARE * counts.get(TRAIN_TOKENS, 0)


def unknown_line(counts: Mapping[str, int], tokens_of: str = "the training split") -> str:
    """Return a warning if more than 1% of the tokens to train on are unknown; empty if not, or if it is not recorded.

    ``counts`` are those of token shards, or of the data of a run; ``tokens_of`` says which tokens they are about.
    """
    if not _are_many(counts):
        return ""
    unknown, tokens, start = counts[UNKNOWN_PIECES], counts[TRAIN_TOKENS], len(LACKED_CHARACTER)
    lacked = Counter({chr(int(name[start:], 16)): n for name, n in counts.items() if name.startswith(LACKED_CHARACTER)})
    named = f" (in a sample of the text, {listed(lacked)})" if lacked else ""
    reserved = ". No trained vocabulary has U+2585: replace U+2585 in the text" if TRAINERS_UNKNOWN in lacked else ""
    return (
        f"{unknown / max(1, tokens):.1%} of the tokens of {tokens_of} are the unknown piece ({unknown:,} of "
        f"{tokens:,}), because the vocabulary lacks their characters{named}. {_REMEDY}{reserved}"
    )


def require_known(counts: Mapping[str, int], max_share: float, tokens_of: str = "the training split") -> None:
    """Log a warning if more than 1% of the tokens to train on are unknown. Raises InputError above ``max_share``."""
    line, unknown, tokens = unknown_line(counts, tokens_of), counts[UNKNOWN_PIECES], counts[TRAIN_TOKENS]
    if unknown > max_share * tokens:
        found = line or f"{unknown:,} of {tokens:,} tokens of {tokens_of} are the unknown piece. {_REMEDY}"
        raise InputError(
            f"{found}. To train on such text all the same, raise shards.max_unknown_share, which is {max_share:g}"
        )
    if line:
        _log.warning("%s", line)


def require_known_in(shards: TokenShards, max_share: float) -> None:
    """Call ``require_known`` for finished shards.

    Those that do not record their unknown pieces are accepted with a warning: an earlier version made them, and runs
    may have begun on them.
    """
    require_known(counts_with_unknown(shards), max_share if UNKNOWN_PIECES in shards.counts else 1)
