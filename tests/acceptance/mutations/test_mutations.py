"""The list of mutations fits the code, the tests and the claims. ``make mutations`` shows that tests notice them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.acceptance.mutations.mutation import MUTATIONS, Mutation

ROOT = Path(__file__).parents[3]
PAGES = ("safety", "faults", "resumes")
each_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])


@each_mutation
def test_a_mutation_can_be_planted_and_compiled(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text("utf-8")
    planted = mutation.planted_in(text)
    assert planted != text
    compile(planted, mutation.file, "exec")


@each_mutation
def test_the_tests_of_a_mutation_exist_and_are_part_of_make_test_or_make_test_cluster(mutation: Mutation) -> None:
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        functions = {node.name: node for node in ast.walk(_parsed(file)) if isinstance(node, ast.FunctionDef)}
        assert file.startswith("tests/")
        assert not re.search(r"^pytestmark = .*mark\.(ui|gpu)", (ROOT / file).read_text("utf-8"), re.MULTILINE)
        if function := name.partition("[")[0]:
            assert function in functions, test
            marks = " ".join(ast.unparse(each) for each in functions[function].decorator_list)
            assert not re.search(r"mark\.(ui|gpu)", marks)


@each_mutation
def test_the_claims_of_a_mutation_exist(mutation: Mutation) -> None:
    assert mutation.claims
    for claim in mutation.claims:
        page, _, words = claim.partition(": ")
        if page in PAGES:
            assert _row(page, words), claim
        else:
            assert words in (_proven() if page == "proven" else _text(_page(page))), claim


def test_every_claim_has_a_mutation() -> None:
    claims = [claim.partition(": ") for mutation in MUTATIONS for claim in mutation.claims]
    named = {(page, _row(page, words)) for page, _, words in claims if page in PAGES}
    missing = [f"{page}: {row}" for page in PAGES for row in _rows(page) if (page, row) not in named]
    proven = [words for page, _, words in claims if page == "proven"]
    bullets = re.split(r"(?:^| )- (?=\*\*)", _proven())[1:]
    missing += [f"proven: {bullet}" for bullet in bullets if not any(words in bullet for words in proven)]
    assert not missing


def test_names_of_mutations_are_unique() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 60


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text("utf-8"))


@cache
def _proven() -> str:
    return _text(ROOT / "README.md").partition("## What is proven ")[2].partition("## ")[0]


@cache
def _text(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


def _page(name: str) -> Path:
    (path,) = (ROOT / "docs").glob(f"*/{name}.md")
    return path


def _row(page: str, words: str) -> str | None:
    """The only row that is, or begins with, these words."""
    rows = _rows(page)
    found = [row for row in rows if row == words] or [row for row in rows if row.startswith(words)]
    return found[0] if len(found) == 1 else None


@cache
def _rows(page: str) -> list[str]:
    """The first cells of a page's tables, without their headers."""
    lines = _page(page).read_text("utf-8").splitlines()
    headers = {number for number, line in enumerate(lines[1:]) if line.startswith("|---")}
    rows = [line for number, line in enumerate(lines) if line.startswith("| ") and number not in headers]
    return [row.split("|")[1].strip() for row in rows]
