"""What is predicted: sources with the prefix of their task and, if a file has them, references."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from t5train.data.pairs.pair_reading import PairRow, pair_rows
from t5train.data.pairs.pair_sources import task_files
from t5train.data.passages import SourceFile
from t5train.data.readers import OpenFile, format_of, read_to_end, text_lines
from t5train.errors import InputError, SpecError
from t5train.progress import Progress
from t5train.spec import PairsSpec, nearest
from t5train.spec.pairs_spec import GENERATED, PairSource, location_of
from t5train.spec.settings import explain

FILE = "FILE"
DOUBLED, PREFIXES_MISSING = "doubled_prefixes", "missing_prefixes"
_SETTING = "pairs.train"
_PLAIN = ".txt"


class SourceRow(NamedTuple):
    """A row to predict. ``source`` has the prefix of the task."""

    id: str
    """Its number in all files, from 1."""
    task: str | None
    source: str
    reference: str | None


class SourceFiles(NamedTuple):
    """The files that one name stands for, and how their rows are read."""

    files: list[SourceFile]
    columns: PairSource
    """Without references, its target is the source again."""
    task: str | None
    prefix: str
    has_references: bool

    def identity(self, sha256: Sequence[str]) -> dict[str, object]:
        """Return what decides the rows, given the digests of the files."""
        columns = [self.columns.source, self.columns.target if self.has_references else None]
        return {"task": self.task, "prefix": self.prefix, "columns": columns, "sha256": list(sha256)}


def source_files(named: str, tasks: Mapping[str, str], root: Path, progress: Progress) -> SourceFiles:
    """Return the files that a name such as ``wmt.jsonl#source=en&target=de&task=en-de`` stands for.

    ``tasks`` are the prefixes of the tasks that the model was fine-tuned on, by their names. Remote files are
    downloaded to ``{root}/cache``. Lines of .txt files are sources without references.

    Raises SpecError if the name is not valid, or leaves open which task it is of; InputError if there is no such file,
    or if its first row cannot be read.
    """
    given = {each.partition("=")[0] for each in named.removeprefix(location_of(named)).removeprefix("#").split("&")}
    with _of_file():
        spec = PairsSpec(train=(named,))
        (source,) = spec.tasks()
        if source.location in GENERATED:
            raise InputError(f"{FILE} is {source.location}, whose pairs are made for training. Name a file of pairs")
        files = [file for each in task_files(spec, root, progress) for file in each.files]
    task = _task(named, source.task if "task" in given else None, "prefix" in given, tasks)
    prefix = source.prefix if "prefix" in given else tasks.get(task or "", "")
    found = SourceFiles(files, source, task, prefix, has_references=True)
    return _with_references(found, given)


def _task(named: str, task: str | None, has_prefix: bool, tasks: Mapping[str, str]) -> str | None:
    """Return the task of a file: the named one, or the only one of the model. Raises SpecError if that is open."""
    choices = f"{', '.join(tasks)}{nearest(task or '', list(tasks))}"
    if task is not None and tasks and task not in tasks and not has_prefix:
        raise SpecError(
            f"{FILE} is {named!r}: {task!r} is none of the tasks that the model was fine-tuned on ({choices}). Name "
            "one of them (#task=), or give a prefix, which may be empty (#prefix=)"
        )
    if task is None and len(tasks) > 1 and not has_prefix:
        raise SpecError(
            f"{FILE} is {named!r}, but the model was fine-tuned on {len(tasks)} tasks ({choices}). Name that of the "
            "file (#task=NAME after it; of standard input, /dev/stdin#task=NAME), or give a prefix, which may be empty "
            "(#prefix=)"
        )
    return task if task is not None or len(tasks) != 1 else next(iter(tasks))


def _with_references(found: SourceFiles, given: set[str]) -> SourceFiles:
    """Return the files without references if their first rows have none. Raises InputError if one cannot be read."""
    columns = found.columns
    without = found._replace(columns=columns._replace(target=columns.source), has_references=False)
    if all(format_of(file.name) == _PLAIN for file in found.files):
        if chosen := given & {"source", "target"}:
            raise SpecError(f"{FILE} is {columns.location}, whose lines are sources: leave #{min(chosen)}= out")
        return without
    for each in (without, found):
        try:
            for file in each.files:
                with OpenFile() as opened:
                    next(_pairs(file, each, opened), None)
        except InputError:
            if each is without or "target" in given:
                raise
            return without
    return found


def source_rows(inputs: Sequence[SourceFiles], tasks: Mapping[str, str], counts: Counter[str]) -> Iterator[SourceRow]:
    """Yield the rows of all files, and count sources that have a prefix twice, or none that the model knows.

    Raises InputError if a row cannot be read, or if its source is empty.
    """
    prefixes, number = tuple(tasks.values()), 0
    for each in inputs:
        for file in each.files:
            with OpenFile() as opened:
                for row in _pairs(file, each, opened):
                    number += 1
                    if not row.source.strip():
                        raise InputError(
                            f"{file.shown} {row.where} has an empty source. Remove this row, or write its source"
                        )
                    source = each.prefix + row.source
                    counts[DOUBLED] += bool(each.prefix) and row.source.startswith(each.prefix)
                    counts[PREFIXES_MISSING] += bool(prefixes) and not source.startswith(prefixes)
                    yield SourceRow(str(number), each.task, source, row.target if each.has_references else None)


def _pairs(file: SourceFile, inputs: SourceFiles, opened: OpenFile) -> Iterator[PairRow]:
    with _of_file():
        if format_of(file.name) != _PLAIN:
            yield from pair_rows(file, inputs.columns, opened)
            return
        with read_to_end(file, opened):
            for number, _, line in text_lines(file, 0, 0, opened):
                yield PairRow(f"line {number + 1}", line, "")


@contextmanager
def _of_file() -> Iterator[None]:
    """Let errors, which speak of the pairs of a run, speak of the file that is predicted."""
    try:
        yield
    except ValidationError as error:
        raise SpecError(explain(error).replace(_SETTING, FILE)) from None
    except InputError as error:
        raise type(error)(str(error).replace(_SETTING, FILE)) from error.__cause__
