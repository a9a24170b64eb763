"""Articles of a dump become passages without markup, and what is no article is left out."""

import bz2
import sys
from pathlib import Path

import pytest

from infra.head.preflight.text_checks import look_at
from t5train.data.checks.whole_reading import TEXT_FINDINGS, TextFindings
from t5train.data.corpus import build_corpus
from t5train.data.formats.wikipedia_dump import TooComplexError, plain_text, require_parsable
from t5train.data.passages import Passage, SourceFile
from t5train.data.readers import format_of, rows
from t5train.data.segments import passages_in, read_segments
from t5train.data.sources import require_source
from t5train.errors import InputError
from t5train.spec import CorpusSpec

NAME = "xywiki-20260101-pages-articles1.xml-p1p99.bz2"
HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo><sitename>Wikipedia</sitename><namespaces>
    <namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">Datei</namespace>
    <namespace key="10" case="first-letter">Vorlage</namespace>
    <namespace key="14" case="first-letter">Kategorie</namespace>
  </namespaces></siteinfo>
"""
PAGE = """  <page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{redirect}
    <revision><id>1{id}</id><model>wikitext</model><text bytes="9" xml:space="preserve">{text}</text></revision></page>
"""
ARTICLE = """{{Infobox|name=[[A]]|image=a.jpg}}
'''Ärger''' is a [[Gefühl|feeling]] of [[people]]&amp;nbsp;(see [[:Kategorie:X]]).&lt;ref&gt;{{b}}, p. 5&lt;/ref&gt;
[[Datei:A.jpg|mini|A [[caption]] of it]][[Kategorie:Gefühl]]
__NOTOC__
== History ==
* First ''item'' at [http://example.org a site] and [http://example.org/bare]
{| class="wikitable"
| a cell || another
|}
Tea &amp;amp; cake,&lt;br /&gt;x&lt;sup&gt;2&lt;/sup&gt; &lt;math&gt;y&lt;/math&gt;&lt;!-- hidden --&gt; end."""
PLAIN = """Ärger is a feeling of people (see Kategorie:X).
History
First item at a site and
Tea & cake,
x2 end."""


def page(number: int, text: str, *, ns: int = 0, redirect: str = "") -> str:
    return PAGE.format(title=f"T{number}", ns=ns, id=number, redirect=redirect, text=text)


def write(folder: Path, *pages: str, end: str = "</mediawiki>", name: str = NAME) -> SourceFile:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(bz2.compress(f"{HEAD}{''.join(pages)}{end}".encode()))
    return SourceFile(folder / name, name)


def test_articles_lose_their_markup_and_other_pages_are_left_out(tmp_path: Path) -> None:
    dump = write(
        tmp_path,
        page(1, ARTICLE),
        page(2, "A template", ns=10),
        page(3, "#REDIRECT [[T1]]", redirect='<redirect title="T1" />'),
        page(4, "{{only a template}}"),
        page(5, "The last one."),
    )
    assert [row.passage for row in rows(dump)] == [
        Passage("1", "T1", PLAIN),
        Passage("4", "T4", ""),
        Passage("5", "T5", "The last one."),
    ]
    assert [row.passage.id for row in rows(dump, 2)] == ["5"]


def test_a_page_without_an_id_is_identified_by_its_place_and_pages_of_data_are_left_out(tmp_path: Path) -> None:
    """With the same id, all such pages would be in one split."""
    texts = [page(number, "text").replace(f"<id>{number}</id>", "<id/>") for number in (1, 2)]
    data = page(3, '{"a": 1}').replace("<model>wikitext", "<model>wikibase-item")
    assert [row.passage.id for row in rows(write(tmp_path, *texts, data))] == [f"{NAME}:0", f"{NAME}:1"]


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("a [[b {{c == e <ref>f", "a [[b {{c == e <ref>f"),
        ("", ""),
        ("[[Imagen:x.jpg|thumb|200px|Una ciudad]]Un [[Media:a.ogg|sonido]]", "Un"),
        ("<p>a</p><p>b</p>c<BR>d<div>e</div>", "a\nb\nc\nd\ne"),
        ("[[de:Foo]][[simple:Foo|shown]] __FILE__ __NOTOC__", "shown __FILE__"),
        ("[[Ratio 2:1]] and [[:fr:Bonjour|this]]", "Ratio 2:1 and this"),
    ],
)
def test_markup_that_is_no_text_is_left_out_and_unfinished_markup_is_text(wikitext: str, expected: str) -> None:
    assert plain_text(wikitext) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("xywiki-20260101-pages-articles.xml.bz2", NAME),
        ("xywiki-20260101-pages-articles-multistream.xml.bz2", "xywiki-20260101-pages-articles.xml.bz2"),
        ("xywiki-20260101-pages-meta-current.xml.bz2", "xywiki-20260101-pages-articles.xml.bz2"),
    ],
)
def test_two_forms_of_the_same_dump_are_refused(tmp_path: Path, one: str, other: str) -> None:
    for name in (one, other, other.replace("20260101", "20250101")):
        write(tmp_path / "dumps", page(1, "text"), name=name)
    with pytest.raises(InputError, match="hold the same articles"):
        require_source(str(tmp_path / "dumps"))
    assert len(require_source(f"{tmp_path}/dumps/{other}").sizes) == 1


def test_a_folder_of_dumps_becomes_a_corpus_that_is_read_at_random(tmp_path: Path) -> None:
    for part in range(3):
        articles = [page(1000 * part + number, f"Article {number} of part {part}. " * 200) for number in range(60)]
        write(tmp_path / "dumps", *articles, name=NAME.replace("p1p99", f"p{part}p9"))
    (tmp_path / "dumps/sitemap.xml").write_text("<urlset/>")
    corpus = build_corpus(CorpusSpec(source=str(tmp_path / "dumps"), workers=2), tmp_path / "root")
    files = read_segments(corpus.path)
    assert [file.source.path.parent for file in files] == [corpus.path] * 3
    assert all(len(file.segments) > 3 for file in files)
    last = [passage.id for passage in passages_in([(files[2].source, files[2].segments[-1])])]
    assert last[-1] == "2059"
    assert corpus.counts["passages"] == 180


def test_only_a_small_part_of_a_dump_is_read_before_a_run(tmp_path: Path) -> None:
    dump = write(tmp_path, *(page(number, f"Article {number}. " * 40) for number in range(2000)))
    assert not look_at([dump], CorpusSpec(), limit_bytes=1 << 20).is_whole
    assert look_at([dump], CorpusSpec()).passages["train"] < 1000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NAME, ".xml"),
        ("enwiki-latest-pages-articles.xml.bz2", ".xml"),
        ("dewiki-20260101-pages-meta-current.xml", ".xml"),
        ("simplewiki-20260101-pages-articles-multistream.xml.zst", ".xml"),
        ("enwiki-latest-pages-articles-multistream-index.txt.bz2", None),
        ("enwiki-20260101-pages-articles-multistream-index1.txt-p1p41242.bz2", None),
        ("enwiki-20260101-md5sums.txt", None),
        ("enwiki-latest-pages-articles.xml.bz2-rss.xml", None),
        ("index.txt", ".txt"),
        ("enwiki-latest-abstract.xml.gz", None),
        ("sitemap.xml", None),
    ],
)
def test_dumps_are_known_by_their_usual_names(name: str, expected: str | None) -> None:
    assert format_of(name) == expected


def test_a_file_that_is_no_whole_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not well-formed XML"):
        list(rows(write(tmp_path, page(1, "a"), end="")))
    path = tmp_path / NAME.removesuffix(".bz2")
    path.write_text("<urlset></urlset>")
    with pytest.raises(InputError, match="begins with <urlset>, but a dump of Wikipedia begins with <mediawiki>"):
        list(rows(SourceFile(path, path.name)))
    whole = write(tmp_path, *(page(number, "text " * 999) for number in range(50)))
    whole.path.write_bytes(whole.path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cannot be read to its end|is not well-formed"):
        list(rows(whole))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    with pytest.raises(InputError, match=r"needs the package mwparserfromhell\. Install it: pip install"):
        list(rows(write(tmp_path, page(1, "a"))))


HOSTILE = {
    "nested arguments": "{{{" * 500 + "x" + "}}}" * 500,
    "nested templates": "{{" * 1000 + "x" + "}}" * 1000,
    "nested in a title": "[[" + "{{{" * 200 + "x" + "}}}" * 200 + "|b]]",
    "unclosed tags": "<b>" * 20_000,
    "unclosed tables": "\n{|\n|" * 10_000,
    "unclosed templates": "{{a|" * 10_000,
    "unclosed links": "[http://a " * 10_000,
    "unclosed attributes": '<a b="' * 10_000,
    "endless tags": "<a " * 5_700,
    "endless quotes": '<ref name="' * 3_000,
    "endless tags of other scripts": "<ä " * 10_000,
    "less than a number": "<3 " * 10_000,
    "tags of a digit": "<1>" * 20_000,
    "templates in tags": "<a {{b|>" * 6_000,
    "templates as tags": "<{{a|>" * 6_000,
    "unclosed nobr": "<nobr>x " * 20_000,
    "tables after a tab": "\n\t{|" * 10_000,
    "unclosed comments": "<!--" * 10_000,
    "closed before": "|}</b>}}" * 5_000 + "{{a|<b>\n{|" * 5_000,
    "nested lists": ("*" * 50 + " a\n") * 12_000,
    "long": "a " * (1 << 20) + "b",
}


@pytest.mark.parametrize("wikitext", HOSTILE.values(), ids=HOSTILE)
def test_a_page_that_would_end_or_stall_the_parser_is_refused(wikitext: str) -> None:
    """Without the limits, some of these pages end in a RecursionError, and others take hours."""
    with pytest.raises(TooComplexError):
        plain_text(wikitext)


@pytest.mark.parametrize(
    "wikitext",
    [
        "{{a|b={{c|" * 20 + "x" + "}}}}" * 20,
        "text <ref name=a>{{cite|url=http://a|}}</ref> [[a|b]] '''c''' d's<br>\n* e\n" * 5000,
        "{|\n|-\n| a || {{b|}}\n|}\n" * 3000,
        "<p>a\n\n{{b\n" * 30 + "text " * 20_000,
        ("** a\n*# b\n" * 20_000),
        ("<p>" + "text " * 233 + "\n") * 300,
        ("<small>" + "text " * 22 + "\n") * 1000,
        ("<b>" + "text " * 40 + "\n") * 700,
    ],
)
def test_ordinary_pages_stay_below_the_limits(wikitext: str) -> None:
    require_parsable(wikitext)


def test_a_hostile_page_is_skipped_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hostile = [HOSTILE["nested arguments"]] * 25
    pages = [page(number, text) for number, text in enumerate(["First.", *hostile, "Last."])]
    corpora = []
    for name, some in {"dumps": pages, "intact": [pages[0], pages[-1]]}.items():
        write(tmp_path / name, *some)
        corpora.append(build_corpus(CorpusSpec(source=str(tmp_path / name), workers=1), tmp_path / "root"))
    with_hostile, intact = corpora
    assert with_hostile.counts == {**intact.counts, "empty_passages": 25, "skipped_pages": 25}
    assert "skipped_pages" not in intact.counts
    assert b"skipped" not in (intact.path / TEXT_FINDINGS).read_bytes()
    line = TextFindings.read(with_hostile.path).odd_lines()[-1]
    assert line in caplog.text
    assert line.startswith(
        "25 pages skipped, because the markup cannot be parsed: "
        "T1 (id 1): its markup is nested more than 100 deep; T2 (id 2): "
    )
    assert line.endswith("T20 (id 20): its markup is nested more than 100 deep; and 5 more")
