"""This project's code as a bundle, identified by its digest, that every host must have or is sent.

A bundle is a JSON object that maps the path of each module to its source. It contains no times, modes, owners or links,
so the same code always gives the same bytes.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGES = ("t5train", "infra")
"""The packages of guards, ranks and infra.node. Only their modules are bundled."""


class Bundle(NamedTuple):
    """Code, and the sha256 of ``content``."""

    digest: str
    content: bytes


@cache
def own_bundle() -> Bundle:
    """The code of this process. It is read at the first call and stays the same while the process runs."""
    return bundle(Path(__file__).parents[2])


def bundle(folder: Path) -> Bundle:
    """The importable files of the packages in a folder."""
    paths = (path for top in _PACKAGES for path in (folder / top).rglob("*.py"))
    sources = {name: path.read_bytes().decode() for path in paths if _is_module(name := _name(path, folder))}
    content = json.dumps(sources, sort_keys=True).encode("ascii")
    return Bundle(hashlib.sha256(content).hexdigest(), content)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_module(name: str) -> bool:
    """Whether it can be imported, unlike the temporary files of editors."""
    return all(part.isidentifier() and part.isascii() for part in name.removesuffix(".py").split("/"))
