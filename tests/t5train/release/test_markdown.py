"""Texts that come from files, errors and users appear in a report as they are."""

from html import escape

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from t5train.release.markdown import code, code_block, escaped, page, table

RENDERER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SPECIAL = st.text(
    st.sampled_from(r"\`*_<>[]()~&#|!+-=.:;'\"/ 1aé") | st.characters(codec="utf-8", exclude_characters="\0")
)


def rendered(markdown: str) -> str:
    return str(RENDERER.render(markdown))


def html(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace('"', "&quot;")


@given(SPECIAL)
@example("corpus.source '/data/*/wiki*.jsonl' matches no file")
@example("<extra_id_0> is no piece, and &lt; is none of <class 'int'>")
@example("1. - # > ***\\")
def test_escaped_text_is_shown_as_exactly_the_text(text: str) -> None:
    shown = html(text)
    assert rendered(escaped(text)) == (f"<p>{shown}</p>\n" if shown else "")
    assert rendered(f"**Why:** {escaped(text)}.") == f"<p><strong>Why:</strong> {shown}.</p>\n"
    assert rendered(f"- {escaped(text)}") == f"<ul>\n<li>{shown}</li>\n</ul>\n"
    assert f"<td>{shown}</td>\n<td><code>" in rendered(table(("", ""), [(escaped(text), code("x"))]))


@given(SPECIAL.map(str.strip).filter(bool))
def test_inline_code_is_shown_as_exactly_the_text(text: str) -> None:
    shown = escape(" ".join(text.splitlines()), quote=False).replace('"', "&quot;")
    assert rendered(f"in {code(text)}.") == f"<p>in <code>{shown}</code>.</p>\n"


def test_a_text_without_special_characters_is_not_changed() -> None:
    for text in ("tokenizer.vocab_size is 30000 (at least 400): +15%, -3, v1.1", "/data/my_text-1.txt!", "2.5 GiB"):
        assert escaped(text) == text


@pytest.mark.parametrize("url", ["https://host/~me/a_b/x*.txt?a=1&b=2", "http://host/_x_"])
def test_a_url_is_shown_without_backslashes_also_where_urls_become_links(url: str) -> None:
    assert rendered(escaped(f"see {url} now")) == f"<p>see <code>{html(url)}</code> now</p>\n"
    assert escaped("see https://host/x.txt") == "see https://host/x.txt"


def test_bytes_that_are_not_utf8_are_visible_and_can_be_written() -> None:
    assert page(escaped("caf\udce9.pdf")).encode() == b"caf\\udce9.pdf\n"


def test_control_characters_of_texts_are_not_passed_on_to_terminals() -> None:
    assert page(escaped("a\x1b[31mb\tc"), code_block("d\0\x9be\n\tf")) == (
        "a\ufffd\\[31mb c\n\n```\nd\ufffd\ufffde\n\tf\n```\n"
    )
