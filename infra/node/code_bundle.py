"""This project's code as one text, by whose digest it is known: what hosts are to have, or are sent.

A bundle is a JSON object with the source of each module by its path. It has no times, modes, owners or links, so the
same code is the same bytes wherever it lies.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGES = ("t5train", "infra")
"""What guards, ranks and infra.node are made of: modules, and nothing else."""


class Bundle(NamedTuple):
    """Code, and the sha256 of ``content``."""

    digest: str
    content: bytes


@cache
def own_bundle() -> Bundle:
    """The code of this process, as it was when this was first asked for, and is for as long as the process lasts."""
    return bundle(Path(__file__).parents[2])


def bundle(folder: Path) -> Bundle:
    """The packages that lie in a folder; of their files those that can be imported."""
    paths = (path for top in _PACKAGES for path in (folder / top).rglob("*.py"))
    sources = {name: path.read_bytes().decode() for path in paths if _is_module(name := _name(path, folder))}
    content = json.dumps(sources, sort_keys=True).encode("ascii")
    return Bundle(hashlib.sha256(content).hexdigest(), content)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_module(name: str) -> bool:
    """Not what an editor has left beside one."""
    return all(part.isidentifier() and part.isascii() for part in name.removesuffix(".py").split("/"))
