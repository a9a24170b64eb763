"""docs/evidence/safety.md names a test for each threat."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/evidence/safety.md").read_text("utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
THREATS = [row for row in ROWS if row[0].strip() != "threat"]


@pytest.mark.parametrize("row", THREATS, ids=[row[0].strip()[:60] for row in THREATS])
def test_every_threat_names_tests_that_exist(row: list[str]) -> None:
    named = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", row[2])
    assert named
    file = ""
    for path, test in named:
        file = path or file
        functions = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text("utf-8"))) if _is_test(node)}
        assert test in functions if test else functions, f"{file}::{test}"


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
