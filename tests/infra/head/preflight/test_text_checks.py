"""Text that is missing, malformed or too small for a run is refused before anything starts."""

import json
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from infra.head.preflight.run_checks import needed_bytes, require_possible
from infra.head.preflight.text_checks import bytes_per_token, look_at, require_text
from t5train.data.passages import SourceFile
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.sentencepiece_model import num_pieces, train
from t5train.errors import InputError, SpecError
from t5train.spec import CorpusSpec, ObjectiveSpec, RunSpec, TokenizerSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import write_jsonl

SENTENCE = "the model reads this text, which is one passage of several words"


def run_of(source: Path | str, **settings: object) -> RunSpec:
    given = {"tokenizer.path": "given"}  # the sentences of these texts are too alike to train a vocabulary on
    return recipe("smoke", {"corpus.source": json.dumps(str(source)), **given, **settings})


def lines(path: Path, count: int) -> Path:
    path.write_text("".join(f"{SENTENCE} {number}\n" for number in range(count)))
    return path


def test_a_text_that_is_enough_is_described_and_python_documentation_needs_no_look(tmp_path: Path) -> None:
    assert require_text(recipe("smoke")).size_bytes == 0
    text = lines(tmp_path / "a.txt", 1000)
    found = require_text(run_of(text))
    assert found.look is not None
    assert (found.look.is_whole, found.look.total_passages) == (True, 1000)
    assert found.look.total_bytes == text.stat().st_size - 1000  # without line ends
    assert found.size_bytes == text.stat().st_size
    assert 0.9 < (found.train_bytes(CorpusSpec()) or 0) / found.look.total_bytes < 1


def test_a_look_ends_at_its_limit_unless_there_may_be_too_few_passages(tmp_path: Path) -> None:
    text = lines(tmp_path / "a.txt", 1000)
    look = look_at([SourceFile(text, "a.txt")], CorpusSpec(), limit_bytes=10_000)
    assert not look.is_whole
    assert 10_000 <= look.total_bytes < 10_100
    # Lines beyond the limit are not read: whether they are valid is found by the corpus stage.
    with open(text, "ab") as file:
        file.write(b"\xff\n")
    assert look_at([SourceFile(text, "a.txt")], CorpusSpec(), limit_bytes=10_000) == look
    (tmp_path / "a.txt").write_text("x" * 9_000 + "\n" + "y" * 9_000 + "\n")
    look = look_at([SourceFile(tmp_path / "a.txt", "a.txt")], CorpusSpec(), limit_bytes=10_000)
    assert (look.is_whole, look.total_passages) == (True, 2)


@pytest.mark.parametrize("size", [2_000, 1_900_000])
def test_one_passage_is_too_few_for_the_splits(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("x" * size + "\n")
    shown = "1.9 MB" if size > 1_000_000 else "2,000 bytes"
    with pytest.raises(InputError) as caught:
        require_text(run_of(tmp_path / "a.txt"))
    assert f"is 1 passage of {shown}, none of which falls into the validation split" in str(caught.value)
    assert "each line is one" in str(caught.value)


def test_a_text_with_fewer_windows_than_a_batch_is_refused(tmp_path: Path) -> None:
    text = lines(tmp_path / "a.txt", 100)  # about 4,000 bytes of it to train on, so at most as many tokens
    settings = {"corpus.split": [600, 300, 100]}
    window = geometry(ObjectiveSpec(input_tokens=64)).window_tokens
    expected = rf"is 100 passages of .* takes 64 sequences .* of {window} tokens each"
    with pytest.raises(InputError, match=expected) as caught:
        require_text(run_of(text, **settings))
    assert "lower optimizer.global_batch_sequences" in str(caught.value)
    smaller = {"optimizer.global_batch_sequences": 32, "layout.micro_batch_sequences": 16}
    assert require_text(run_of(text, **settings, **smaller)).look is not None


@pytest.mark.parametrize(("pieces", "fits"), [(300, True), (8000, False)])
def test_a_vocabulary_that_a_small_text_is_too_small_for_is_refused(tmp_path: Path, pieces: int, fits: bool) -> None:
    settings = {"tokenizer.path": None, "tokenizer.vocab_size": pieces}
    run = run_of(write_jsonl(tmp_path / "text.jsonl", 300), **settings)
    refused = pytest.raises(SpecError, match=r"vocab_size is 8000: this corpus gives at most \d+ pieces\. Lower ")
    with nullcontext() if fits else refused:
        assert require_text(run).look is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": 1}\n', 'line 1 is not an object with "text"'),
        (b'{"text": "good"}\n\xff\n', "line 2 is not UTF-8"),
        (b'{"text": " "}\n', "holds no text"),
    ],
)
def test_malformed_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        require_text(run_of(tmp_path / "a.jsonl"))


def test_other_malformed_files_are_named_after_the_first(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_bytes(b"good\n" if number in {0, 3} else b"good\n\xe9\n")
    others = r"Also malformed: 02\.txt, 04\.txt, .* and 4 more"
    with pytest.raises(InputError, match=rf"01\.txt line 2 is not UTF-8.*\. {others}"):
        require_text(run_of(tmp_path))


def test_the_size_of_the_train_split_is_unknown_for_a_compressed_text_beyond_the_limit(tmp_path: Path) -> None:
    found = require_text(run_of(lines(tmp_path / "a.txt", 1000)))
    assert found.look is not None
    partial = found._replace(look=found.look._replace(is_whole=False))
    assert partial.train_bytes(CorpusSpec()) == found.size_bytes * 950 // 1000
    packed = found.sources[0]._replace(sizes={"a.txt.gz": 1000}, local=[SourceFile(tmp_path / "a.txt.gz", "a.txt.gz")])
    assert partial._replace(sources=(packed,)).train_bytes(CorpusSpec()) is None
    why = partial._replace(sources=(packed,)).why_unknown()
    assert why == "the size of compressed text shows only when it has been read"


def test_the_size_of_parquet_beyond_the_limit_is_that_of_its_text_column(tmp_path: Path) -> None:
    texts = [f"{SENTENCE} {number}" for number in range(1000)]
    table = pyarrow.table({"text": texts, "other": ["unused " * 100] * 1000})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=300)
    found = require_text(run_of(tmp_path / "a.parquet"))
    assert found.look is not None
    partial = found._replace(look=found.look._replace(is_whole=False))
    size = sum(map(len, texts)) * 950 // 1000
    assert size < (partial.train_bytes(CorpusSpec()) or 0) < 1.1 * size


def test_the_size_of_plain_text_in_a_store_is_known_before_it_is_downloaded() -> None:
    fsspec.filesystem("memory").pipe({"/a/a.txt": b"one\n" * 1000, "/b/a.parquet": b"PAR1", "/c/a.txt.gz": b"\x1f"})
    assert require_text(run_of("memory://a/*.txt")).train_bytes(CorpusSpec()) == 4000 * 950 // 1000
    for packed, why in (("b/a.parquet", "after it has been downloaded"), ("c/a.txt.gz", "when it has been read")):
        found = require_text(run_of(f"memory://{packed}"))
        assert found.train_bytes(CorpusSpec()) is None
        assert found.why_unknown().endswith(why)


def test_the_size_of_a_token_is_estimated_within_a_fifth_unless_there_is_only_one_passage(tmp_path: Path) -> None:
    words = "".join(topics.values()).split()
    plain = [" ".join(words[first : first + 50]) for first in range(0, 30_000, 50)]
    some = [str(each * 7919 % 99_991) for each in range(20_000)]
    numbers = [" ".join(some[first : first + 40]) for first in range(0, 20_000, 40)]
    for texts, vocab_size in ((plain, 900), (plain, 300), (numbers, 500)):
        (tmp_path / "a.txt").write_text("\n".join(texts))
        spec = TokenizerSpec(vocab_size=vocab_size)
        pieces = num_pieces(train(spec, iter(texts)), texts) + len(texts)
        found = bytes_per_token(spec, [SourceFile(tmp_path / "a.txt", "a.txt")])
        assert found == pytest.approx(sum(map(len, texts)) / pieces, rel=0.2)
    (tmp_path / "a.txt").write_text("one passage\n")
    assert bytes_per_token(TokenizerSpec(), [SourceFile(tmp_path / "a.txt", "a.txt")]) is None


def test_the_disk_space_of_a_small_run_is_what_it_takes() -> None:
    spec = recipe("smoke", {"optimizer.num_steps": 42, "corpus.source": "/nowhere", "name": "nowhere"})
    assert needed_bytes(spec, require_possible(spec), 2_000_000) == pytest.approx(74e6, rel=0.1), "measured: 74 MB"
