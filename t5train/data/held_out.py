"""Held-out passages with the token ids that training uses for them. A published tokenizer must produce the same ids.

They are stored beside the token shards, because the rank that writes the witness may have no other data.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.data.passages import Passage
from t5train.data.vocabulary.sentencepiece_model import SPECIAL_PIECES, UNK_ID, Encoder
from t5train.errors import InputError
from t5train.files.atomic import write_text
from t5train.host_resources import quantity
from t5train.records.witness import EncodedPassage

HELD_OUT = "held-out-passages.json"
_MOST_PASSAGES = 32
_CANDIDATES = 1000
_MOST_CHARACTERS = 4000
_LEAST_AGREEMENT = 0.9
# Passages with these are left out: transformers encodes special pieces and sentinels as control ids, but training does
# not, and only one of the two treats U+0085 as a space.
_READ_DIFFERENTLY = re.compile("|".join([*map(re.escape, SPECIAL_PIECES), "<extra_id_[0-9]+>", "\x85"]))
_log = logging.getLogger(__name__)


class HeldOutPassages(BaseModel):
    """The content of ``held-out-passages.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    passages: list[EncodedPassage]


def read_held_out(shards_folder: Path) -> list[EncodedPassage]:
    """Return the passages recorded in a folder of token shards. Raises InputError if there are none."""
    path = shards_folder / HELD_OUT
    try:
        passages = HeldOutPassages.model_validate_json(path.read_bytes()).passages
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist: make the token shards again with this version of t5-pretrain (`run` or `tokenize`)"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): repair the disk or the permissions") from error
    except ValidationError as error:
        raise InputError(
            f"{path} is damaged ({error.errors()[0]['msg']}). Use `t5-pretrain run` or `tokenize` to make the token "
            "shards again"
        ) from error
    if not passages:
        raise InputError(
            f"{path} holds no passage, but certification compares tokenizers on at least one. Use more text, or "
            "give validation a larger share (corpus.split), then make the token shards again"
        )
    return passages


def write_held_out(folder: Path, found: Iterable[EncodedPassage], tokenizer_json: Path) -> None:
    """Choose passages from the first 1000 candidates and write them to ``folder``.

    Only passages that Hugging Face's tokenizer encodes as training does are recorded. The two differ on rare
    combinations of characters, and may order the pieces of a row of dashes differently: both orders are equally good.
    Raises InputError if they agree on fewer than 90% of the candidates, up to such orders.
    """
    candidates = list(islice(found, _CANDIDATES))
    ids = _ids_of_reference(candidates, tokenizer_json)
    agreed = [each for each, others in zip(candidates, ids, strict=True) if each.ids == others]
    alike = [each for each, others in zip(candidates, ids, strict=True) if sorted(each.ids) == sorted(others)]
    if len(alike) < _LEAST_AGREEMENT * len(candidates):
        raise InputError(
            f"{tokenizer_json} encodes {len(candidates) - len(alike)} of {len(candidates)} held-out passages "
            f"differently from the spiece.model in the same folder. Remove {tokenizer_json.parent} and start again: "
            "the tokenizer is then made again"
        )
    chosen = HeldOutPassages(passages=choose(agreed))
    _log.info(
        "recorded %s of held-out text, with which certification compares tokenizers",
        quantity(len(chosen.passages), "passage"),
    )
    write_text(folder / HELD_OUT, chosen.model_dump_json(indent=1) + "\n")


def comparable(passages: Iterable[tuple[Passage, np.ndarray]], encoder: Encoder) -> Iterator[EncodedPassage]:
    """Yield the passages that both tokenizers read as plain text. Long passages are cut to at most 4000 characters."""
    for passage, whole_ids in passages:
        text, ids = passage.text, whole_ids
        if len(text) > _MOST_CHARACTERS:
            text = text[:_MOST_CHARACTERS].rsplit(" ", 1)[0]
            (ids,) = encoder.encode([text], add_eos=True)
        if not _READ_DIFFERENTLY.search(text):
            yield EncodedPassage(text=text, ids=ids.tolist())


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


def _ids_of_reference(candidates: Sequence[EncodedPassage], tokenizer_json: Path) -> list[list[int]]:
    from tokenizers import Tokenizer  # only needed here

    try:
        reference = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(
            f"{tokenizer_json} cannot be read ({error}). Remove {tokenizer_json.parent} and start again: the tokenizer "
            "is then made again"
        ) from error
    return [reference.encode(each.text).ids for each in candidates]
