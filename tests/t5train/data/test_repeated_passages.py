"""Passages that occur more than once are counted, and whoever trains on them is told."""

from pathlib import Path

import pytest

from t5train.data import passages
from t5train.data.checks.whole_reading import TextFindings
from t5train.data.corpus import build_corpus
from t5train.data.passages import TextDigests
from t5train.data.shards import build_shards
from t5train.records.stage_records import REPEATED
from t5train.release.card_sections import repeated_line
from t5train.report.data_report import _finding_blocks
from t5train.spec import CorpusSpec, ShardsSpec
from tests.support.generated_text import DataChain

pytestmark = pytest.mark.usefixtures("quick_workers")


def digests_of(texts: list[str]) -> TextDigests:
    found = TextDigests()
    for first in range(0, len(texts), 100):
        found.add([text.encode() for text in texts[first : first + 100]])
    return found


@pytest.mark.parametrize("most", [10_000, 500])
def test_repeated_texts_are_counted_exactly_and_about_if_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(TextDigests, "MOST", most)
    monkeypatch.setattr(passages, "_DIGESTS_AT_ONCE", 70)
    texts = [f"text {number % 3000}" for number in range(4000)]
    parts = []
    for number in range(4):
        path = tmp_path / str(number)
        parts.append((path, digests_of(texts[number::4]).write(path)))
    found = TextDigests.joined(parts).repeated()
    if most == 10_000:
        assert found == 1000
    else:
        assert found == pytest.approx(1000, rel=0.4)
        assert digests_of(texts).repeated() == found, "the same texts are kept, however they are divided"


def test_copies_are_counted_over_all_files_and_the_count_reaches_the_shards(
    data_chain: DataChain, tmp_path: Path
) -> None:
    lines = [f"line {number} of a text" for number in range(900)]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("\n".join(lines))
    (tmp_path / "texts/b.txt").write_text("\n".join([*(f" {line} " for line in lines[:300]), "", "another line"]))
    spec = CorpusSpec(source=str(tmp_path / "texts"), split=(800, 100, 100))
    text = build_corpus(spec, tmp_path)
    assert text.counts[REPEATED] == 300
    assert not list(text.path.glob(".digests*"))
    shards = build_shards(
        ShardsSpec(shard_tokens=100_000, max_unknown_share=0.2), spec, text, data_chain.tokenizer, tmp_path
    )
    assert shards.counts[REPEATED] == 300
    assert repeated_line(shards.counts).startswith("300 passages of 1,201 have the text of another one. ")
    not_known = {name: count for name, count in shards.counts.items() if name != REPEATED}
    assert repeated_line(not_known) == repeated_line(not_known | {REPEATED: 0}) == ""


@pytest.mark.parametrize(
    ("copies", "remove", "is_warned"), [(9, (), False), (12, (), True), (12, ("duplicates",), False)]
)
def test_a_text_of_which_more_than_a_tenth_repeats_is_warned_of_in_the_log_and_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, copies: int, remove: tuple[str, ...], is_warned: bool
) -> None:
    lines = [f"line {number} of a text" for number in range(100)]
    (tmp_path / "a.txt").write_text("\n".join([*lines, *lines[:copies]]))
    settings = {"source": str(tmp_path / "a.txt"), "split": (998, 1, 1), "remove": remove, "workers": 1}
    text = build_corpus(CorpusSpec.model_validate(settings), tmp_path)
    assert any("have the text of another one, which may be in another split" in line for line in caplog.messages) == (
        is_warned
    )
    report = "\n".join(_finding_blocks(TextFindings.of(text)))
    assert ("- 10.7% of 112 passages have the text of another one" in report) == is_warned
