"""Sentences that were broken over lines are noticed, and other text with short or lower-case lines is not."""

import gzip
import logging
import random
import textwrap
from pathlib import Path

import pytest

from t5train.data.checks.hard_wraps import wrapping_warning
from t5train.data.corpus import build_corpus
from t5train.data.passages import SourceFile
from t5train.spec import CorpusSpec

ENGLISH = (
    "Two ships left the harbour in the early morning, and nobody who stood on the pier knew where they were bound. "
    "The older one carried timber, some letters and a clock, while the other was said to be empty. When they came back "
    "in autumn, the captain told us that both had been to the same town, although they had never met there."
)
GERMAN = (
    "Die Entwicklung der Sprache beruht auf vielen Umständen, die sich im Laufe der Jahrhunderte verändert haben, und "
    "die Forschung hat erst in den letzten Jahrzehnten begonnen, die Zusammenhänge zwischen Handel und Schrift genauer "
    "zu untersuchen. Dabei zeigte sich, dass die Städte im Norden eine größere Rolle spielten als bisher angenommen."
)
RUSSIAN = (
    "Развитие языка зависит от многих обстоятельств, которые менялись на протяжении веков, и исследователи лишь в "
    "последние десятилетия начали подробно изучать связи между обществом, торговлей и письмом. Оказалось, что северные "
    "города играли большую роль, чем предполагалось ранее, потому что там встречались купцы из разных стран."
)


def sentences(text: str) -> list[str]:
    """Sixty sentences of different words, with full stops."""
    words, generator = text.split(), random.Random(0)
    return [" ".join(generator.choices(words, k=generator.randint(3, 20))) + "." for _ in range(60)]


def warning_of(tmp_path: Path, lines: list[str], name: str = "a.txt") -> str | None:
    content = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return wrapping_warning([SourceFile(tmp_path / name, name)])


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, RUSSIAN], ids=["English", "German", "Russian"])
@pytest.mark.parametrize("width", [60, 72, 80])
def test_paragraphs_that_are_broken_to_a_width_are_noticed(tmp_path: Path, text: str, width: int) -> None:
    lines = [line for start in range(10) for line in [*textwrap.wrap(text[7 * start :], width), ""]]
    warning = warning_of(tmp_path, lines, "a.txt.gz")
    assert warning is not None
    assert "look like sentences that were broken to a fixed width" in warning
    assert warning_of(tmp_path, lines, "a.tsv") is None


def test_paragraphs_lists_and_text_without_case_or_stops_are_not_taken_for_broken_sentences(tmp_path: Path) -> None:
    whole = sentences(ENGLISH)
    for lines in (
        whole,
        [each.lower().rstrip(".") for each in whole],
        sorted(" ".join(whole).lower().split()),
        [f"{number}. {each}" for number, each in enumerate(whole)],
        [" ".join(whole[number : number + 9]) for number in range(50)],
        textwrap.wrap("".join(chr(0x4E00 + number) for number in range(2000)), 60),
        textwrap.wrap(ENGLISH, 60),
    ):
        assert warning_of(tmp_path, lines) is None


def test_building_a_corpus_of_broken_sentences_warns_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join([textwrap.fill(ENGLISH, 72)] * 10))
    build_corpus(CorpusSpec(source=str(tmp_path), workers=1), tmp_path / "root")
    (warning,) = [each.getMessage() for each in caplog.records if "fixed width" in each.getMessage()]
    assert caplog.records[0].levelno == logging.WARNING
    assert f"of the first lines of {tmp_path}/a.txt and other .txt files look like sentences" in warning
    assert "Join the lines of paragraphs, for example with awk" in warning
