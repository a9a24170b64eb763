"""The tokenizer stage: T5's format, Hugging Face's ids, and no control ids from text."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto as Model

from t5train.data.vocabulary.sentencepiece_model import require_t5_form, train
from t5train.data.vocabulary.tokenizer import Tokenizer, build_tokenizer, expected_vocab_size, given_tokenizer
from t5train.errors import InputError, SpecError
from t5train.spec import TokenizerSpec
from tests.support.generated_text import WORDS, DataChain
from tests.support.waiting import await_that

pytestmark = pytest.mark.usefixtures("quick_workers")
PYTHON = sys.executable
"""The real one, for processes that are sent signals: those of quick_workers get none but SIGKILL."""

T5S_SPECIAL_PIECES: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
T5S_SPECIAL_PIECES |= {"pad_piece": "<pad>", "eos_piece": "</s>", "unk_piece": "<unk>"}
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


CONTROL_TEXTS = ["</s>", "<pad>", "<unk>", "<extra_id_0>", "a</s>b", "river <extra_id_7> </s>", "▁</s>"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_becomes_a_control_id(data_chain: DataChain, text: str) -> None:
    for ids in Tokenizer.load(data_chain.tokenizer.path).encode([text, *CONTROL_TEXTS]):
        assert ((ids >= 2) & (ids < 300)).all()


def test_a_vocabulary_depends_on_the_text_of_the_train_split_only(data_chain: DataChain, tmp_path: Path) -> None:
    spec, chain = TokenizerSpec(vocab_size=300), data_chain
    again = build_tokenizer(spec, chain.corpus_spec, chain.corpus, tmp_path)
    assert not again.reused
    assert again.files == chain.tokenizer.files
    other = build_tokenizer(spec, chain.corpus_spec.model_copy(update={"split_seed": 1}), chain.corpus, tmp_path)
    assert other.files["spiece.model"] != chain.tokenizer.files["spiece.model"]


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_no_process_goes_on_training_once_the_stage_is_interrupted_or_killed(
    tmp_path: Path, ended_by: signal.Signals
) -> None:
    letters = random.Random(0).choices("abcdefghijklmnopqrst", k=5_000_000)  # about a minute's work
    words = ("".join(letters[start : start + 8]) for start in range(0, len(letters), 8))
    (tmp_path / "text.txt").write_text("\n".join(" ".join(line) for line in zip(*[words] * 10, strict=False)))
    command, pipe = [PYTHON, "-c", TRAIN, str(tmp_path)], subprocess.PIPE
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


@pytest.mark.parametrize("spelled", ["<unk>", "</s>", "<pad>", "<extra_id_0>", "<b>"])
def test_text_that_spells_a_special_piece_keeps_its_characters(spelled: str) -> None:
    texts = [f"the {spelled} of river {index} was named after the {spelled}" for index in range(3000)]
    proto = train(TokenizerSpec(vocab_size=300), ["".join(WORDS[:100]), " ".join(WORDS), *texts])
    assert set(spelled) <= {piece.piece for piece in Model.FromString(proto).pieces}
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
    assert not any(Tokenizer.unk_id in ids for ids in processor.encode(texts[:10]))
    require_t5_form(proto, "the trained vocabulary")


def test_a_trained_model_is_byte_for_byte_that_of_the_trainer_where_no_text_spells_a_special_piece() -> None:
    texts = [" ".join(WORDS[start : start + 40]) for start in range(560)]
    plain = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=plain,
        model_type="unigram",
        vocab_size=300,
        character_coverage=TokenizerSpec().character_coverage,
        **T5S_SPECIAL_PIECES,
        num_threads=8,
        minloglevel=2,
    )
    assert train(TokenizerSpec(vocab_size=300), texts) == plain.getvalue()


def test_text_beside_the_trainers_own_symbol_for_unknown_characters_is_trained_on() -> None:
    texts = [" ".join(WORDS[start : start + 40]) for start in range(560)]
    bars = [f"{text} \u2585" for text in texts]
    assert train(TokenizerSpec(vocab_size=300), bars) == train(TokenizerSpec(vocab_size=300), texts)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    for content in (b"no model", b""):
        (tmp_path / "spiece.model").write_bytes(content)
        with pytest.raises(InputError, match="not a SentencePiece model"):
            given_tokenizer(tmp_path / "spiece.model", tmp_path)


def test_a_folder_without_a_vocabulary_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has neither spiece\.model nor tokenizer\.json\. Copy the spiece\.model"):
        given_tokenizer(tmp_path, tmp_path)
    with pytest.raises(SpecError, match="no such file or folder"):
        given_tokenizer(tmp_path / "absent", tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('{"extra_ids": 0}', "extra_ids is 0"),
        ("[]", "extra_ids is None"),
        *((damaged, r"tokenizer_config\.json is not JSON") for damaged in ("{garbage", "\0", "[" * 100_000)),
    ],
)
def test_a_tokenizer_config_that_is_damaged_or_has_another_number_of_sentinels_is_refused(
    data_chain: DataChain, tmp_path: Path, settings: str, said: str
) -> None:
    shutil.copy(data_chain.tokenizer.path / "spiece.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises((SpecError, InputError), match=said):
        given_tokenizer(tmp_path, tmp_path)


def other_pieces(document: dict[str, Any]) -> None:
    document["model"]["vocab"][10:12] = document["model"]["vocab"][11:9:-1]


def other_score(document: dict[str, Any]) -> None:
    document["model"]["vocab"][10][1] -= 0.01


def no_sentinels(document: dict[str, Any]) -> None:
    document["added_tokens"] = [each for each in document["added_tokens"] if "extra_id" not in each["content"]]
    document["model"]["vocab"] = [each for each in document["model"]["vocab"] if "extra_id" not in each[0]]


def no_vocabulary(document: dict[str, Any]) -> None:
    del document["model"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_pieces, r"holds two vocabularies: id 10 is .* in its tokenizer\.json, but .* Copy both files again"),
        (other_score, r"id 10 is .* with the score .* in its tokenizer\.json, but .*Copy both files again"),
        (no_sentinels, r"id 300 is None in its tokenizer\.json, but '<extra_id_99>' in its spiece\.model"),
        (no_vocabulary, r"tokenizer\.json is not a unigram tokenizer in JSON\. Copy it again"),
    ],
)
def test_a_folder_whose_two_files_hold_different_vocabularies_is_refused(
    data_chain: DataChain, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    shutil.copy(data_chain.tokenizer.path / "spiece.model", tmp_path)
    document = json.loads((data_chain.tokenizer.path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert given_tokenizer(tmp_path, tmp_path / "root").files == data_chain.tokenizer.files
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=said):
        given_tokenizer(tmp_path, tmp_path / "root")
    with pytest.raises(InputError, match=said):
        expected_vocab_size(TokenizerSpec(path=str(tmp_path)))
    assert given_tokenizer(tmp_path / "spiece.model", tmp_path / "root").reused, "a named file needs no other"


def other_rules() -> bytes:
    processor = sentencepiece.SentencePieceNormalizer(rule_name="nfkc_cf")
    charsmap: bytes = Model.FromString(processor.serialized_model_proto()).normalizer_spec.precompiled_charsmap
    return charsmap


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("pieces[0]", "piece", "<s>"),
        ("pieces[1]", "type", Model.SentencePiece.NORMAL),
        # The published tokenizer would make unknown characters cost that much.
        ("pieces[2]", "score", -1000),
        ("pieces[50]", "piece", "<extra_id_0>"),
        ("pieces[50]", "piece", "</s>"),
        ("pieces[50]", "piece", "\u2581ba\u2581el"),
        ("pieces[50]", "type", Model.SentencePiece.UNUSED),
        ("pieces[50]", "score", 0.5),
        ("pieces[50]", "score", -2000.0),
        ("the space", "piece", "\u00e4\u00f6"),
        ("normalizer_spec", "precompiled_charsmap", other_rules()),
        ("normalizer_spec", "precompiled_charsmap", b""),
        ("denormalizer_spec", "precompiled_charsmap", other_rules()),
        ("trainer_spec", "eos_piece", "<pad>"),
        ("trainer_spec", "eos_piece", "<end>"),
    ],
)
def test_a_model_that_is_not_in_t5s_form_is_refused(
    data_chain: DataChain, tmp_path: Path, part: str, name: str, value: object
) -> None:
    model = Model.FromString((data_chain.tokenizer.path / "spiece.model").read_bytes())
    parts = {f"pieces[{number}]": piece for number, piece in enumerate(model.pieces)}
    parts["the space"] = next(piece for piece in model.pieces if piece.piece == "\u2581")
    setattr(parts.get(part) or getattr(model, part), name, value)
    (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
    sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))  # it is still a valid model
    said = r"tokenizer\.path: .*Choose a vocabulary like T5's.*begin a new run"
    if (part, name) == ("pieces[50]", "score"):
        said = rf"has the score {value:g} for .*must be from -1024 to 0 \(log probabilities\).*{said[16:]}"
    with pytest.raises(SpecError, match=said):
        given_tokenizer(tmp_path, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_score_that_is_not_a_number_is_named(data_chain: DataChain, tmp_path: Path) -> None:
    model = Model.FromString((data_chain.tokenizer.path / "spiece.model").read_bytes())
    model.pieces[50].score = float("nan")
    (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=r"is damaged \(.*score is NaN or Inf\)\. Restore the file"):
        given_tokenizer(tmp_path, tmp_path / "root")


def trained_with(folder: Path, **settings: Any) -> Path:
    """Train a vocabulary with T5's special pieces, and other settings of SentencePiece than T5's."""
    model = io.BytesIO()
    usual: dict[str, Any] = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "vocab_size": 100}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the time of year number {index} and the way of the day" for index in range(400)]),
        model_writer=model,
        hard_vocab_limit=False,
        **T5S_SPECIAL_PIECES,
        minloglevel=2,
        **(usual | settings),
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    return folder / "spiece.model"


ANOTHER_TABLE = "has another normalisation table than nmt_nfkc (its rule is named '{}')"


@pytest.mark.parametrize("given", ["a file", "a folder"])
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        *(
            ({"normalization_rule_name": rule}, ANOTHER_TABLE.format(rule))
            for rule in ("identity", "nfkc", "nfkc_cf", "nmt_nfkc_cf")
        ),
        ({"normalization_rule_tsv": "rules.tsv"}, ANOTHER_TABLE.format("user_defined")),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true"),
        ({"split_by_whitespace": False, "vocab_size": 400}, "no piece may span words"),
        ({"add_dummy_prefix": False}, "add_dummy_prefix=false"),
        ({"remove_extra_whitespaces": False}, "remove_extra_whitespaces=false"),
        ({"byte_fallback": True, "vocab_size": 400}, "byte_fallback=true"),
        ({"user_defined_symbols": ["number"]}, "the special piece 'number'"),
        ({"control_symbols": ["<sep>"]}, "the special piece '<sep>'"),
        ({"model_type": "bpe"}, "of type bpe"),
        ({"model_type": "char"}, "of type char"),
    ],
)
def test_a_vocabulary_that_the_published_tokenizer_uses_otherwise_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, settings: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.tsv").write_text("61 62\t63\n")
    spiece = trained_with(tmp_path, **settings)
    path = spiece if given == "a file" else tmp_path
    with pytest.raises(SpecError, match=re.escape(complaint)):
        given_tokenizer(path, tmp_path / "root")
    with pytest.raises(SpecError, match=re.escape(complaint)):
        expected_vocab_size(TokenizerSpec(path=str(path)))
    assert not (tmp_path / "root").exists()
