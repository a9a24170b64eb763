"""Compares what commands print with ``--json`` with docs/reference/json.md."""

import re
from pathlib import Path
from typing import Any

DOCS = (Path(__file__).parents[2] / "docs/reference/json.md").read_text("utf-8")


def require_documented(command: str, value: dict[str, Any]) -> None:
    """Require that docs/reference/json.md names exactly the keys of a value, and of the objects in its lists."""
    section = DOCS.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^- (`.*?):(?:\s|$)", section, re.MULTILINE | re.DOTALL)
    documented = {key for keys in named for key in re.findall(r"`([^`]+)`", keys)}
    found = set(value)
    for key, inside in value.items():
        if isinstance(inside, list) and inside and isinstance(inside[0], dict):
            found |= {f"{key}[].{each}" for each in inside[0]}
    missing = documented - found
    assert not found - documented, "these keys are not in docs/reference/json.md"
    assert all("[]." in key for key in missing), "docs/reference/json.md names keys that are not there"
