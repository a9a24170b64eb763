"""The built-in corpus: the documentation that comes with Python, as passages of at most 100 words.

It is read out of source files, never imported, and only out of those that every packaging of Python has, so
that one version of Python gives one corpus.
"""

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from t5train.atomic import replacing
from t5train.data.passages import Passage, SourceFile
from t5train.errors import InputError
from t5train.progress import Progress, silent

PYDOCS = "pydocs"
_PASSAGE_WORDS = 100
_TOPICS = "pydoc_data/topics.py"
# Distributions package these apart, or leave them out.
_OPTIONAL = {"distutils", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "test", "tests"}
_INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def source_files() -> list[SourceFile]:
    """The source files of the standard library, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    kept = [name for name in names if not (_OPTIONAL | _INSTALLED).intersection(name.split("/"))]
    if _TOPICS not in kept:
        raise InputError(f"{library} has no {_TOPICS}: install Python with its documentation, or set corpus.source")
    return [SourceFile(library / name, name) for name in kept]


def write_passages(path: Path, progress: Progress = silent) -> None:
    """Write the corpus as JSON lines of id, title and text; no two texts are equal."""
    files = source_files()
    seen: set[str] = set()
    with replacing(path) as out:
        for done, source in enumerate(files, start=1):
            for passage in _passages(source):
                if passage.text not in seen:
                    seen.add(passage.text)
                    out.write(json.dumps(passage._asdict(), ensure_ascii=False).encode() + b"\n")
            progress("source files read", done, len(files))


def _passages(source: SourceFile) -> Iterator[Passage]:
    tree = ast.parse(source.path.read_bytes())
    documents = _topics(tree) if source.name == _TOPICS else _docstrings(tree, _module_name(source.name))
    for title, text in documents:
        words = text.split()
        for number, start in enumerate(range(0, len(words), _PASSAGE_WORDS)):
            yield Passage(f"{title}#{number}", title, " ".join(words[start : start + _PASSAGE_WORDS]))


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and text of each topic of ``pydoc``, out of the module's one dictionary."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield f"topic {name}", text


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of everything documented in ``node``, depth first."""
    if isinstance(node, _Documented) and (text := ast.get_docstring(node, clean=False)):
        yield name, inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif not isinstance(child, ast.expr):
            yield from _docstrings(child, name)


def _module_name(file_name: str) -> str:
    return file_name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
