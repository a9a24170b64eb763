"""The table of claims in docs/evidence/claims.md: which test proves each, at which level, and how long it takes."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from t5train.files.atomic import write_text
from tests.acceptance.mutations.mutated_copy import REPOSITORY
from tests.acceptance.mutations.mutation import Mutation
from tests.acceptance.mutations.outcomes import Outcome

PAGE = REPOSITORY / "docs/evidence/claims.md"
_HEADER = "| claim | planted fault | test that failed | level | seconds |\n|---|---|---|---|---|\n"
_LEVELS = ("cluster", "slow")


def write(mutations: Sequence[Mutation], outcomes: Sequence[Outcome]) -> None:
    """Replace the table's rows by those of mutations that were caught, in order of claims."""
    claims = {mutation.name: mutation.claims for mutation in mutations}
    rows = sorted(
        f"| {claim} | {caught.mutation} | `{caught.failed.removeprefix('tests/')}` | {level_of(caught.failed)} | "
        f"{caught.seconds:.0f} |\n"
        for caught in outcomes
        if caught.failed
        for claim in claims[caught.mutation]
    )
    above, _, _ = PAGE.read_text("utf-8").partition(_HEADER)
    write_text(PAGE, above + _HEADER + "".join(rows))


def level_of(test: str) -> str:
    """Return the stage of `make test` or `make test-cluster` that runs a test: quick, slow or cluster."""
    file, _, name = test.partition("::")
    text = Path(REPOSITORY, file).read_text("utf-8")
    marks = [line for line in text.splitlines() if line.startswith("pytestmark")]
    function = name.partition("[")[0]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            marks += [ast.unparse(each) for each in node.decorator_list]
    return next((level for level in _LEVELS if re.search(rf"mark\.{level}\b", " ".join(marks))), "quick")
