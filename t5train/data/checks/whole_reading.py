"""Reads a text to its end: where its rows are, how many repeat others, and what may be wrong with them.

A text with a name, such as psgs_w100, must have the columns, rows and ids that it should have. Test sets are
texts that training is kept free of (``corpus.test_sets``).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.data.checks.listed_pairs import ListedSearch
from t5train.data.formats.passage_frames import FRAMES, is_framed
from t5train.data.passages import ODDITIES, IdRows, IdsOfFile, Skipped, SourceFile, TextDigests
from t5train.data.readers import is_compressed, is_dump
from t5train.data.segments import FileSegments, Segment, size_of_text
from t5train.data.sources import files_of_earlier_version, local_files
from t5train.data.worker_processes import Json, in_processes
from t5train.errors import InputError
from t5train.files.atomic import write_text
from t5train.host_resources import num_cores, require_free_space
from t5train.progress import Progress, adding
from t5train.quantities import quantity
from t5train.records.locations import redacted
from t5train.records.stage_records import REMOVED, REPEATED, SKIPPED, Corpus
from t5train.spec import CorpusSpec
from t5train.spec.data_spec import HubText, TextSource
from t5train.spec.known_texts import KnownText
from t5train.spec.settings import explain

TEXT_FINDINGS = "text-findings.json"
FRAMED_FROM_BYTES = 128 << 20
"""Compressed files of this size or more, and all dumps of Wikipedia, also get a seekable copy of their passages.
Without the copy, each shard would read the file from the beginning."""
_MOST_IDS = 10_000
"""Different ids that are kept to compare them. A text that has more has documents in every split."""
_MANY_REPEATED = 0.1
"""Share of the passages. If more repeat others, the log and the data report warn."""
_FRAMES_SIZE = 2.2
"""Largest size of that copy relative to the compressed file. Measured: 1.1 to 1.6 for .gz, up to 2.1 for .xz."""


class TextFindings(BaseModel):
    """What reading a whole text showed, and a search for repetitions; the content of ``text-findings.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    passages: int
    """With text; without those that were removed."""
    passages_read: int
    """With text; those that were removed included."""
    empty_passages: int
    text_bytes: int
    repeated_passages: int
    """About how many of ``passages`` have the text of an earlier one."""
    odd: dict[str, int]
    """How many of ``passages_read`` have each of ``ODDITIES``."""
    lengths: dict[int, int]
    """How many of ``passages_read`` have a text of 2**(n-1) to before 2**n bytes, by n."""
    repetitions: dict[str, int] | None = None
    """The counts of ``find_repetitions``; None if nothing was searched for."""
    skipped_pages: int = 0
    """How many pages of dumps have no text here, because they cannot be parsed."""
    first_skipped: tuple[str, ...] = ()
    """The first of them, and why."""
    listed: ListedSearch | None = None
    """How the near-duplicates of ``corpus.remove_listed`` were found; None if that is not set."""

    @classmethod
    def of(cls, corpus: Corpus) -> "TextFindings | None":
        """Return the findings of a finished corpus; None for one that an earlier version made."""
        return cls.read(corpus.path) if TEXT_FINDINGS in corpus.files else None

    @classmethod
    def read(cls, folder: Path) -> "TextFindings":
        """Read ``text-findings.json``. Raises InputError if it cannot be read."""
        path = folder / TEXT_FINDINGS
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            said = explain(error) if isinstance(error, ValidationError) else error
            raise InputError(f"{path} cannot be read ({said}). Remove {folder}, and start again") from error

    def write(self, folder: Path) -> None:
        """Write ``text-findings.json``."""
        without = set() if self.skipped_pages else {"skipped_pages", "first_skipped"}  # as earlier versions wrote it
        write_text(folder / TEXT_FINDINGS, self.model_dump_json(indent=1, exclude=without) + "\n")

    def counts(self) -> dict[str, int]:
        """Return the counts of the corpus's record."""
        names = ("passages", "empty_passages", "text_bytes", REPEATED)
        removed = {} if self.repetitions is None else {REMOVED: self.repetitions[REMOVED]}
        skipped = {SKIPPED: self.skipped_pages} if self.skipped_pages else {}
        return {name: getattr(self, name) for name in names} | removed | skipped

    def odd_lines(self) -> list[str]:
        """Return a sentence for each of ``ODDITIES`` that passages have."""
        return [
            f"{quantity(number, 'passage')} of {self.passages_read:,} with {ODDITIES[name].explanation}"
            for name, number in self.odd.items()
            if number
        ] + self._skipped_lines()

    def _skipped_lines(self) -> list[str]:
        if not self.skipped_pages:
            return []
        more = self.skipped_pages - len(self.first_skipped)
        named = "; ".join([*self.first_skipped, *([f"and {more:,} more"] if more else [])])
        return [f"{quantity(self.skipped_pages, 'page')} skipped, because the markup cannot be parsed: {named}"]

    def repetition_warning(self) -> str:
        """Return a warning if more than a tenth of the passages repeat others; empty otherwise."""
        if self.repeated_passages <= _MANY_REPEATED * self.passages:
            return ""
        return (
            f"{self.repeated_passages / self.passages:.1%} of {quantity(self.passages, 'passage')} have the text of "
            "another one, which may be in another split. If files were copied, leave the copies out of corpus.source; "
            "to remove repeated text from training, set corpus.remove=duplicates"
        )

    def after_removal(
        self, files: Sequence[FileSegments], repetitions: Mapping[str, int], listed: ListedSearch | None
    ) -> "TextFindings":
        """Return the findings of what is left of the text."""
        return self.model_copy(
            update={
                "passages": sum(file.passages for file in files),
                "text_bytes": size_of_text(files),
                "repeated_passages": repetitions["kept_duplicates"],
                "repetitions": dict(repetitions),
                "listed": listed,
            }
        )


class Ids(NamedTuple):
    """What is known of the ids of a file."""

    first: int | None
    """The first one, if it is a whole number."""
    broken: tuple[int, str] | None
    """Row and id of the first one that does not follow that of the row before."""


class ReadText(NamedTuple):
    """A text that was read to its end."""

    files: list[FileSegments]
    ids: list[Ids]
    """Of each file."""
    few_ids: list[IdsOfFile]
    findings: TextFindings


def read_whole(
    sources: Sequence[SourceFile], folder: Path, workers: int, progress: Progress, prefix: str = ""
) -> ReadText:
    """Read all files in worker processes, and return them in the order of ``sources``.

    The passages of large compressed files are stored once more, in ``folder``; ``prefix`` begins their names. Raises
    InputError if a file is malformed.
    """
    sizes = [source.path.stat().st_size for source in sources]
    frames = [
        folder / f"{prefix}{number:05d}{FRAMES}" if _is_stored_again(source, size) else None
        for number, (source, size) in enumerate(zip(sources, sizes, strict=True))
    ]
    again = sum(size for size, path in zip(sizes, frames, strict=True) if path is not None)
    require_free_space(folder, int(again * _FRAMES_SIZE), "the passages of large compressed files")
    digests = [folder / f".digests.{number:08x}.tmp" for number in range(len(sources))]
    jobs = [
        {"path": str(source.path), "name": source.name, "frames": path and str(path), "digests": str(of_texts)}
        for source, path, of_texts in zip(sources, frames, digests, strict=True)
    ]
    results = _results(jobs, sum(sizes), workers, progress)
    in_order = [results[str(of_texts)] for of_texts in digests]
    steps = [each["digests_step"] for each in in_order]
    repeated = TextDigests.joined(zip(digests, steps, strict=True)).repeated()
    for path in digests:
        path.unlink()
    places = [source._replace(path=path or source.path) for source, path in zip(sources, frames, strict=True)]
    files = list(map(_file_segments, places, in_order))
    ids = [Ids(each["first_id"], each["broken_id"] and tuple(each["broken_id"])) for each in in_order]
    few_ids = list(map(_few_ids, sources, in_order))
    return ReadText(files, ids, few_ids, _findings(files, in_order, repeated))


def _few_ids(source: SourceFile, result: Json) -> IdsOfFile:
    found = result["few_ids"]
    return IdsOfFile(source, None if found is None else {name: IdRows(*rows) for name, rows in found.items()})


def _is_stored_again(source: SourceFile, size_bytes: int) -> bool:
    if is_framed(source):
        return False
    return is_dump(source.name) or (is_compressed(source.path) and size_bytes >= FRAMED_FROM_BYTES)


def _results(jobs: Sequence[Json], total: int, workers: int, progress: Progress) -> dict[str, Json]:
    advance = adding(progress, "bytes of text read and checked", total)
    results, kept = dict[str, Json](), 0
    for result in in_processes("t5train.data.segments:scan_file", jobs, workers, advance):
        kept += len(result["few_ids"] or ())
        if kept > _MOST_IDS:
            result["few_ids"] = None
        results[result["digests"]] = result  # names may be those of files of another text, too
    return results


def _findings(files: Sequence[FileSegments], results: Sequence[Json], repeated: int) -> TextFindings:
    odd, lengths = Counter[str](), Counter[int]()
    for result in results:
        odd.update(result["odd"])
        lengths.update({int(bits): number for bits, number in result["lengths"].items()})
    passages = sum(file.passages for file in files)
    return TextFindings(
        passages=passages,
        passages_read=passages,
        empty_passages=sum(file.empty_passages for file in files),
        text_bytes=size_of_text(files),
        repeated_passages=repeated,
        odd={name: odd[name] for name in ODDITIES},
        lengths=dict(sorted(lengths.items())),
        skipped_pages=sum(each["skipped_pages"] for each in results),
        first_skipped=tuple([page for each in results for page in each["first_skipped"]][: Skipped.NAMED]),
    )


def _file_segments(source: SourceFile, result: Json) -> FileSegments:
    return FileSegments(source, result["passages"], result["empty"], [Segment(*each) for each in result["segments"]])


def require_known_columns(known: KnownText, sources: Sequence[SourceFile]) -> None:
    """Raise InputError if a file of a text with a name lacks columns that it should have."""
    from t5train.data.formats.parquet import require_columns  # pyarrow is slow to import

    for source in sources:
        require_columns(source, known.columns)


def require_known_rows(source: str, known: KnownText, text: Sequence[tuple[FileSegments, Ids]]) -> None:
    """Raise InputError if a text with a name has another number of rows, or other ids, than it should have."""
    rows = sum(file.passages + file.empty_passages for file, _ in text)
    if rows != known.rows:
        raise InputError(
            f"corpus.source {source!r} has {rows:,} rows, but should have {known.rows:,}. Its files are not those "
            "that the name stands for: name the text by its URL, if it is the one that you want"
        )
    expected = 1
    for file, ids in text:
        number, found = ids.broken or (0, ids.first)
        rows = file.passages + file.empty_passages
        if known.has_sequential_ids and rows and (ids.broken or found != expected):
            raise InputError(
                f"{file.source.name}, row {number}: the id is {found!r}, but should be {expected + number}, because "
                f"the ids of {source} are numbered from 1. Rows are missing, or the file is another one: remove "
                "it, and download it again"
            )
        expected += rows


def files_of_test_set(source: str, root: Path, progress: Progress, *, as_before: bool = False) -> list[SourceFile]:
    """Return the files of one of corpus.test_sets, as ``local_files`` does, or as an earlier version did."""
    with of_test_set():
        if as_before:
            return files_of_earlier_version(TextSource(source, "", HubText()), root, progress)
        return local_files(source, "", root, progress)


@contextmanager
def of_test_set() -> Iterator[None]:
    """Let errors name corpus.test_sets, not corpus.source."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("corpus.source", "corpus.test_sets")) from error.__cause__


def read_test_sets(
    spec: CorpusSpec, test_sets: Sequence[Sequence[SourceFile]], scratch: Path, progress: Progress
) -> list[FileSegments]:
    """Read all test sets. This is done before the text is read, because it finds mistakes sooner.

    Passages of large compressed files are stored once more in ``scratch``. Raises InputError if a test set is empty or
    malformed.
    """
    scratch.mkdir(exist_ok=True)
    found = list[FileSegments]()
    for number, (name, sources) in enumerate(zip(spec.test_sets, test_sets, strict=True)):
        text = read_whole(sources, scratch, spec.workers or num_cores(), progress, f"test-set-{number:02d}-")
        if not text.findings.passages:
            raise InputError(
                f"corpus.test_sets {redacted(name)!r} holds no text, so training cannot be compared with it. Correct "
                "the path, or leave it out"
            )
        found += text.files
    return found
