"""Held-out passages with the token ids that training uses for them. A published tokenizer must produce these ids.

They are stored beside the token shards, because the rank that writes the witness may have no other data.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.data.passages import Passage
from t5train.data.vocabulary.sentencepiece_model import SCORE_STEPS, SPECIAL_PIECES, UNK_ID, Encoder
from t5train.errors import InputError
from t5train.files.atomic import write_text
from t5train.quantities import quantity
from t5train.records.stage_records import HELD_OUT_COMPARED, HELD_OUT_LEFT_OUT, HELD_OUT_TIED
from t5train.records.witness import EncodedPassage

HELD_OUT = "held-out-passages.json"
_MOST_PASSAGES = 32
_CANDIDATES = 1000
_WARNING_SHARE = 0.01
_MOST_CHARACTERS = 4000
# Passages with these are left out: transformers encodes special pieces and sentinels as control ids, but training does
# not, and only one of the two treats U+0085 as a space.
_READ_DIFFERENTLY = re.compile("|".join([*map(re.escape, SPECIAL_PIECES), "<extra_id_[0-9]+>", "\x85"]))
_FLOAT32_STEPS = 1 << 24
_log = logging.getLogger(__name__)


class HeldOutPassages(BaseModel):
    """The content of ``held-out-passages.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    passages: list[EncodedPassage]


def read_held_out(shards_folder: Path) -> list[EncodedPassage]:
    """Return the passages recorded in a folder of token or pair shards. Raises InputError if there are none."""
    path = shards_folder / HELD_OUT
    try:
        passages = HeldOutPassages.model_validate_json(path.read_bytes()).passages
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist: make the shards again with this version of t5-pretrain (`run` or `tokenize`; of "
            "pairs, `finetune`)"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): repair the disk or the permissions") from error
    except ValidationError as error:
        raise InputError(
            f"{path} is damaged ({error.errors()[0]['msg']}). Use `t5-pretrain run` or `tokenize` (of pairs, "
            "`finetune`) to make the shards again"
        ) from error
    if not passages:
        raise InputError(
            f"{path} holds no passage, but certification compares tokenizers on at least one that has no control token "
            "(</s>, <pad>, <unk>, <extra_id_0>). Use more text, also without control tokens, or give validation a "
            "larger share (corpus.split; of pairs, pairs.split), then make the shards again"
        )
    return passages


def write_held_out(folder: Path, found: Iterable[EncodedPassage], tokenizer_json: Path) -> dict[str, int]:
    """Choose passages from the first 1000 candidates and write them to ``folder``.

    Only passages that Hugging Face's tokenizer encodes as training does are recorded. Where it does not, its
    segmentation must be as good as that of training: the same text, and the same score but for rounding. Of a row of
    dashes, for example, it may order the pieces differently. Raises InputError if any other passage differs.

    Returns:
        How many passages were compared, and how many of them have another segmentation that is as good, by the names
        of the counts of shards.

    """
    candidates = list(islice(found, _CANDIDATES))
    tokenizer = _reference(tokenizer_json)
    pieces = [(piece, score) for piece, score in json.loads(tokenizer_json.read_bytes())["model"]["vocab"]]
    others = [tokenizer.encode(each.text).ids for each in candidates]
    agreed, tied, wrong = list[EncodedPassage](), 0, list[EncodedPassage]()
    for each, ids in zip(candidates, others, strict=True):
        if each.ids == ids:
            agreed.append(each)
        elif _is_as_good(ids, each.ids, pieces):
            tied += 1
        else:
            wrong.append(each)
    if wrong:
        raise InputError(
            f"{tokenizer_json} encodes {len(wrong)} of {len(candidates)} held-out passages differently from the "
            f"spiece.model in the same folder. Remove {tokenizer_json.parent} and start again: the tokenizer is then "
            f"made again. If that does not help, please report this bug, with the text {wrong[0].text[:100]!r}"
        )
    chosen = HeldOutPassages(passages=choose(agreed))
    _log.info(
        "recorded %s of held-out text, with which certification compares tokenizers. Of %s, Hugging Face's tokenizer "
        "encodes %d as training does, and %d with other pieces that are as probable",
        quantity(len(chosen.passages), "passage"),
        quantity(len(candidates), "candidate"),
        len(agreed),
        tied,
    )
    write_text(folder / HELD_OUT, chosen.model_dump_json(indent=1) + "\n")
    counts = {HELD_OUT_COMPARED: len(candidates), HELD_OUT_TIED: tied}
    warn_of_ties(counts)
    return counts


def warn_of_ties(counts: Mapping[str, int]) -> None:
    """Log ``tied_line``, if there is one."""
    if line := tied_line(counts):
        _log.warning("%s", line)


def tied_line(counts: Mapping[str, int]) -> str:
    """Return a warning if Hugging Face's tokenizer gives more than 1% of the compared passages other pieces.

    Empty if not, or if it is not recorded. ``counts`` are those of token shards.
    """
    tied, compared = counts.get(HELD_OUT_TIED, 0), counts.get(HELD_OUT_COMPARED, 0)
    if tied <= _WARNING_SHARE * compared:
        return ""
    return (
        f"{tied / compared:.1%} of the held-out passages ({tied:,} of {compared:,}) get other ids from the published "
        f"tokenizer than training uses, because scores of pieces are equal once rounded to 1/{SCORE_STEPS}, or words "
        "have pieces in several orders (rows of dashes). The model never trains on them. Choose a vocabulary whose "
        "scores are further apart (tokenizer.path), leave out tokenizer.path to train one, or remove such text"
    )


def _is_as_good(ids: Sequence[int], as_trained: Sequence[int], pieces: Sequence[tuple[str, float]]) -> bool:
    """Return whether two segmentations have the same pieces, or the same text and the same score but for rounding.

    Encoder rounds the score of each piece to a multiple of 1 / SCORE_STEPS. Of a word that costs more than 2**24 steps,
    as a few thousand random letters do, SentencePiece also rounds each sum to float32, which has 24 bits.
    """
    one, other = Counter(ids), Counter(as_trained)
    if one == other:
        return True
    if max(*ids, *as_trained) >= len(pieces) or _text(ids, pieces) != _text(as_trained, pieces):
        return False
    differing = [*(one - other).elements(), *(other - one).elements()]
    difference = sum(pieces[index][1] * (one[index] - other[index]) for index in set(differing))
    cost = -sum(pieces[index][1] for index in as_trained)
    rounding = 1 / (2 * SCORE_STEPS) + (2 * cost / _FLOAT32_STEPS if cost > _FLOAT32_STEPS / SCORE_STEPS else 0)
    return abs(difference) <= len(differing) * rounding


def _text(ids: Sequence[int], pieces: Sequence[tuple[str, float]]) -> str:
    return "".join(pieces[index][0] for index in ids)


def comparable(
    passages: Iterable[tuple[Passage, np.ndarray]], encoder: Encoder, left_out: Counter[str] | None = None
) -> Iterator[EncodedPassage]:
    """Yield the passages that both tokenizers read as plain text. Long passages are cut to at most 4000 characters.

    ``left_out`` gets the number of the others, as the count HELD_OUT_LEFT_OUT.
    """
    for passage, whole_ids in passages:
        text, ids = passage.text, whole_ids
        if len(text) > _MOST_CHARACTERS:
            text = text[:_MOST_CHARACTERS].rsplit(" ", 1)[0]
            (ids,) = encoder.encode([text], add_eos=True)
        # Special pieces are also found in what a text is normalised to: full-width brackets become < and >.
        if not _READ_DIFFERENTLY.search(text) and not _READ_DIFFERENTLY.search(encoder.normalised(text)):
            yield EncodedPassage(text=text, ids=ids.tolist())
        elif left_out is not None:
            left_out[HELD_OUT_LEFT_OUT] += 1


def choose(candidates: Sequence[EncodedPassage], most: int = _MOST_PASSAGES) -> list[EncodedPassage]:
    """Choose up to ``most`` candidates.

    First some with unknown characters, then some with non-ASCII text, then those that add the most new pieces.
    """
    unknown = [each for each in candidates if UNK_ID in each.ids][: most // 8]
    foreign = [each for each in candidates if not each.text.isascii() and each not in unknown][: most // 4]
    chosen = [*unknown, *foreign]
    covered = {index for each in chosen for index in each.ids}
    remaining = [(set(each.ids), each) for each in candidates if each not in chosen]
    while remaining and len(chosen) < most:
        best = max(range(len(remaining)), key=lambda place: len(remaining[place][0] - covered))
        pieces, passage = remaining.pop(best)
        covered |= pieces
        chosen.append(passage)
    return chosen


def _reference(tokenizer_json: Path) -> Any:
    from tokenizers import Tokenizer  # only needed here

    try:
        return Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(
            f"{tokenizer_json} cannot be read ({error}). Remove {tokenizer_json.parent} and start again: the tokenizer "
            "is then made again"
        ) from error
