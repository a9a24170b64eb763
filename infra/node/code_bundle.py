"""This project's code as a bundle, identified by its digest. The head sends it to hosts that do not have it.

A bundle is a JSON object that maps the path of each module to its source. It contains no times, modes, owners or links,
so the same code always gives the same bytes.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGES = ("t5train", "infra")
"""The packages that guards, ranks and actions import. Only their modules are bundled."""


class Bundle(NamedTuple):
    """Code: its bytes, and their sha256."""

    digest: str
    content: bytes


@cache
def own_bundle() -> Bundle:
    """Bundle the code of this process. It is read at the first call and stays the same while the process runs."""
    return bundle(Path(__file__).parents[2])


def bundle(folder: Path) -> Bundle:
    """Bundle the modules of this project's packages in a folder."""
    paths = (path for top in _PACKAGES for path in (folder / top).rglob("*.py"))
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    sources = {name: path.read_bytes().decode() for name, path in files.items() if _is_module(name)}
    content = json.dumps(sources, sort_keys=True).encode("ascii")
    return Bundle(hashlib.sha256(content).hexdigest(), content)


def _is_module(name: str) -> bool:
    """Whether a file can be imported, unlike the temporary files of editors."""
    return all(part.isidentifier() and part.isascii() for part in name.removesuffix(".py").split("/"))
