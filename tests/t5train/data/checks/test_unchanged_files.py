"""A text that is changed while it is read is refused, also if it has as many passages as before."""

import os
from pathlib import Path
from typing import Any

import pytest

from t5train.data import corpus as corpus_stage
from t5train.data import shards as shards_stage
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.errors import InputError
from t5train.spec import CorpusSpec, ShardsSpec
from tests.support.generated_text import DataChain, write_jsonl

CHANGED = r"^a file of the text was changed while it was read: .*text\.jsonl has sha256"


def change_a_word(path: Path) -> None:
    """Replace a word of the last passage by one of the same size, as an editor does: by a new file."""
    content = path.read_text()
    place = content.rindex(" ") + 1
    new = path.with_suffix(".new")
    new.write_text(f"{content[:place]}{'z' if content[place] != 'z' else 'y'}{content[place + 1 :]}")
    new.replace(path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read_whole", "find_repetitions", "write_without"])
def test_a_change_while_the_corpus_is_made_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    spec = CorpusSpec(source=str(text), remove=("duplicates",), workers=1)
    act = getattr(corpus_stage, stage)

    def changed(*given: Any) -> Any:
        change_a_word(text)
        return act(*given)

    with monkeypatch.context() as broken:
        broken.setattr(corpus_stage, stage, changed)
        with pytest.raises(InputError, match=CHANGED):
            build_corpus(spec, tmp_path / "root")
    again = build_corpus(spec, tmp_path / "root")
    assert not again.reused
    assert again.files[str(text)].size == text.stat().st_size


def test_a_file_that_is_only_touched_is_not_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = write_jsonl(tmp_path / "text.jsonl", 30), corpus_stage.read_whole

    def touched(*given: Any) -> Any:
        os.utime(text, (0, 0))
        return read(*given)

    monkeypatch.setattr(corpus_stage, "read_whole", touched)
    assert build_corpus(CorpusSpec(source=str(text), workers=1), tmp_path / "root").counts["passages"] == 30


def test_a_change_after_the_corpus_was_made_is_noticed_when_shards_are_made(
    data_chain: DataChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    spec = CorpusSpec(source=str(text), workers=1, split=(700, 200, 100))
    corpus = build_corpus(spec, tmp_path / "root")
    whole, make = text.read_text(), shards_stage._make

    def changed(*given: Any) -> None:
        change_a_word(text)
        make(*given)

    def shards() -> Any:
        return build_shards(ShardsSpec(workers=1), spec, corpus, data_chain.tokenizer, tmp_path / "root")

    with monkeypatch.context() as broken:
        broken.setattr(shards_stage, "_make", changed)
        with pytest.raises(InputError, match=CHANGED):
            shards()
    assert not [*(tmp_path / "root").glob("shards/*/shard-*.json")], "what was made of it does not count"
    text.write_text(whole)
    assert not shards().reused


def test_shards_made_of_a_text_that_was_changed_and_changed_back_are_made_again(
    tmp_path: Path, data_chain: DataChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", 2000)
    spec = CorpusSpec(source=str(text), workers=1, split=(700, 200, 100))
    corpus = build_corpus(spec, tmp_path / "root")
    whole, make = text.read_text(), shards_stage._make

    def shards(root: str) -> Any:
        settings = ShardsSpec(workers=1, shard_tokens=8192)
        return build_shards(settings, spec, corpus, data_chain.tokenizer, tmp_path / "root", out=tmp_path / root)

    def interrupted(jobs: Any, *rest: Any) -> None:
        change_a_word(text)
        make(jobs[-2:], *rest)  # the last one has the word
        raise KeyboardInterrupt

    expected = shards("clean").files
    with monkeypatch.context() as broken:
        broken.setattr(shards_stage, "_make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shards("other")
    assert len([*(tmp_path / "other").glob("shard-*.json")]) == 2
    text.write_text(whole)
    assert shards("other").files == expected
    assert not [*(tmp_path / "other").glob(".*stamps*")]
