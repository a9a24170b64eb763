"""Vocabularies of mT5 and of folders that transformers 5 wrote: their ids are those of transformers' tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import T5Tokenizer

from t5train.data.vocabulary.tokenizer import given_tokenizer, open_given
from t5train.errors import InputError, SpecError
from tests.support.generated_text import DataChain
from tests.support.mt5_vocabulary import write_mt5_vocabulary

TEXTS = [
    "the time of year number 7 and the way of the day",
    "an unknown ж, a byte <0x41> and <extra_id_0>",
    "  two  spaces, \u00e9 and e\u0301 and \uff21",
    "",
]


def reference(folder: Path, **options: Any) -> list[list[int]]:
    tokenizer = T5Tokenizer.from_pretrained(folder, **options)
    found: list[list[int]] = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    return found


def ids(encoded: list[np.ndarray]) -> list[list[int]]:
    return [each.tolist() for each in encoded]


def test_mt5s_vocabulary_has_the_ids_of_transformers_and_its_last_pieces_are_the_sentinels(tmp_path: Path) -> None:
    raw = tmp_path / "mt5"
    write_mt5_vocabulary(raw)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(raw / "spiece.model"))
    made = given_tokenizer(raw, tmp_path)
    tokenizer, published = open_given(made.path), T5Tokenizer.from_pretrained(made.path)
    assert tokenizer.vocab_size == pieces.get_piece_size() == made.counts["vocab_size"] == len(published)
    assert pieces.id_to_piece(tokenizer.sentinel_ids[0]) == "\u2581<extra_id_0>"
    assert published.convert_tokens_to_ids("<extra_id_0>") == tokenizer.sentinel_ids[0]
    plain = [0, 2, 3]
    encoded, expected = ids(tokenizer.encode(TEXTS)), reference(raw, extra_ids=0)
    assert [encoded[at] for at in plain] == [expected[at] for at in plain]
    published_ids = reference(made.path)
    assert [encoded[at] for at in plain] == [published_ids[at] for at in plain]
    byte = pieces.piece_to_id("<0x41>")
    assert byte in encoded[1]
    assert byte in expected[1]
    assert tokenizer.unk_id in encoded[1]


def test_a_folder_of_mt5_may_have_a_second_file_of_the_same_vocabulary(tmp_path: Path) -> None:
    raw = tmp_path / "mt5"
    write_mt5_vocabulary(raw)
    alone = given_tokenizer(raw, tmp_path)
    T5Tokenizer.from_pretrained(raw, extra_ids=0).save_pretrained(raw)
    assert (raw / "tokenizer.json").exists()
    assert given_tokenizer(raw, tmp_path).files == alone.files
    document = json.loads((raw / "tokenizer.json").read_text())
    document["model"]["vocab"][300][0] = "another"
    (raw / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="holds two vocabularies: id 300 is"):
        given_tokenizer(raw, tmp_path)


def test_sentinels_in_any_other_place_are_refused(tmp_path: Path) -> None:
    write_mt5_vocabulary(tmp_path)
    model = sentencepiece_model_pb2.ModelProto.FromString((tmp_path / "spiece.model").read_bytes())
    model.pieces[-1].piece, model.pieces[-2].piece = model.pieces[-2].piece, model.pieces[-1].piece
    (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
    with pytest.raises(SpecError, match=r"extra_ids is 0|byte_fallback=true"):
        given_tokenizer(tmp_path, tmp_path / "root")


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_a_folder_with_only_a_tokenizer_json_has_the_same_vocabulary(
    data_chain: DataChain, tmp_path: Path, kind: str
) -> None:
    folder, extra_ids = tmp_path / "model", 100
    if kind == "mt5":
        write_mt5_vocabulary(folder)
        extra_ids = 0
    else:
        folder.mkdir()
        shutil.copy(data_chain.tokenizer.path / "spiece.model", folder)
    whole = open_given(folder)
    T5Tokenizer.from_pretrained(folder, extra_ids=extra_ids).save_pretrained(folder)
    (folder / "spiece.model").unlink()
    made = given_tokenizer(folder, tmp_path)
    found = open_given(made.path)
    assert (found.pieces, found.sentinel_ids) == (whole.pieces, whole.sentinel_ids)
    assert ids(found.encode(TEXTS)) == ids(whole.encode(TEXTS))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json is not a unigram tokenizer in JSON\. Copy it again"):
        given_tokenizer(folder, tmp_path)


def test_a_tokenizer_json_with_another_normalisation_is_refused(data_chain: DataChain, tmp_path: Path) -> None:
    document = json.loads((data_chain.tokenizer.path / "tokenizer.json").read_text())
    document["normalizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"tokenizer\.json has another normalisation table"):
        given_tokenizer(tmp_path, tmp_path / "root")


@pytest.mark.parametrize("change", [{"normalizer": "nfkc"}, {"normalizer": 3}, {"model": {"vocab": {"ab": 0}}}])
def test_a_tokenizer_json_of_another_form_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    vocab = [[piece, 0.0] for piece in ("<pad>", "</s>", "<unk>")]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "normalizer": None} | change))
    with pytest.raises(InputError, match=r"tokenizer\.json is not a unigram tokenizer in JSON"):
        open_given(tmp_path)
