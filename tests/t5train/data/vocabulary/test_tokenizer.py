"""The tokenizer stage: T5's format, Hugging Face's ids, and no control ids from text."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from t5train.data.vocabulary.sentencepiece_model import train
from t5train.data.vocabulary.tokenizer import Tokenizer, build_tokenizer, given_tokenizer
from t5train.errors import InputError, SpecError
from t5train.spec import TokenizerSpec
from tests.support.generated_text import WORDS, DataChain
from tests.support.waiting import await_that

TRAIN = """
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.spec import CorpusSpec, TokenizerSpec

root = Path(sys.argv[1])
spec = CorpusSpec(source=str(root / "text.txt"), workers=1)
corpus = build_corpus(spec, root)
build_tokenizer(TokenizerSpec(vocab_size=300), spec, corpus, root, lambda what, *_: print(what, flush=True))
"""
CONTROL_TEXTS = [
    "</s>",
    "<pad>",
    "<unk>",
    "<extra_id_0>",
    "<extra_id_99>",
    "a</s>b",
    "river <extra_id_7> </s>",
    "▁</s>",
]


@pytest.fixture(scope="module")
def hugging_face(data_chain: DataChain) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_chain.tokenizer.path)


@given(st.lists(st.sampled_from([*WORDS, "é", "Zürich", "42", "(x)", ",", "日本"]), max_size=12).map(" ".join))
def test_ids_are_those_of_hugging_face(data_chain: DataChain, hugging_face: Any, text: str) -> None:
    ours = Tokenizer.load(data_chain.tokenizer.path).encode([text], add_eos=True)[0]
    assert ours.tolist() == hugging_face(text).input_ids


def test_plain_transformers_loads_the_folder(data_chain: DataChain, hugging_face: Any) -> None:
    tokenizer = Tokenizer.load(data_chain.tokenizer.path)
    assert type(hugging_face).__name__ == "T5Tokenizer"
    assert len(hugging_face) == tokenizer.vocab_size == data_chain.tokenizer.counts["vocab_size"] == 400
    assert (hugging_face.pad_token_id, hugging_face.eos_token_id, hugging_face.unk_token_id) == (0, 1, 2)
    names = [f"<extra_id_{index}>" for index in range(100)]
    assert hugging_face.convert_tokens_to_ids(names) == tokenizer.sentinel_ids == list(range(399, 299, -1))
    assert hugging_face.model_max_length == 512


@pytest.mark.parametrize("text", CONTROL_TEXTS)
def test_literal_control_text_never_becomes_a_control_id(data_chain: DataChain, text: str) -> None:
    tokenizer = Tokenizer.load(data_chain.tokenizer.path)
    control = {tokenizer.pad_id, tokenizer.eos_id, *tokenizer.sentinel_ids}
    assert not control.intersection(tokenizer.encode([text])[0].tolist())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_becomes_a_control_id(data_chain: DataChain, text: str) -> None:
    ids = Tokenizer.load(data_chain.tokenizer.path).encode([text])[0]
    assert ((ids >= 2) & (ids < 300)).all()


def test_the_same_text_gives_the_same_vocabulary(data_chain: DataChain, tmp_path: Path) -> None:
    again = build_tokenizer(TokenizerSpec(vocab_size=300), data_chain.corpus_spec, data_chain.corpus, tmp_path)
    assert not again.reused
    assert again.files == data_chain.tokenizer.files


def test_the_vocabulary_is_trained_on_the_train_split_only(data_chain: DataChain, tmp_path: Path) -> None:
    spec = TokenizerSpec(vocab_size=300)
    other = data_chain.corpus_spec.model_copy(update={"split_seed": 1})
    again = build_tokenizer(spec, other, data_chain.corpus, tmp_path)
    assert again.files["spiece.model"] != data_chain.tokenizer.files["spiece.model"]


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_no_process_goes_on_training_once_the_stage_is_interrupted_or_killed(
    tmp_path: Path, ended_by: signal.Signals
) -> None:
    letters = random.Random(0).choices("abcdefghijklmnopqrst", k=5_000_000)  # about a minute's work
    words = ("".join(letters[start : start + 8]) for start in range(0, len(letters), 8))
    (tmp_path / "text.txt").write_text("\n".join(" ".join(line) for line in zip(*[words] * 10, strict=False)))
    command, pipe = [sys.executable, "-c", TRAIN, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as stage:
        assert stage.stdout is not None
        while not stage.stdout.readline().startswith("seconds of vocabulary training"):
            assert stage.poll() is None
        assert _has_processes(stage.pid)
        stage.send_signal(ended_by)
        await_that(lambda: stage.poll() is not None and not _has_processes(stage.pid), seconds=20)


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_given_model_is_used_unchanged_from_a_file_or_a_folder(data_chain: DataChain, tmp_path: Path) -> None:
    spec = TokenizerSpec(path=str(data_chain.tokenizer.path / "spiece.model"))
    from_file = build_tokenizer(spec, data_chain.corpus_spec, data_chain.corpus, tmp_path)
    assert from_file.files == data_chain.tokenizer.files
    assert given_tokenizer(data_chain.tokenizer.path, tmp_path).reused


def test_a_vocabulary_too_large_for_the_text_is_refused_with_the_largest_size(
    data_chain: DataChain, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"tokenizer\.vocab_size is 32000: this corpus gives at most \d+ pieces"):
        build_tokenizer(TokenizerSpec(vocab_size=32000), data_chain.corpus_spec, data_chain.corpus, tmp_path)


def test_a_vocabulary_smaller_than_the_alphabet_is_refused() -> None:
    alphabet = "".join(chr(0x4E00 + index) for index in range(2000))
    with pytest.raises(SpecError, match="the characters of this corpus alone need"):
        train(TokenizerSpec(vocab_size=300, character_coverage=1.0), [alphabet] * 50)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_text("no model")
    with pytest.raises(InputError, match="not a SentencePiece model"):
        given_tokenizer(tmp_path / "spiece.model", tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(InputError, match="not a SentencePiece model"):
        given_tokenizer(tmp_path / "spiece.model", tmp_path)


def test_a_folder_without_a_spiece_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecError, match=r"has no spiece\.model\. Copy the spiece\.model"):
        given_tokenizer(tmp_path, tmp_path)
    with pytest.raises(SpecError, match="no such file or folder"):
        given_tokenizer(tmp_path / "absent", tmp_path)


def test_another_number_of_sentinels_is_refused(data_chain: DataChain, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes((data_chain.tokenizer.path / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 0}))
    with pytest.raises(SpecError, match="extra_ids is 0"):
        given_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("settings", ["{garbage", "[]", "\0"])
def test_a_damaged_tokenizer_config_is_refused_with_a_clear_error(
    data_chain: DataChain, tmp_path: Path, settings: str
) -> None:
    (tmp_path / "spiece.model").write_bytes((data_chain.tokenizer.path / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises((SpecError, InputError), match=r"tokenizer_config\.json is not JSON|extra_ids is None"):
        given_tokenizer(tmp_path, tmp_path)


def changed(data_chain: DataChain, change: str) -> bytes:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((data_chain.tokenizer.path / "spiece.model").read_bytes())
    if change == "bos":
        model.pieces[0].piece = "<s>"
    elif change == "sentinel piece":
        model.pieces[50].piece = "<extra_id_0>"
        model.pieces[50].type = model.pieces[50].USER_DEFINED
    elif change == "plain eos":
        model.pieces[1].type = model.pieces[1].NORMAL
    elif change == "spaces":
        model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


@pytest.mark.parametrize("change", ["bos", "sentinel piece", "plain eos", "spaces"])
def test_a_model_that_is_not_in_t5s_form_is_refused(data_chain: DataChain, tmp_path: Path, change: str) -> None:
    (tmp_path / "spiece.model").write_bytes(changed(data_chain, change))
    sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))  # it is still a valid model
    with pytest.raises(SpecError, match=r"tokenizer\.path"):
        given_tokenizer(tmp_path, tmp_path / "root")
    assert not (tmp_path / "root").exists()
