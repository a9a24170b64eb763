"""Test sets: texts that training is kept free of (``corpus.test_sets``)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from t5train.data.checks.whole_reading import read_whole
from t5train.data.passages import SourceFile
from t5train.data.segments import FileSegments
from t5train.data.sources import files_of_earlier_version, local_files
from t5train.errors import InputError
from t5train.host_resources import num_cores
from t5train.locations import redacted
from t5train.progress import Progress
from t5train.spec import CorpusSpec
from t5train.spec.data_spec import HubText, TextSource


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
