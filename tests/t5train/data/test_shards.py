"""The shards stage: the content of its files, and the same bytes for any number of workers."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from t5train.data.checks import whole_reading
from t5train.data.corpus import build_corpus
from t5train.data.formats.passage_frames import FRAMES
from t5train.data.native import segmenter_build
from t5train.data.passages import SPLITS, split_of
from t5train.data.segments import passages_of, read_segments
from t5train.data.shards import (
    _validation_documents,
    build_shards,
    plan_shards,
    read_description,
    shard_name,
    tokens_name,
)
from t5train.data.vocabulary.held_out import HELD_OUT
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.data.vocabulary.unknown_pieces import unigram_name
from t5train.errors import InputError, StorageError
from t5train.records.stage_records import MANIFEST, TokenShards
from t5train.spec import CorpusSpec, ShardsSpec
from tests.support.generated_text import DataChain

pytestmark = pytest.mark.usefixtures("quick_workers")


def build(data_chain: DataChain, out: Path, workers: int = 2) -> TokenShards:
    spec = ShardsSpec(shard_tokens=data_chain.shards_spec.shard_tokens, workers=workers)
    return build_shards(spec, data_chain.corpus_spec, data_chain.corpus, data_chain.tokenizer, out, out=out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-*")}


def test_the_shards_hold_every_document_of_the_corpus_once_and_in_order(data_chain: DataChain) -> None:
    tokenizer, shards = Tokenizer.load(data_chain.tokenizer.path), data_chain.shards
    (file,) = read_segments(data_chain.corpus.path)
    passages = [passage for segment in file.segments for passage in passages_of(file.source, segment)]
    numbers = range(int(shards.counts["num_shards"]))
    for split in SPLITS:
        texts = [passage.text for passage in passages if split_of(data_chain.corpus_spec, passage.id) == split]
        expected = tokenizer.encode(texts, add_eos=True)
        paths = [shards.path / tokens_name(split, number) for number in numbers]
        tokens = np.concatenate([np.fromfile(path, "<u2") for path in paths])
        assert tokens.tolist() == np.concatenate(expected).tolist()
        lengths = np.concatenate([np.fromfile(path.with_suffix(".len"), "<u4") for path in paths])
        assert lengths.tolist() == [len(document) for document in expected]
        assert shards.counts[f"{split}_documents"] == len(expected)
        assert shards.counts[f"{split}_tokens"] == lengths.sum()
    rows = 0
    for number in numbers:
        ((name, first, count),) = read_description(shards.path, number).source
        assert (name, first) == ("text.jsonl", rows)
        rows += count
    assert rows == 3000


def test_the_manifest_has_the_counts_that_training_needs(data_chain: DataChain) -> None:
    wanted = {"vocab_size": 400, "pad_id": 0, "eos_id": 1, "first_sentinel_id": 399, "num_sentinels": 100}
    assert (wanted | {"bytes_per_token": 2}).items() <= data_chain.shards.counts.items()
    assert data_chain.shards.counts["num_shards"] >= 4
    assert data_chain.shards.inputs == {
        "corpus": data_chain.corpus.fingerprint,
        "tokenizer": data_chain.tokenizer.fingerprint,
        "vocabulary": data_chain.tokenizer.files["spiece.model"].sha256,
    }


def test_without_the_compiled_segmenter_one_warning_names_the_remedy(
    data_chain: DataChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segmenter_build, "built", lambda: tmp_path / "segmenter.so")
    with caplog.at_level(logging.WARNING):
        build(data_chain, tmp_path / "out")
        build(data_chain, tmp_path / "out")  # reused
    assert [segmenter_build.COMMAND in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(data_chain: DataChain, tmp_path: Path, workers: int) -> None:
    build(data_chain, tmp_path / "out", workers)
    assert contents(tmp_path / "out") == contents(data_chain.shards.path)
    assert build(data_chain, tmp_path / "out", 2).reused


def test_large_compressed_text_is_stored_once_more_and_gives_the_same_bytes(
    data_chain: DataChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = read_segments(data_chain.corpus.path)
    compressed = tmp_path / f"{file.source.path.name}.gz"
    compressed.write_bytes(gzip.compress(file.source.path.read_bytes()))
    plain = tmp_path / "plain" / compressed.name
    plain.parent.mkdir()
    plain.hardlink_to(compressed)
    made = {}
    for least, path in ((1, compressed), (1 << 40, plain)):
        monkeypatch.setattr(whole_reading, "FRAMED_FROM_BYTES", least)
        spec = data_chain.corpus_spec.model_copy(update={"source": str(path)})
        text = build_corpus(spec, tmp_path, out=tmp_path / f"text-{least}")
        assert any(name.endswith(FRAMES) for name in text.files) is (least == 1)
        assert text.reused is False
        assert build_corpus(spec, tmp_path, out=tmp_path / f"text-{least}").reused
        chain = data_chain._replace(corpus=text, corpus_spec=spec)
        made[least] = contents(build(chain, tmp_path / f"shards-{least}").path)
    tokens = [{name: each for name, each in of.items() if not name.endswith(".json")} for of in made.values()]
    assert tokens[0] == tokens[1]


def test_a_large_vocabulary_takes_four_bytes_per_token(data_chain: DataChain, tmp_path: Path) -> None:
    large = data_chain.tokenizer.model_copy(update={"counts": {**data_chain.tokenizer.counts, "vocab_size": 65_537}})
    shards = build(data_chain._replace(tokenizer=large), tmp_path / "out")
    assert shards.counts["bytes_per_token"] == 4
    tokens = np.fromfile(shards.path / tokens_name("train", 0), "<u4")
    assert tokens.tolist() == np.fromfile(data_chain.shards.path / tokens_name("train", 0), "<u2").tolist()


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (tokens_name("train", 2), Path.unlink),
        (tokens_name("validation", 2), damaged),
        (shard_name(2), Path.unlink),
        (shard_name(2), damaged),
        ("test-00002.len", damaged),
        (unigram_name(2), damaged),
    ],
)
def test_only_the_missing_or_damaged_shard_is_made_again(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    first = build(data_chain, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-*")}
    damage(tmp_path / name)
    with caplog.at_level(logging.INFO):
        again = build(data_chain, tmp_path)
    assert not again.reused
    assert f"shards to make: 1 of {first.counts['num_shards']}" in caplog.text
    assert (again.fingerprint, again.files) == (first.fingerprint, first.files)
    remade = {path.name for path in tmp_path.glob("*-*") if path.stat().st_mtime_ns != before.get(path.name)}
    assert {each.partition("-")[2][:5] for each in remade - {HELD_OUT}} == {"00002"}


def test_an_interrupted_stage_resumes_where_it_stopped(
    data_chain: DataChain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(data_chain, tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / shard_name(1)).unlink()
    (tmp_path / ".train-00001.bin.0badcafe.tmp").write_bytes(b"half a shard")
    with caplog.at_level(logging.INFO):
        again = build(data_chain, tmp_path)
    assert "1 of" in caplog.text
    assert not list(tmp_path.glob(".*.tmp"))
    assert again.files == data_chain.shards.files


def test_shards_split_by_ids_of_an_earlier_version_are_made_again_unless_all_are_finished(
    data_chain: DataChain, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build(data_chain, out)
    made = contents(out)
    of_earlier = json.loads((out / shard_name(1)).read_bytes())
    del of_earlier["id_rule"]
    (out / shard_name(1)).write_text(json.dumps(of_earlier))
    assert read_description(out, 1).id_rule == 1
    before = (out / tokens_name("validation", 1)).stat().st_ino
    (out / MANIFEST).unlink()
    build(data_chain, out)
    assert contents(out) == made
    assert (out / tokens_name("validation", 1)).stat().st_ino != before


def test_a_shard_with_other_documents_than_its_text_is_blamed_and_not_the_tokenizer(
    data_chain: DataChain, tmp_path: Path
) -> None:
    for name in ("bin", "len"):
        (tmp_path / f"validation-00000.{name}").write_bytes(b"")
    plan = plan_shards(read_segments(data_chain.corpus.path), data_chain.shards_spec.shard_tokens)
    documents = _validation_documents(tmp_path, 0, plan[0], data_chain.corpus_spec, np.dtype("<u2"))
    with pytest.raises(InputError, match="Remove the folder of the shards"):
        list(documents)


def test_splits_have_the_requested_shares_and_change_with_the_seed() -> None:
    spec = CorpusSpec(split=(700, 200, 100))
    found = [split_of(spec, str(number)) for number in range(20_000)]
    for split, thousandths in zip(SPLITS, spec.split, strict=True):
        assert found.count(split) / 20_000 == pytest.approx(thousandths / 1000, abs=0.02)
    other = spec.model_copy(update={"split_seed": 1})
    assert found != [split_of(other, str(number)) for number in range(20_000)]


def test_progress_ends_at_the_size_of_the_text(data_chain: DataChain, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int | None]] = []
    spec, chain = ShardsSpec(shard_tokens=50_000, workers=2), data_chain
    build_shards(spec, chain.corpus_spec, chain.corpus, chain.tokenizer, tmp_path, lambda *each: reports.append(each))
    tokenised = [(done, total) for what, done, total in reports if what == "bytes of text tokenised"]
    assert tokenised[-1] == (data_chain.corpus.counts["text_bytes"],) * 2
    assert tokenised == sorted(tokenised)


def test_too_little_disk_space_is_reported_before_a_shard_is_written(
    data_chain: DataChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int(data_chain.corpus.counts["text_bytes"]) // 3
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(StorageError, match="too little disk space for the token shards: "):
        build(data_chain, tmp_path / "out")
    assert contents(tmp_path / "out") == {}
