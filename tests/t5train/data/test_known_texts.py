"""Texts that have a name: their downloads are compared with what is known of them."""

import hashlib
import logging
from pathlib import Path

import pytest

from t5train.data import corpus, sources
from t5train.data.corpus import build_corpus
from t5train.errors import InputError
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec, known_texts
from t5train.spec.known_texts import KnownFile, KnownText
from tests.support.served_text import BLOCK, LINES
from tests.support.web_server import GOOD, Answer, Web

pytestmark = pytest.mark.usefixtures("quick_workers")


def named(monkeypatch: pytest.MonkeyPatch, web: Web, **changes: object) -> None:
    """Let the name ``the_text`` stand for the server's text."""
    known = KnownFile(size=len(LINES), sha256=hashlib.sha256(LINES).hexdigest())
    facts = {"title": "A text", "files": {"text.txt": known}, "rows": 40_000, "license": "cc-by-nc-4.0"}
    facts |= {"location": f"{web.url}/text.txt", "languages": ("en",)}
    texts = {"the_text": KnownText.model_validate(facts | changes)}
    for module in (sources, corpus, known_texts):
        monkeypatch.setattr(module, "known_texts", lambda: texts)


def build_named(root: Path) -> Corpus:
    return build_corpus(CorpusSpec(source="the_text", workers=1), root)


def test_a_text_that_has_a_name_is_downloaded_compared_with_what_is_known_and_has_its_licence(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named(monkeypatch, web)
    web.answer = lambda request: Answer(flips_a_bit=request.start == BLOCK)
    with pytest.raises(InputError, match="was downloaded twice, and both times its sha256 was not"):
        build_named(tmp_path)
    web.answer = lambda _: GOOD
    with caplog.at_level(logging.INFO):
        assert build_named(tmp_path).counts["passages"] == 40_000
    assert "A text. Its licence: cc-by-nc-4.0" in caplog.text
    assert known_texts.licence_of(["the_text"], None) == "cc-by-nc-4.0"
    assert known_texts.licence_of(["the_text"], "mit") == "mit"
    assert known_texts.languages_of(["the_text"], ()) == ("en",)
    web.files["/text.txt"] = LINES[:-1]
    web.head = lambda: 500
    web.requests.clear()
    assert build_named(tmp_path).reused
    assert web.requests == [], "the known digest counts, not what the server says of changes"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rows": 39_999}, r"has 40,000 rows, but should have 39,999"),
        ({"files": {"text.txt": {"size": 1, "sha256": "0" * 64}}}, r"bytes, but should have 1"),
    ],
)
def test_a_named_text_with_other_rows_or_another_size_is_refused(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], error: str
) -> None:
    named(monkeypatch, web, **changes)
    with pytest.raises(InputError, match=error):
        build_named(tmp_path)


def test_the_names_of_texts_are_no_paths_and_each_has_digests_or_a_commit_and_a_licence() -> None:
    texts = known_texts.known_texts()
    assert texts
    for name, text in texts.items():
        assert known_texts.is_named_text(name)
        assert known_texts.location_of(name) == text.location != name
        assert text.files or text.location.startswith("hf://"), "the Hub states digests, and they are recorded"
        assert known_texts.licence_of([name], None) == text.license
