"""Copies, near-duplicates and passages that share held-out text are found, and no others."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5train.data import corpus as corpus_stage
from t5train.data.checks import repetitions, whole_reading
from t5train.data.checks.passage_keys import KnownRuns
from t5train.data.checks.whole_reading import ReadText, TextFindings, read_whole
from t5train.data.corpus import build_corpus
from t5train.data.passages import SourceFile, split_of
from t5train.data.segments import passages_in, read_segments
from t5train.errors import InputError, StorageError
from t5train.progress import Progress
from t5train.records.stage_records import REPEATED, Corpus
from t5train.spec import CorpusSpec
from tests.support.generated_text import WORDS

pytestmark = pytest.mark.usefixtures("quick_workers")

SPLIT = (700, 200, 100)


def made_texts(number: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(30, 90))) for _ in range(number)]


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


def kept(corpus: Corpus) -> dict[str, str]:
    files = read_segments(corpus.path)
    return {each.id: each.text for each in passages_in((file.source, s) for file in files for s in file.segments)}


def repetitions_in(corpus: Corpus) -> dict[str, Any]:
    findings = TextFindings.of(corpus)
    assert findings is not None
    assert findings.repetitions is not None
    return dict(findings.repetitions)


def is_train(number: int | str) -> bool:
    return split_of(CorpusSpec(split=SPLIT), str(number)) == "train"


def near(text: str, seed: int) -> str:
    """Return the text with its last word replaced, other punctuation and other case."""
    return ", ".join(text.title().split()[:-1]) + f". word{seed}!"


def spec_of(path: Path, *remove: str, test_sets: tuple[str, ...] = ()) -> CorpusSpec:
    return CorpusSpec.model_validate(
        {"source": str(path), "split": SPLIT, "remove": remove, "test_sets": test_sets, "workers": 2}
    )


def test_copies_are_removed_from_training_wherever_the_first_one_is(tmp_path: Path) -> None:
    texts = made_texts(300)
    texts += [f" {text}\n" for text in texts[:100]]
    path = write(tmp_path / "text.jsonl", texts)
    corpus = build_corpus(spec_of(path, "duplicates"), tmp_path / "root")
    numbers = {text.strip(): [] for text in texts}  # type: dict[str, list[int]]
    for number, text in enumerate(texts):
        numbers[text.strip()].append(number)
    expected = {
        number
        for alike in numbers.values()
        for number in alike
        if not is_train(number) or (all(map(is_train, alike)) and number == alike[0])
    }
    found = kept(corpus)
    assert {*map(int, found)} == expected
    assert all(found[str(number)] == texts[number] for number in expected), "texts are as they were"
    assert corpus.counts["removed_passages"] == len(texts) - len(expected)
    assert corpus.counts["passages"] == len(expected)
    held_out = [alike for alike in numbers.values() if len(alike) == 2 and not any(map(is_train, alike))]
    assert corpus.counts[REPEATED] == len(held_out)


def test_near_duplicates_are_removed_and_texts_that_only_look_alike_stay(tmp_path: Path) -> None:
    texts = made_texts(300)
    shuffled = [" ".join(random.Random(1).sample(text.split(), len(text.split()))) for text in texts[:50]]
    halves = [" ".join([*text.split()[: len(text.split()) // 3], *made_texts(1, seed)[0].split()])
              for seed, text in enumerate(texts[50:100], start=100)]  # fmt: skip
    alike = [near(text, number) for number, text in enumerate(texts[100:200])]
    path = write(tmp_path / "text.jsonl", [*texts, *shuffled, *halves, *alike])
    corpus = build_corpus(spec_of(path, "near_duplicates"), tmp_path / "root")
    removed = {*range(len(texts) + 200)} - {*map(int, kept(corpus))}
    pairs = [(100 + number, 400 + number) for number in range(100)]
    expected = {other if is_train(other) else one for one, other in pairs if is_train(one) or is_train(other)}
    expected |= {one for one, other in pairs if is_train(one) and not is_train(other)}
    assert removed == {each for each in expected if is_train(each)}


def test_training_text_that_shares_13_words_with_held_out_text_is_removed(tmp_path: Path) -> None:
    texts = made_texts(400)
    quoted = next(number for number in range(400) if not is_train(number))
    quoting = [number for number in range(400) if is_train(number)]
    words = texts[quoted].split()
    texts[quoting[0]] += " " + " ".join(words[4:17])
    texts[quoting[1]] += " ".join([" extra", *words[:12], "extra"])
    test_set = made_texts(20, seed=7)
    texts[quoting[2]] = " ".join(test_set[3].upper().split()[:13]) + " " + texts[quoting[2]]
    path = write(tmp_path / "text.jsonl", texts)
    tests = write(tmp_path / "tests/set.jsonl", test_set)
    corpus = build_corpus(spec_of(path, "contaminated", test_sets=(str(tests),)), tmp_path / "root")
    removed = {*range(len(texts))} - {*map(int, kept(corpus))}
    assert removed == {quoting[0], quoting[2]}, "12 words are not enough"
    found = repetitions_in(corpus)
    split = split_of(CorpusSpec(split=SPLIT), str(quoted))
    assert found[f"{split}_contaminated"] == 1
    assert found["test_sets_contaminated"] == 1
    assert found["train_contaminated"] == 2
    assert found["searched_one_run_in"] == 1
    assert corpus.counts[REPEATED] == 0


def test_what_is_kept_depends_neither_on_workers_nor_on_parts_nor_on_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = made_texts(2000)
    texts += [near(text, number) for number, text in enumerate(texts[:300])]
    path = write(tmp_path / "text.jsonl", texts)
    every = spec_of(path, "duplicates", "near_duplicates", "contaminated")
    whole = build_corpus(every, tmp_path / "whole")
    monkeypatch.setattr(repetitions, "CHUNK_BYTES", 100_000)
    divided = build_corpus(every.model_copy(update={"workers": 1}), tmp_path / "divided")
    assert kept(divided) == kept(whole)
    assert len(list(divided.path.glob("kept-*"))) > 3
    assert divided.fingerprint == whole.fingerprint
    assert TextFindings.of(divided) == TextFindings.of(whole)
    assert not list(divided.path.glob(".compared"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(repetitions._Found, "mark_shared", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(every, tmp_path / "again")
    (unfinished,) = (tmp_path / "again/corpus").iterdir()
    before = {each.name: each.stat().st_mtime_ns for each in (unfinished / ".compared").glob("*.npz")}
    made: dict[str, int] = {}
    mark_shared = repetitions._Found.mark_shared

    def recorded(self: repetitions._Found, scratch: Path, workers: int, progress: Progress) -> None:
        made.update({each.name: each.stat().st_mtime_ns for each in scratch.glob("*.npz")})
        mark_shared(self, scratch, workers, progress)

    monkeypatch.setattr(repetitions._Found, "mark_shared", recorded)
    again = build_corpus(every, tmp_path / "again")
    assert made == before
    assert before
    assert kept(again) == kept(whole)
    assert TextFindings.of(again) == TextFindings.of(whole)
    assert not list(again.path.glob(".compared"))


def test_nothing_removed_changes_no_fingerprint_and_removal_does(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", made_texts(200))
    plain = spec_of(path)
    assert plain.identity().keys() == CorpusSpec(source="a").identity().keys() - {"remove", "test_sets"}
    fingerprints = [
        build_corpus(spec, tmp_path / "root").fingerprint
        for spec in (plain, spec_of(path, "duplicates"), spec_of(path, "near_duplicates"))
    ]
    assert len(set(fingerprints)) == 3
    other_split = spec_of(path, "duplicates").model_copy(update={"split_seed": 1})
    assert build_corpus(other_split, tmp_path / "root").fingerprint not in fingerprints


def test_every_test_set_counts_whatever_their_files_are_called(tmp_path: Path) -> None:
    texts = made_texts(300)
    train = [number for number in range(300) if is_train(number)]
    path = write(tmp_path / "text.jsonl", texts)
    sets = [write(tmp_path / name / "test.jsonl", [texts[train[place]]]) for place, name in enumerate("abc")]
    spec = spec_of(path, "duplicates", test_sets=tuple(map(str, sets)))
    corpus = build_corpus(spec, tmp_path / "root")
    assert {*range(300)} - {*map(int, kept(corpus))} == set(train[:3])
    write(sets[2], [texts[train[9]]])
    other = build_corpus(spec, tmp_path / "root")
    assert other.fingerprint != corpus.fingerprint
    assert {*range(300)} - {*map(int, kept(other))} == {*train[:2], train[9]}


def test_test_sets_that_are_missing_empty_or_malformed_are_refused_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, empty = write(tmp_path / "text.jsonl", made_texts(20)), write(tmp_path / "empty.jsonl", [""])
    malformed = tmp_path / "malformed.jsonl"
    malformed.write_text('{"question": "a"}')
    read = list[Path]()

    def recorded(sources: list[SourceFile], *rest: Any) -> ReadText:
        read.extend(source.path for source in sources)
        return read_whole(sources, *rest)

    for module in (corpus_stage, whole_reading):
        monkeypatch.setattr(module, "read_whole", recorded)
    for test_set, message in (
        (empty, r"^corpus\.test_sets .*empty.* holds no text"),
        (malformed, "not an object with"),
        (tmp_path / "absent", r"^corpus\.test_sets .*absent.* does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            build_corpus(spec_of(path, "contaminated", test_sets=(str(test_set),)), tmp_path / "root")
    assert read == [empty, malformed]


def test_short_held_out_passages_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", made_texts(100))
    short = write(tmp_path / "short.jsonl", ["one two", " ".join(["word"] * 12), " ".join(["word"] * 13)])
    corpus = build_corpus(spec_of(path, "contaminated", test_sets=(str(short),)), tmp_path / "root")
    found = repetitions_in(corpus)
    assert found["test_sets_short"] == 2
    assert found["validation_short"] == 0


def test_a_text_that_changes_while_it_is_compared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "text.jsonl", made_texts(50))
    find = corpus_stage.find_repetitions

    def changed(*given: Any) -> repetitions.Repetitions:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        return find(*given)

    whole = path.read_text()
    with monkeypatch.context() as broken:
        broken.setattr(corpus_stage, "find_repetitions", changed)
        with pytest.raises(InputError, match="the text has 49 passages now, but had 50 when it was read"):
            build_corpus(spec_of(path, "duplicates"), tmp_path / "root")
    path.write_text(whole)
    assert build_corpus(spec_of(path, "duplicates"), tmp_path / "root").counts["passages"] == 50


def test_a_check_reads_the_text_again_if_an_earlier_version_made_the_corpus(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", made_texts(100))
    corpus = build_corpus(spec_of(path), tmp_path / "root")
    (corpus.path / "text-findings.json").unlink()
    files = {name: digest for name, digest in corpus.files.items() if name != "text-findings.json"}
    corpus.model_copy(update={"files": files}).commit()
    folder, findings = corpus_stage.check_text(spec_of(path), tmp_path / "root")
    assert findings.passages == 100
    assert findings.repetitions is not None
    assert findings.repetitions["train_passages"] > 50
    assert {each.name for each in folder.iterdir()} == {".claim", "text-findings.json"}


def test_too_little_disk_space_is_noticed_before_the_text_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(repetitions._KEYS_BYTES_A_PASSAGE, "duplicates", 1 << 50)
    path = write(tmp_path / "text.jsonl", made_texts(20))
    with pytest.raises(StorageError, match="too little disk space for the keys that passages are compared by"):
        build_corpus(spec_of(path, "duplicates"), tmp_path / "root")


@given(st.sets(st.integers(0, (1 << 64) - 1), min_size=1, max_size=50), st.integers(0, 3))
@settings(max_examples=30)
def test_a_set_of_runs_includes_exactly_its_own(
    tmp_path_factory: pytest.TempPathFactory, own: set[int], near_by: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    hashes = np.array(sorted(own), np.uint64)
    KnownRuns.write(hashes, folder / "runs.npy", folder / "bits.npy")
    known = KnownRuns(folder / "runs.npy", folder / "bits.npy")
    asked = np.unique(np.concatenate([hashes, hashes ^ np.uint64(1 << near_by), np.arange(10, dtype=np.uint64)]))
    assert known.includes(asked).tolist() == [int(each) in own for each in asked]
    assert known.maybe_includes(hashes).all()


def test_only_some_runs_are_searched_for_if_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made_texts(400)
    held_out = [number for number in range(400) if not is_train(number)]
    for number, quoted in zip([number for number in range(400) if is_train(number)], held_out, strict=False):
        texts[number] = texts[quoted] + " end"
    path = write(tmp_path / "text.jsonl", texts)
    monkeypatch.setattr(repetitions, "MOST_RUNS", 1500)
    corpus = build_corpus(spec_of(path, "contaminated"), tmp_path / "root")
    found = repetitions_in(corpus)
    assert found["searched_one_run_in"] > 1
    assert 0.5 * len(held_out) < found["train_contaminated"] <= len(held_out)


def test_passages_with_few_words_are_compared_with_copies_only(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", ["...", "...", "one two", "One two", *made_texts(50)])
    corpus = build_corpus(spec_of(path, "near_duplicates", "contaminated"), tmp_path / "root")
    assert corpus.counts["removed_passages"] == sum(map(is_train, (0, 1))) - (is_train(0) and is_train(1))
