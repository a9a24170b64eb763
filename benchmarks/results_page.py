"""Write the tables in docs/evidence/measurements.md from the results in benchmarks/results.

::

    python -m benchmarks.results_page

In the page, a table stands between ``<!-- NAME: COLUMN; COLUMN -->`` and ``<!-- end -->``: columns of the result NAME,
or all if none is named. Between ``<!-- others -->`` and ``<!-- end -->``, the other results are listed.
"""

import re
from collections.abc import Collection
from pathlib import Path

from benchmarks.measured_result import Result
from t5train.files.atomic import write_text

ROOT = Path(__file__).parents[1]
PAGE, FOLDER = ROOT / "docs/evidence/measurements.md", ROOT / "benchmarks/results"
OTHERS = "others"
_BEGIN = r"<!-- (?P<name>\w+)(: (?P<columns>[^>]*))? -->\n"


def results() -> dict[str, Result]:
    """Return all results by the name of their file."""
    return {path.stem: Result.model_validate_json(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def with_tables(page: str) -> str:
    """Return a page with its tables and its list as the results make them. Raises KeyError for an unknown result."""
    shown = {begin["name"] for begin in re.finditer(_BEGIN, page)}

    def written(part: re.Match[str]) -> str:
        content = _others(shown) if part["name"] == OTHERS else _table(part["name"], part["columns"])
        return f"{part['begin']}{content}<!-- end -->"

    return re.sub(f"(?P<begin>{_BEGIN}).*?<!-- end -->", written, page, flags=re.DOTALL)


def _table(name: str, columns: str | None) -> str:
    result = results()[name]
    table = result.table(columns.split("; ") if columns else (), ranges=False)
    return f"\n{table}\n{_link(name)}, {result.date}, {result.machine}\n"


def _others(shown: Collection[str]) -> str:
    links = ",\n".join(_link(name) for name in results() if name not in shown)
    return f"\n{links}\n\n"


def _link(name: str) -> str:
    return f"[{name}](../../benchmarks/results/{name}.json)"


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text("utf-8")))
