"""The loss per byte compares vocabularies: it is the loss of masked tokens that spell text, per byte of that text."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from t5train.data.samples.span_corruption import is_content
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON
from t5train.data.vocabulary.tokenizer import Tokenizer as Sentencepieces
from t5train.inference.model_folder import Vocabulary
from t5train.inference.text.evaluation import Evaluation, EvaluationSpec, evaluate
from t5train.spec import TokenizerSpec

MakeModel = Callable[..., Path]
WORDS = ["Größe", "größer", "the", "a", "theatre", "ate", "heat", "tea", "Tee", "☃☃"]
NATS_A_BYTE = 0.7


def text_of(words: Sequence[str]) -> str:
    chosen = random.Random(0)
    return " ".join("".join(chosen.choices(words, k=2)) for _ in range(2000))


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every model give each byte of text the same probability, and sentinels, EOS and unknown pieces others.

    Returns the ids that are masked by the next evaluation.
    """
    ids: list[int] = []

    def predicted(folder: Any, _: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pieces = Sentencepieces.load(folder).pieces
        losses = np.full(targets.shape, 11.0)
        for place, token in np.ndenumerate(targets):
            if 3 <= token < len(pieces):
                losses[place] = NATS_A_BYTE * len(pieces[token].replace("▁", " ").encode())
        ids.extend(targets[is_content(targets, len(pieces) + 99)].tolist())
        return losses, np.ones(targets.shape, bool)

    monkeypatch.setattr("t5train.inference.text.evaluation._predicted", predicted)
    monkeypatch.setattr("t5train.inference.model_folder.ModelFolder.load", lambda folder, _: folder.path)
    return ids


def evaluated(folder: Path, text: Path) -> Evaluation:
    return evaluate(folder, str(text), EvaluationSpec(input_tokens=64))


def test_a_model_of_bytes_has_the_same_loss_per_byte_with_each_vocabulary(
    make_published: MakeModel, tmp_path: Path, masked: list[int]
) -> None:
    folder, text = make_published(), tmp_path / "text.txt"
    text.write_text(f"{text_of(WORDS)}\n\n{text_of(WORDS[2:])}\n", "utf-8")
    measured = []
    for vocab_size in (26, 80):
        (folder / SPIECE).write_bytes(train(TokenizerSpec(vocab_size=vocab_size), [text.read_text("utf-8")]))
        masked.clear()
        measured.append(found := evaluated(folder, text))
        pieces = Sentencepieces.load(folder).pieces
        assert found.masked_bytes == len(
            "".join(pieces[each] for each in masked if each > 2).replace("▁", " ").encode()
        )
        assert found.loss_per_byte == pytest.approx(NATS_A_BYTE)
        assert found.bits_per_byte == pytest.approx(NATS_A_BYTE / math.log(2))
        assert found.unknown_tokens == 0
        assert len(masked) == found.tokens
    assert measured[0].loss < 0.8 * measured[1].loss


def test_unknown_pieces_are_counted_and_left_out(make_published: MakeModel, tmp_path: Path, masked: list[int]) -> None:
    folder, text = make_published(), tmp_path / "text.txt"
    (folder / SPIECE).write_bytes(train(TokenizerSpec(vocab_size=40), [text_of(WORDS[2:-1])]))
    text.write_text(text_of(WORDS), "utf-8")
    found = evaluated(folder, text)
    assert found.unknown_tokens == masked.count(2) > 0
    assert found.loss_per_byte == pytest.approx(NATS_A_BYTE)
    assert found.loss > 0.9


def test_a_byte_level_vocabulary_spells_its_bytes(tmp_path: Path) -> None:
    made = Tokenizer(
        models.BPE(vocab={each: n for n, each in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{index}>" for index in reversed(range(100)))]
    made.add_special_tokens([AddedToken(name) for name in names])
    made.save(str(tmp_path / TOKENIZER_JSON))
    vocabulary = Vocabulary.of(tmp_path)
    (ids,) = vocabulary.encode(["Größe ☃"])
    assert vocabulary.spelled_bytes[ids].sum() == len("Größe ☃".encode())
    assert (vocabulary.spelled_bytes == 0).sum() == len(names)
