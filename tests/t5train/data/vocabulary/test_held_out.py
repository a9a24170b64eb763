"""The held-out passages that a certificate tests the published tokenizer with."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from t5train.data.passages import Passage, split_of
from t5train.data.segments import passages_of, read_segments
from t5train.data.vocabulary.held_out import HELD_OUT, choose, comparable, read_held_out, tied_line, write_held_out
from t5train.data.vocabulary.sentencepiece_model import SPACE
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import InputError
from t5train.records.witness import EncodedPassage
from tests.support.generated_text import DataChain

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_the_shards_stage_records_validation_passages_with_the_ids_it_wrote(data_chain: DataChain) -> None:
    passages, counts = read_held_out(data_chain.shards.path), data_chain.shards.counts
    held_out = {
        passage.text
        for file in read_segments(data_chain.corpus.path)
        for segment in file.segments
        for passage in passages_of(file.source, segment)
        if split_of(data_chain.corpus_spec, passage.id) == "validation"
    }
    assert HELD_OUT in data_chain.shards.files
    assert {each.text for each in passages} <= held_out
    encoded = Tokenizer.load(data_chain.tokenizer.path).encode([each.text for each in passages], add_eos=True)
    assert [each.ids for each in passages] == [ids.tolist() for ids in encoded]
    assert counts["held_out_compared"] >= len(passages) > 0
    assert (counts["held_out_tied"], counts["held_out_left_out"]) == (0, 0)


def test_passages_with_unknown_foreign_and_rare_pieces_are_chosen_first() -> None:
    common = [EncodedPassage(text=f"common {index}", ids=[10, 11, 1]) for index in range(50)]
    rare = [EncodedPassage(text=f"rare {index}", ids=[100 + index, 1]) for index in range(3)]
    others = [EncodedPassage(text="unknown", ids=[2, 1]), EncodedPassage(text="f\u00fcr", ids=[10, 1])]
    chosen = choose([*common, *rare, *others], most=8)
    assert all(each in chosen for each in [*rare, *others])
    assert len(chosen) == 8
    assert choose([*common, *rare, *others], most=8) == chosen


def test_text_that_spells_control_tokens_is_left_out_and_a_long_text_is_cut_at_a_space(data_chain: DataChain) -> None:
    tokenizer = Tokenizer.load(data_chain.tokenizer.path)
    texts = ["a </s> b", "an <extra_id_7>", "<unk>", "next\x85line", "word " * 2000]
    texts += ["\uff1c/s\uff1e", "<\x01unk>", "\uff1cextra_id_7>"]  # normalisation gives control tokens
    left_out = Counter[str]()
    found = list(comparable(((Passage("", "", text), np.array([1])) for text in texts), tokenizer, left_out))
    assert left_out == {"held_out_left_out": 7}
    assert [each.text for each in found] == [("word " * 800).rstrip()]
    assert found[0].ids == tokenizer.encode([found[0].text], add_eos=True)[0].tolist()


def test_a_tokenizer_json_of_another_vocabulary_is_refused_before_training(
    data_chain: DataChain, tmp_path: Path
) -> None:
    document = json.loads((data_chain.tokenizer.path / "tokenizer.json").read_text())
    names, scores = map(list, zip(*document["model"]["vocab"], strict=True))
    random.Random(0).shuffle(names)
    document["model"]["vocab"] = list(zip(names, scores, strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"passages differently from the spiece\.model in the same folder\. Remove"):
        write_held_out(tmp_path, read_held_out(data_chain.shards.path), tmp_path / "tokenizer.json")
    assert not (tmp_path / HELD_OUT).exists()


def test_rows_of_dashes_whose_pieces_are_ordered_differently_are_no_other_vocabulary(
    data_chain: DataChain, tmp_path: Path
) -> None:
    reference = data_chain.tokenizer.path / "tokenizer.json"
    passages = read_held_out(data_chain.shards.path)
    ordered = [each.model_copy(update={"ids": [*each.ids[1::-1], *each.ids[2:]]}) for each in passages]
    write_held_out(tmp_path, [*passages[:3], *ordered[3:]], reference)
    assert read_held_out(tmp_path) == passages[:3]
    other = [each.model_copy(update={"ids": [*each.ids[:-1], each.ids[0]]}) for each in passages]
    with pytest.raises(InputError, match=f"encodes {len(passages) - 3} of {len(passages)} held-out passages"):
        write_held_out(tmp_path, [*passages[:3], *other[3:]], reference)


@pytest.fixture
def dashes(tmp_path: Path) -> Path:
    """A tokenizer.json in which ``=-`` is as probable as ``=`` and ``-``, but for rounding."""
    pieces = [["<pad>", 0], ["</s>", 0], ["<unk>", 0], [SPACE, -2], ["-", -3], ["--", -5], ["=", -4], ["=-", -7.0001]]
    model = {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": False}
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "decoder", "post_processor"))
    document = {"version": "1.0", "added_tokens": [], **nothing, "pre_tokenizer": spaces, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return tmp_path / "tokenizer.json"


def passage(text: str, *ids: int) -> EncodedPassage:
    return EncodedPassage(text=text, ids=list(ids))


def test_a_segmentation_that_is_as_good_is_counted_and_not_recorded(dashes: Path, tmp_path: Path) -> None:
    agreed = [passage("--", 3, 5), passage("-", 3, 4)]
    tied = [passage("---", 3, 4, 5), passage("---", 3, 5, 4), passage("=-", 3, 6, 4), passage("=-", 3, 7)]
    counts = write_held_out(tmp_path, [*agreed, *tied], dashes)
    assert counts == {"held_out_compared": 6, "held_out_tied": 2}, "of each two, one is what the library chooses"
    assert set(map(str, agreed)) < set(map(str, read_held_out(tmp_path)))


@pytest.mark.parametrize(("agreed", "warned"), [(98, True), (99, False)])
def test_more_than_one_percent_of_equally_probable_segmentations_is_a_warning(
    dashes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, agreed: int, warned: bool
) -> None:
    tied = [passage("=-", 3, 6, 4), passage("=-", 3, 7)]  # one of them is what the library chooses
    counts = write_held_out(tmp_path, [passage("--", 3, 5)] * (agreed - 1) + tied, dashes)
    assert counts["held_out_tied"] == 1
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [each.split(" of the held-out")[0] for each in found] == ["1.0%"] * warned
    assert all("(1 of 99)" in each and "scores" in each and "tokenizer.path" in each for each in found)
    assert tied_line(counts) == "".join(found)


@pytest.mark.parametrize(
    "other",
    [
        passage("--", 3, 4, 4),  # the same text, but less probable
        passage("--", 3, 4),  # another text
        passage("--", 5),
        passage("--", 3, 2),
        passage("\u4e2d", 3, 2, 2),
    ],
)
def test_a_single_passage_with_other_ids_is_refused(dashes: Path, tmp_path: Path, other: EncodedPassage) -> None:
    agreed = [passage("--", 3, 5)] * 999
    with pytest.raises(InputError, match=r"encodes 1 of 1000 held-out passages differently .* Remove"):
        write_held_out(tmp_path, [*agreed, other], dashes)
    assert not (tmp_path / HELD_OUT).exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, r"does not exist: make the shards again .*`run` .*of pairs, `finetune`"),
        ("{", r"is damaged .*`t5-pretrain run` .*of pairs, `finetune`"),
        ('{"passages": []}', r"no passage.*corpus\.split; of pairs, pairs\.split"),
    ],
)
def test_shards_without_passages_are_refused_with_the_remedies_for_text_and_pairs(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / HELD_OUT).write_text(content)
    with pytest.raises(InputError, match=complaint):
        read_held_out(tmp_path)
