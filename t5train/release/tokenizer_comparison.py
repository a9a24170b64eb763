"""Checks that the tokenizer of an export encodes text as training did."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from t5train.data.vocabulary.sentencepiece_model import EOS_ID, PAD_ID, SPECIAL_PIECES, UNK_ID
from t5train.records.witness import EncodedPassage, Witness
from t5train.spec import NUM_SENTINELS


def differing_tokenizer(tokenizer: Any, spiece: Path, witness: Witness) -> list[str]:
    """Return how a loaded tokenizer differs from vocabulary and witness: ids, special tokens, passages, decoding."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    sentinels = [f"<extra_id_{index}>" for index in range(NUM_SENTINELS)]
    return [
        *_differing_ids(tokenizer, [*pieces, *reversed(sentinels)], witness.huggingface_config["vocab_size"]),
        *_differing_special(tokenizer, sentinels),
        *differing_passages(tokenizer, witness.passages),
        *_differing_texts(tokenizer, processor, witness.passages),
    ]


def differing_passages(tokenizer: Any, passages: Sequence[EncodedPassage]) -> list[str]:
    """Describe held-out passages that are not encoded as training encoded them."""
    found = [index for index, each in enumerate(passages) if tokenizer(each.text)["input_ids"] != each.ids]
    if not found:
        return []
    text = passages[found[0]].text[:40]
    return [f"{len(found)} of {len(passages)} held-out passages have other ids than in training, first {text!r}"]


def _differing_ids(tokenizer: Any, tokens: list[str], model_ids: int) -> Iterator[str]:
    if len(tokenizer) != len(tokens):
        yield f"the tokenizer has {len(tokenizer)} ids, but the vocabulary with its sentinels has {len(tokens)}"
    if len(tokenizer) > model_ids:
        yield f"the tokenizer has {len(tokenizer)} ids, but the model has {model_ids}"
    ids = list(range(min(len(tokens), len(tokenizer))))
    wrong = [
        index
        for index, back, token in zip(
            ids, tokenizer.convert_tokens_to_ids(tokens[: len(ids)]), tokenizer.convert_ids_to_tokens(ids), strict=True
        )
        if back != index or token != tokens[index]
    ]
    if wrong:
        yield f"{len(wrong)} ids map to other pieces than in the vocabulary, first {wrong[0]} ({tokens[wrong[0]]!r})"


def _differing_special(tokenizer: Any, sentinels: list[str]) -> Iterator[str]:
    expected = dict(zip(("pad", "eos", "unk"), zip(SPECIAL_PIECES, (PAD_ID, EOS_ID, UNK_ID), strict=True), strict=True))
    for name, (token, index) in expected.items():
        found = getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")
        if found != (token, index):
            yield f"the tokenizer's {name} token is {found[0]} ({found[1]}), but should be {token} ({index})"
    ids = tokenizer.convert_tokens_to_ids(sentinels)
    used = [index for index in tokenizer(" ".join(sentinels))["input_ids"] if index in set(ids)]
    if used != ids:
        yield "sentinels in a text are not encoded as their ids"
    if tokenizer("")["input_ids"] != [EOS_ID]:
        yield "the tokenizer does not end a text with a single </s>"


def left_out_line(passages: Sequence[EncodedPassage]) -> str:
    """Return how many passages ``differing_tokenizer`` does not decode, and the first; empty if there are none."""
    found = [each.text for each in passages if UNK_ID in each.ids]
    if not found:
        return ""
    return (
        f"{len(found)} of {len(passages)} held-out passages have unknown characters, which each library decodes "
        f"differently: only their ids are compared, not their decoded text. The first is {found[0][:40]!r}"
    )


def _differing_texts(tokenizer: Any, processor: Any, passages: Sequence[EncodedPassage]) -> list[str]:
    """Describe passages whose ids do not decode as with SentencePiece.

    Passages with unknown characters are left out, because each library decodes them differently.
    """
    known = [each.ids for each in passages if UNK_ID not in each.ids]
    wrong = [ids for ids in known if tokenizer.decode(ids, skip_special_tokens=True) != processor.decode(ids)]
    return [f"{len(wrong)} of {len(known)} held-out passages are decoded to another text"] if wrong else []
