"""What a search for repetitions found is in the data report and the model card."""

from pathlib import Path

import pytest

from infra.head.preflight.text_checks import require_text
from t5train.data.corpus import build_corpus
from t5train.data.passages import TextCounts
from t5train.data.shards import build_shards
from t5train.errors import InputError, SpecError
from t5train.records.stage_records import REMOVED
from t5train.release.card_sections import removed_line
from t5train.report.data_report import data_report
from t5train.report.data_statistics import train_split_facts
from t5train.spec import CorpusSpec, ShardsSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import DataChain, write_copies, write_jsonl


def test_the_report_and_the_card_say_what_was_removed(data_chain: DataChain, tmp_path: Path) -> None:
    text = write_copies(tmp_path / "text.jsonl")
    spec = recipe("smoke").with_settings(
        {"corpus.source": str(text), "corpus.remove": ["duplicates"], "corpus.split": [700, 200, 100]}
    )
    corpus = build_corpus(spec.corpus, tmp_path)
    shards = build_shards(ShardsSpec(shard_tokens=100_000), spec.corpus, corpus, data_chain.tokenizer, tmp_path)
    removed = corpus.counts[REMOVED]
    assert removed == shards.counts[REMOVED] > 40
    report = data_report(spec, corpus, data_chain.tokenizer, shards, train_split_facts(shards, spec.objective))
    assert f"| passages removed from training | {removed:,} |" in report
    assert "## Repetitions" in report
    assert "| copies of an earlier passage of the split |" in report
    assert "near-duplicates of" not in report.replace("Near-duplicates include", ""), "they were not looked for"
    line = removed_line(shards.counts, spec.identity())
    assert line == f"Removed from the training split before training: {removed} passages (duplicates)."
    compared = spec.identity()
    compared["corpus"] |= {"remove": ["near_duplicates", "contaminated"], "test_sets": ["s3://a/`b`.jsonl"]}
    assert removed_line(shards.counts, compared).endswith(
        "(near-duplicates, contaminated). Training text was also compared with ``s3://a/`b`.jsonl``."
    )
    listed = spec.identity()
    listed["corpus"] = {"remove_listed": True}
    assert removed_line(shards.counts, listed).endswith("passages (near-duplicates that were found by embeddings).")
    assert not removed_line({}, spec.identity())


def test_text_from_which_all_training_passages_would_be_removed_is_refused(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 30)
    spec = CorpusSpec(source=str(text), remove=("duplicates",), test_sets=(str(text),), split=(700, 200, 100))
    with pytest.raises(InputError, match=r"^all \d+ passages of the training split repeat others"):
        build_corpus(spec, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus.remove": "[near]"}, "it must be"),
        ({"corpus.test_sets": ["a.txt"]}, "nothing would be removed: set corpus.remove to contaminated"),
        ({"corpus.test_sets": [" "], "corpus.remove": ["duplicates"]}, "has an empty name"),
        ({"corpus.test_sets": ["hf://someone/questions"], "corpus.remove": ["duplicates"]}, "of which no split can be"),
        ({"corpus.test_sets": ["s3://key:secret@b/a"], "corpus.remove": ["duplicates"]}, "corpus.test_sets"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        recipe("smoke").with_settings(settings)
    assert "key:secret" not in str(error.value)


def test_what_to_remove_can_be_given_as_one_text_in_any_order() -> None:
    spec = recipe("smoke").with_settings({"corpus.remove": "contaminated, duplicates,duplicates"})
    assert spec.corpus.remove == ("duplicates", "contaminated")


def test_a_missing_test_set_is_noticed_before_anything_starts(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    absent = str(tmp_path / "absent.jsonl")
    settings = {"corpus.source": str(text), "corpus.remove": ["contaminated"], "corpus.test_sets": [absent]}
    with pytest.raises(InputError, match=r"^corpus\.test_sets .*absent"):
        require_text(recipe("smoke").with_settings(settings))


def test_texts_with_odd_characters_are_counted_by_kind() -> None:
    counts = TextCounts()
    texts = ["plain\ttext\r\n\x85", "a bell \x07", "lost \ufffd", "an </s> and <extra_id_5>", "a < b", "\x9f\ufffd"]
    counts.add([text.encode() for text in texts])
    counts.add([b"fine"])
    assert counts.odd == {"control_characters": 2, "replacement_characters": 2, "special_pieces": 1}
    assert counts.lengths == {4: 3, 3: 3, 5: 1}
