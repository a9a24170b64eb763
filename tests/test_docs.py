"""Pages of the documentation are short, and their links lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
TABLES = {ROOT / "docs/reference/settings.md", ROOT / "docs/evidence/safety.md"}  # where a reader looks up one row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _without_code(page))
    broken = [link for link in links if "://" not in link and not _exists(page, *link.partition("#")[::2])]
    assert not broken


@pytest.mark.parametrize("page", sorted(set(PAGES) - TABLES), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    assert len(page.read_text("utf-8").split()) <= 1500


def test_every_page_is_linked_from_the_index_or_a_page_that_it_links() -> None:
    reached, to_read = set(), [ROOT / "docs/index.md"]
    while to_read:
        if (page := to_read.pop()) not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", _without_code(page))
            to_read += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert not set(PAGES) - reached


def _exists(page: Path, target: str, anchor: str) -> bool:
    file = (page.parent / target).resolve() if target else page
    return file.exists() and (not anchor or anchor in _anchors(file))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
