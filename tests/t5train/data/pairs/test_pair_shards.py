"""The stage of pair shards: the content of its files, and what it refuses."""

import itertools
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5train.data.pairs import pair_shards
from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.pairs.pair_shard_worker import encode_pairs
from t5train.data.pairs.pair_shards import build_pair_shards, shard_file, task_names
from t5train.data.pairs.pairs import build_pairs
from t5train.data.vocabulary.held_out import read_held_out
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.data.vocabulary.unknown_pieces import unigram_name
from t5train.errors import DigestMismatch, InputError
from t5train.records.stage_records import MANIFEST, Pairs, PairShards
from t5train.spec import PairsSpec
from t5train.train.validation import train_unigram
from tests.support.generated_text import WORDS, DataChain
from tests.support.made_pairs import made_pairs

pytestmark = pytest.mark.usefixtures("quick_workers")
ROW = {"input_tokens": 40, "target_tokens": 24}
Build = Callable[..., PairShards]


def some_pairs(count: int, seed: int, most_words: int = 4) -> list[tuple[str, str]]:
    generator = random.Random(seed)
    return [
        tuple(" ".join(generator.choices(WORDS, k=generator.randint(1, most_words))) for _ in range(2))
        for _ in range(count)
    ]


TASKS = {
    "one": {"train": some_pairs(200, 1), "validation": some_pairs(20, 2), "test": some_pairs(10, 3)},
    "two": {"train": some_pairs(50, 4, 2), "validation": some_pairs(5, 5, 2)},
}


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    return made_pairs(tmp_path / "pairs" / "wmt-0123456789ab", TASKS)


@pytest.fixture
def build(data_chain: DataChain, tmp_path: Path) -> Build:
    def build(pairs: Pairs, spec: dict[str, Any] = ROW, **options: Any) -> PairShards:
        return build_pair_shards(PairsSpec(**spec), pairs, data_chain.tokenizer, tmp_path, workers=2, **options)

    return build


class Stored:
    """What the files of a task in one split hold."""

    def __init__(self, shards: PairShards, split: str, task: int) -> None:
        def read(kind: str, dtype: str) -> np.ndarray:
            return np.fromfile(shards.path / shard_file(split, task, kind), dtype)

        self.lengths, self.ids, self.rows = (
            read("lengths", "<u4").reshape(-1, 2),
            read("ids", "<i8"),
            read("rows", "<i8").reshape(-1, 3),
        )
        self.texts = np.split(read("tokens", "<u2"), np.cumsum(self.lengths.ravel()))[:-1]

    def pairs(self) -> dict[int, tuple[list[int], list[int]]]:
        """Ids of source and target, by the number of the pair."""
        sides = [text.tolist() for text in self.texts]
        return {int(number): (sides[2 * place], sides[2 * place + 1]) for place, number in enumerate(self.ids)}


def encoded(data_chain: DataChain, texts: list[tuple[str, str]]) -> dict[int, tuple[list[int], list[int]]]:
    tokenizer = Tokenizer.load(data_chain.tokenizer.path)
    return {
        number: tuple(each.tolist() for each in tokenizer.encode(list(pair), add_eos=True))
        for number, pair in enumerate(texts)
    }


def test_the_shards_hold_every_pair_once_in_rows_that_hold_no_more_than_fits(
    build: Build, pairs: Pairs, data_chain: DataChain
) -> None:
    shards = build(pairs)
    assert task_names(shards) == ["one", "two"]
    assert shards.path.parent.name == "pair-shards"
    assert shards.path.name.startswith("wmt-")
    for task, splits in enumerate(TASKS.values()):
        for split in ("train", "validation", "test"):
            stored, texts = Stored(shards, split, task), splits.get(split, [])
            assert stored.pairs() == encoded(data_chain, texts)
            rows = np.diff(stored.rows, axis=0)
            assert (rows[:, 0] >= 1).all()
            assert rows[:, 0].sum() == len(texts)
            in_rows = [stored.lengths[first:last].sum(axis=0) for first, last in itertools.pairwise(stored.rows[:, 0])]
            assert all((tokens <= (40, 24)).all() for tokens in in_rows)
            assert rows[:, 1:].tolist() == [[sum(tokens), tokens[1]] for tokens in in_rows]
            if split != "train":
                assert stored.ids.tolist() == list(range(len(texts)))
                assert len(rows) == len(texts)
            else:
                assert len(rows) < len(texts) / 1.5
            assert shards.counts[f"{split}_pairs_of_task_{task}"] == len(texts)
            assert shards.counts[f"{split}_rows_of_task_{task}"] == len(rows)
    assert shards.counts["train_pairs"] == 250


def test_the_manifest_has_the_counts_that_training_needs(build: Build, pairs: Pairs, data_chain: DataChain) -> None:
    shards = build(pairs)
    vocabulary = {"vocab_size": 400, "pad_id": 0, "eos_id": 1, "first_sentinel_id": 399, "num_sentinels": 100}
    assert (vocabulary | {"bytes_per_token": 2, "num_shards": 2} | ROW).items() <= shards.counts.items()
    assert shards.inputs == {
        "pairs": pairs.fingerprint,
        "tokenizer": data_chain.tokenizer.fingerprint,
        "vocabulary": data_chain.tokenizer.files["spiece.model"].sha256,
    }
    targets = np.concatenate([text for task in (0, 1) for text in Stored(shards, "train", task).texts[1::2]])
    assert shards.counts["train_tokens"] == len(targets)
    unigram = sum(np.fromfile(shards.path / unigram_name(task), "<i8") for task in (0, 1))
    assert (unigram == np.bincount(targets, minlength=400)).all()
    assert np.exp(train_unigram(shards)).sum() == pytest.approx(1)


@pytest.mark.parametrize("pack", [True, False])
def test_neither_the_number_of_workers_nor_where_stretches_end_matters(
    build: Build, pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: bool
) -> None:
    one = build(pairs, ROW | {"pack": pack}, out=tmp_path / "one")
    monkeypatch.setattr(pair_shards, "_STRETCH_BYTES", 1000)
    other = build(pairs, ROW | {"pack": pack}, out=tmp_path / "other")
    assert one.files == other.files
    assert (one.counts["train_rows"] == one.counts["train_pairs"]) is not pack


def test_progress_is_reported_to_the_end(build: Build, pairs: Pairs) -> None:
    reports: dict[str, tuple[int, int | None]] = {}
    build(pairs, progress=lambda what, done, total: reports.update({what: (done, total)}))
    size = sum(path.stat().st_size for path in pairs.path.glob("*.jsonl"))
    assert reports["bytes of pairs tokenised"] == (size, size)
    assert reports["pairs arranged"] == (285, 285)


def test_finished_shards_are_reused_and_a_killed_stage_leaves_nothing_that_counts(
    build: Build, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pair_shards, "_record_held_out", killed)
        with pytest.raises(KeyboardInterrupt):
            build(pairs)
    shards = build(pairs)
    assert not shards.reused
    assert build(pairs).reused
    assert {path.name for path in shards.path.iterdir() if path.name[0] != "."} == {MANIFEST, *shards.files}
    assert not list(shards.path.glob("*.tmp"))
    assert build(pairs, ROW | {"too_long": "drop"}).path != shards.path


def test_shards_of_a_version_that_did_not_list_cut_targets_are_made_again_for_the_same_runs(
    build: Build, tmp_path: Path
) -> None:
    made = build(pairs := made_pairs(tmp_path / "long", {"long": LONG | {"test": LONG["train"]}}))
    counts = {name: count for name, count in made.counts.items() if "cut_targets" not in name}
    files = {name: digest for name, digest in made.files.items() if not name.endswith(".cut")}
    made.model_copy(update={"counts": counts, "files": files}).commit()
    again = build(pairs)
    assert (again.counts, again.files, again.fingerprint) == (made.counts, made.files, made.fingerprint)


def test_a_full_disk_is_reported_as_such(pairs: Pairs, data_chain: DataChain) -> None:
    path = pairs.path / "train-000.jsonl"
    job = {"path": str(path), "start": 0, "size": path.stat().st_size, "first": 0, "row": [40, 24], "too_long": "cut"}
    job |= {"spiece": str(data_chain.tokenizer.path / "spiece.model"), "bytes_per_token": 2}
    with pytest.raises(OSError, match="No space left on device"):
        encode_pairs(job | {"parts": dict.fromkeys(("tokens", "lengths", "ids"), "/dev/full")}, lambda _: None)


def test_changed_pairs_are_refused(build: Build, pairs: Pairs) -> None:
    path = pairs.path / "train-001.jsonl"
    path.write_text(path.read_text().replace("a", "e", 1))
    with pytest.raises(DigestMismatch, match=r"train-001\.jsonl"):
        build(pairs)


LONG = {
    "train": [(WORDS[0] * 30, "short"), ("short", WORDS[1] * 30), *some_pairs(150, 6, 2)],
    "validation": some_pairs(3, 7, 1),
}


def test_a_cut_pair_keeps_the_eos_of_both_sides_and_more_than_one_percent_is_a_warning(
    build: Build, tmp_path: Path, data_chain: DataChain, caplog: pytest.LogCaptureFixture
) -> None:
    long = made_pairs(tmp_path / "long", {"long": LONG})
    shards = build(long)
    stored, whole = Stored(shards, "train", 0).pairs(), encoded(data_chain, LONG["train"])
    assert stored[0] == ([*whole[0][0][:39], 1], whole[0][1])
    assert stored[1] == (whole[1][0], [*whole[1][1][:23], 1])
    assert len(stored) == 152
    assert (shards.counts["train_cut_of_task_0"], shards.counts["train_dropped_of_task_0"]) == (2, 0)
    expected = "task long: 2 of 152 pairs to train on (1.3%) are longer than a row of 40 and 24 tokens and were cut"
    assert [expected in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]
    caplog.clear()
    build(long)  # reused
    assert expected in caplog.text


def test_held_out_pairs_whose_target_was_cut_are_known_wherever_stretches_end(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, long = some_pairs(5, 6, 1), [(WORDS[0] * 30, "short"), ("short", WORDS[1] * 30)]
    tasks = {"one": {"train": LONG["train"], "validation": fits, "test": [*fits, *long]}, "two": LONG}
    monkeypatch.setattr(pair_shards, "_STRETCH_BYTES", 100)
    shards = build(made_pairs(tmp_path / "long", tasks))
    test = PairSamples(shards, "test", PairsSpec(**ROW), 0)
    assert np.flatnonzero(test.have_cut_targets(np.arange(test.num_samples))).tolist() == [6]
    assert [name for name in shards.files if name.endswith(".cut")] == ["test-00000.cut"]
    assert (shards.counts["test_cut"], shards.counts["test_cut_targets_of_task_0"]) == (2, 1)


def test_dropped_pairs_are_counted_and_the_others_keep_their_numbers(build: Build, tmp_path: Path) -> None:
    shards = build(made_pairs(tmp_path / "long", {"long": LONG}), ROW | {"too_long": "drop"})
    assert sorted(Stored(shards, "train", 0).ids.tolist()) == list(range(2, 152))
    assert (shards.counts["train_cut_of_task_0"], shards.counts["train_dropped_of_task_0"]) == (0, 2)


def test_a_task_of_which_nothing_is_left_is_refused(build: Build, tmp_path: Path) -> None:
    tasks = {"fine": LONG, "long": {"train": LONG["train"][:2], "validation": LONG["validation"]}}
    with pytest.raises(InputError, match=r"task long has no pair to train on: 2 pairs .* pairs.too_long=cut"):
        build(made_pairs(tmp_path / "long", tasks), ROW | {"too_long": "drop"})


def test_pairs_to_validate_with_are_judged_as_those_to_train_on_are(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = made_pairs(tmp_path / "long", {"long": {"train": LONG["train"][2:], "validation": LONG["train"][:2]}})
    with pytest.raises(InputError, match="task long has no pair to validate with: 2 pairs had a side"):
        build(long, ROW | {"too_long": "drop"})
    build(long)
    assert "task long: 2 of 2 pairs to validate with (100.0%) are longer than a row" in caplog.text


def test_a_prefix_that_leaves_no_token_for_a_source_is_refused(
    build: Build, data_chain: DataChain, tmp_path: Path
) -> None:
    prefix = f"{' '.join(WORDS[:12])}: "
    length = len(Tokenizer.load(data_chain.tokenizer.path).encode([prefix])[0])
    (tmp_path / "a.tsv").write_text(
        "source\ttarget\n" + "".join(f"{one}\t{two}\n" for one, two in some_pairs(99, 1, 2))
    )
    given = {"train": (f"{tmp_path}/a.tsv#prefix={prefix}",), "split": (600, 300, 100)}
    pairs = build_pairs(PairsSpec(**given), tmp_path)
    assert build(pairs, {"input_tokens": length + 2}).counts["train_cut"] > 0
    with pytest.raises(
        InputError, match=rf"prefix of task a has {length} tokens, .* {length + 1} .*so nothing of a sour"
    ):
        build(pairs, {"input_tokens": length + 1})


def test_a_refused_pair_is_named_with_its_lengths(
    build: Build, tmp_path: Path, data_chain: DataChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_shards, "_STRETCH_BYTES", 500)
    texts = [*LONG["train"][2:], LONG["train"][1]]
    length = len(encoded(data_chain, [texts[-1]])[0][1])
    with pytest.raises(
        InputError, match=rf"pair 151 of the train split of task long .* {length} tokens.*'short'. Raise"
    ):
        build(made_pairs(tmp_path / "long", {"long": {"train": texts}}), ROW | {"too_long": "refuse"})


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_too_many_unknown_pieces_on_either_side_are_refused(
    build: Build, tmp_path: Path, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    known, unknown = WORDS[3], f"{WORDS[3]} \u4e00"
    foreign = [(unknown, known) if side == "sources" else (known, unknown) for _ in range(40)]
    pairs = made_pairs(tmp_path / side, {"foreign": {"train": foreign, "validation": some_pairs(3, 7, 1)}})
    with pytest.raises(InputError, match=rf"of the tokens of the {side} to train on are the unknown .*U\+4E00"):
        build(pairs, max_unknown_share=0.01)
    shards = build(pairs, max_unknown_share=0.5)
    assert f"of the tokens of the {side} to train on" in caplog.text
    assert shards.counts["unknown_pieces"] == (40 if side == "targets" else 0)
    assert shards.counts["train_texts_with_unknown"] == (40 if side == "targets" else 0)
    with pytest.raises(InputError, match="max_unknown_share"):
        build(pairs, max_unknown_share=0.01)  # of finished shards


def test_sources_and_targets_to_validate_on_are_held_out(build: Build, pairs: Pairs) -> None:
    texts = {each.text for each in read_held_out(build(pairs).path)}
    for side in (0, 1):
        assert texts & {pair[side] for pair in TASKS["one"]["validation"]}
    assert texts <= {text for task in TASKS.values() for pair in task["validation"] for text in pair}
    assert json.loads((pairs.path / "tasks.json").read_text())[0]["task"] == "one"
