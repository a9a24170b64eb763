"""A corpus of several texts: corpus.mixed_with."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from infra.head.preflight.text_checks import require_text
from t5train.data import corpus, sources
from t5train.data.checks.whole_reading import TextFindings
from t5train.data.corpus import build_corpus
from t5train.data.passages import split_of
from t5train.data.segments import by_part, read_segments
from t5train.errors import InputError, SpecError
from t5train.spec import CorpusSpec, RunSpec, known_texts
from t5train.spec.data_spec import HubText, TextSource
from t5train.spec.known_texts import KnownText, languages_of, licence_of
from t5train.spec.recipes import recipe
from tests.support.generated_text import write_copies, write_jsonl

pytestmark = pytest.mark.usefixtures("quick_workers")

HUB = "hf://someone/texts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, ``one.jsonl`` and ``two.jsonl``."""
    write_jsonl(tmp_path / "one.jsonl", 400, 1)
    write_jsonl(tmp_path / "two.jsonl", 100, 2)
    return tmp_path


def corpus_of(folder: Path, *names: str, **settings: Any) -> CorpusSpec:
    source, *more = (name if "://" in name or name == "pydocs" else f"{folder}/{name}" for name in names)
    return CorpusSpec(source=source, mixed_with=tuple(more), **settings)


def run_of(folder: Path, *names: str, **settings: Any) -> RunSpec:
    source, *more = (f"{folder}/{name}" for name in names)
    changed = {"corpus.source": source, "corpus.mixed_with": more, "tokenizer.vocab_size": 300}
    return recipe("smoke").with_settings(changed | settings)


def test_the_texts_are_one_corpus_whose_identity_is_their_content_and_order(folder: Path) -> None:
    built = build_corpus(corpus_of(folder, "one.jsonl", "two.jsonl"), folder / "root")
    assert built.counts["passages"] == 500
    assert [sum(file.passages for file in part) for part in by_part(read_segments(built.path))] == [400, 100]
    assert build_corpus(corpus_of(folder, "one.jsonl", "two.jsonl"), folder / "root").reused
    (folder / "moved").mkdir()
    (folder / "two.jsonl").rename(folder / "moved" / "two.jsonl")
    moved = corpus_of(folder, "one.jsonl", "moved/two.jsonl")
    assert build_corpus(moved, folder / "root").fingerprint == built.fingerprint
    for other in (corpus_of(folder, "moved/two.jsonl", "one.jsonl"), corpus_of(folder, "one.jsonl")):
        assert build_corpus(other, folder / "root").fingerprint != built.fingerprint


def test_pythons_documentation_can_be_any_of_the_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = sources.pydocs_files()[:30]  # reading all modules takes seconds
    for module in (sources, corpus):
        monkeypatch.setattr(module, "pydocs_files", lambda: some)
    alone = build_corpus(CorpusSpec(), folder / "root").counts["passages"]
    for names in (("pydocs", "one.jsonl"), ("one.jsonl", "pydocs", "two.jsonl")):
        built = build_corpus(corpus_of(folder, *names), folder / "root")
        counted = [sum(file.passages for file in part) for part in by_part(read_segments(built.path))]
        known = {"pydocs": alone, "one.jsonl": 400, "two.jsonl": 100}
        assert counted == [known[name] for name in names]
        built.verify()


def test_what_one_text_repeats_of_another_is_removed_and_the_texts_stay_apart(tmp_path: Path) -> None:
    lines = write_copies(tmp_path / "one.jsonl").read_text().splitlines()
    (tmp_path / "one.jsonl").write_text("\n".join(lines[:300]) + "\n")
    fresh = write_jsonl(tmp_path / "fresh.jsonl", 50, 7).read_text()
    (tmp_path / "two.jsonl").write_text(fresh + "\n".join(lines[300:]) + "\n")
    spec = corpus_of(tmp_path, "one.jsonl", "two.jsonl", remove=("duplicates",), split=(500, 500, 0))
    built = build_corpus(spec, tmp_path / "root")
    findings = TextFindings.of(built)
    assert findings is not None
    assert findings.repetitions is not None
    assert findings.repetitions["removed_passages"] > 0
    first, second = (sum(file.passages for file in part) for part in by_part(read_segments(built.path)))
    assert first + second == 450 - findings.repetitions["removed_passages"]
    assert second < 150, "copies are removed from the text that is named later"
    assert second >= 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "corpus.mixed_with '.*bad.txt' holds no text: all files are empty"),
        ("\n \n", "corpus.mixed_with '.*bad.txt' is 0 passages of 0 bytes, .* a sample needs 70 tokens"),
        (None, "corpus.mixed_with '.*bad.txt' does not exist"),
        ("\x00\n", "bad.txt.*NUL"),
    ],
)
def test_a_text_that_cannot_be_mixed_is_named_before_anything_starts(
    folder: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (folder / "bad.txt").write_text(content)
    with pytest.raises(InputError, match=f"(?s){message}"):
        require_text(run_of(folder, "one.jsonl", "two.jsonl", "bad.txt"))


def test_texts_that_are_mixed_in_with_commas_between_them_have_to_be_a_list(folder: Path) -> None:
    with pytest.raises(
        InputError, match=r"does not exist.* give them as a list: corpus\.mixed_with='\[\"A\", \"B\"\]'"
    ):
        require_text(run_of(folder, "one.jsonl", "two.jsonl,three.jsonl"))


def test_a_text_of_which_nothing_is_left_is_named(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "one.jsonl", 400).read_text().splitlines()
    copies = [json.dumps(json.loads(line) | {"id": f"again-{number}"}) for number, line in enumerate(lines[:9])]
    in_training = [line for line in copies if split_of(CorpusSpec(), json.loads(line)["id"]) == "train"]
    (tmp_path / "two.jsonl").write_text("\n".join(in_training) + "\n")
    spec = corpus_of(tmp_path, "one.jsonl", "two.jsonl", remove=("duplicates",))
    with pytest.raises(InputError, match=r"all passages of '.*two.jsonl' repeat other text, and corpus.remove is"):
        build_corpus(spec, tmp_path / "root")


@pytest.mark.parametrize("other", ["./one.jsonl", "one*", "../{name}"])
def test_texts_that_have_a_file_in_common_are_refused(folder: Path, other: str) -> None:
    spec = corpus_of(folder, "one.jsonl", other.format(name=folder.name))
    with pytest.raises(InputError, match=r"one.jsonl belongs to two texts of the mixture"):
        build_corpus(spec, folder / "root")
    with pytest.raises(InputError, match=r"one.jsonl belongs to two texts of the mixture"):
        require_text(run_of(folder, "one.jsonl", other.format(name=folder.name)))


def test_one_id_for_a_whole_text_is_noticed_beside_a_text_with_many(folder: Path) -> None:
    write_jsonl(folder / "many.jsonl", 1500, 3)
    (folder / "same.jsonl").write_text('{"id": "x", "text": "some words"}\n' * 500)
    with pytest.raises(InputError, match=r"same.jsonl, rows 0 to 499: 500 passages have the id 'x'"):
        build_corpus(corpus_of(folder, "many.jsonl", "same.jsonl"), folder / "root")


def test_what_is_known_of_a_mixture_before_it_is_read(folder: Path) -> None:
    mixed = require_text(run_of(folder, "one.jsonl", "two.jsonl"))
    alone = [require_text(run_of(folder, name)) for name in ("one.jsonl", "two.jsonl")]
    assert mixed.num_files == 2
    assert mixed.size_bytes == sum(each.size_bytes for each in alone)
    train = [each.train_bytes(CorpusSpec()) for each in (mixed, *alone)]
    assert train[0] == (train[1] or 0) + (train[2] or 0)
    with_pydocs = run_of(folder, "one.jsonl").with_settings({"corpus.mixed_with": "pydocs"})
    assert require_text(with_pydocs).train_bytes(CorpusSpec()) is None


def test_a_known_text_is_checked_and_its_licence_shown_also_as_part_of_a_mixture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {"title": "The title", "location": f"{folder}/two.jsonl", "license": "mit", "languages": ("en",)}
    spec = CorpusSpec(source=f"{folder}/one.jsonl", mixed_with=("the_text",))
    monkeypatch.setitem(known_texts._KNOWN, "the_text", KnownText.model_validate(facts | {"rows": 99}))
    with pytest.raises(InputError, match=r"corpus.mixed_with 'the_text' has 100 rows, but should have 99"):
        build_corpus(spec, folder / "root")
    monkeypatch.setitem(known_texts._KNOWN, "the_text", KnownText.model_validate(facts | {"rows": 100}))
    with caplog.at_level(logging.INFO):
        build_corpus(spec, folder / "root")
    assert "The title. Its licence: mit" in caplog.text


def test_licence_and_languages_of_a_mixture_are_those_of_all_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, licence, language in (("a", "mit", "en"), ("b", "cc-by-nc-4.0", "de")):
        known = KnownText(title=name, location=name, rows=1, license=licence, languages=(language,))
        monkeypatch.setitem(known_texts._KNOWN, name, known)
    assert licence_of(["a", "b"], None) == "mit and cc-by-nc-4.0"
    assert licence_of(["own.txt", "b"], None) == "cc-by-nc-4.0 and others"
    assert licence_of(["own.txt", "b"], "mit") == "mit"
    assert licence_of(["own.txt"], None) is None
    assert languages_of(["a", "b"], ()) == ("en", "de")
    assert languages_of(["a", "own.txt"], ()) == ()


def test_a_dataset_of_the_hub_can_be_chosen_from() -> None:
    chosen = f"{HUB}#config=c++&split=test&column=a%26b&revision=v2"
    named = (chosen, "more/*.txt", "wiki_dpr#revision=v3", f"{HUB}2")
    texts = CorpusSpec(source="a.txt", revision="july", mixed_with=named).texts()
    assert texts == [
        TextSource("a.txt", "july", HubText()),
        TextSource(HUB, "v2", HubText("c++", "test", "a&b")),
        TextSource("more/*.txt", "july", HubText()),
        TextSource("wiki_dpr", "v3", HubText()),
        TextSource(f"{HUB}2", "", HubText()),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus.mixed_with": [" "]}, "corpus.mixed_with has an empty name"),
        ({"corpus.mixed_with": ["a.txt", "a.txt"]}, "name 'a.txt' more than once"),
        ({"corpus.mixed_with": "pydocs"}, "name 'pydocs' more than once"),
        ({"corpus.mixed_with": f"{HUB}@v2"}, f"write the revision as {HUB}#revision=v2"),
        ({"corpus.mixed_with": f"{HUB}#lang=en"}, "after #, config, split, column, revision can be chosen, each once"),
        ({"corpus.mixed_with": f"{HUB}#config="}, "after #, config, split, column, revision can be chosen, each once"),
        ({"corpus.mixed_with": f"{HUB}#split=../x"}, "split, column, revision can be chosen"),
        ({"corpus.mixed_with": f"{HUB}#config=a&config=b"}, "each once"),
        ({"corpus.mixed_with": "wiki_dpr#config=a"}, "after #, revision can be chosen"),
        ({"corpus.source": f"{HUB}#config=en"}, f"Set corpus.source={HUB}, and corpus.config"),
        ({"corpus.mixed_with": f"{HUB}#"}, "after #, config, split, column, revision can be chosen, each once"),
        ({"corpus.mixed_with": "https://user:secret@host/a.txt"}, "corpus.mixed_with has a password"),
        ({"objective.mixing_temperature": 2}, "objective.mixing_temperature is set, but there is one text"),
        ({"corpus.mixed_with": "a.txt", "objective.mixing_weights": "1,2,3"}, "has 3 numbers, but there are 2 texts"),
        ({"corpus.mixed_with": "a.txt", "objective.mixing_weights": "1,0"}, "objective.mixing_weights"),
        (
            {"corpus.mixed_with": "a.txt", "objective.mixing_weights": "1,2", "objective.mixing_limit": 5},
            "are the rates themselves",
        ),
    ],
)
def test_settings_that_make_no_mixture_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        recipe("smoke").with_settings(settings)
    assert message in str(refused.value)
