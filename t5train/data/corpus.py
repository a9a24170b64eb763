"""The corpus stage: find or create the text, verify every file, and record where its rows are."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from t5train.data.checks.hard_wraps import wrapping_warning
from t5train.data.checks.listed_pairs import Listed, open_listed
from t5train.data.checks.removal import write_without
from t5train.data.checks.repetitions import Search, find_repetitions
from t5train.data.checks.unchanged_files import content_of, digests_of, require_unchanged, stamps_of
from t5train.data.checks.whole_reading import (
    TEXT_FINDINGS,
    ReadText,
    TextFindings,
    files_of_test_set,
    read_test_sets,
    read_whole,
    require_known_columns,
    require_known_rows,
)
from t5train.data.download.source_listing import file_identity
from t5train.data.formats.passage_frames import is_framed
from t5train.data.formats.wikipedia_dump import require_one_form
from t5train.data.passages import SourceFile, require_documents
from t5train.data.segments import SEGMENTS, FileSegments, read_segments, write_segments
from t5train.data.sources import PYDOCS, files_of_earlier_version, local_files, pydocs_files, write_pydocs
from t5train.errors import InputError, RecordError, UnknownVersion, Unreadable
from t5train.files.atomic import remove_folder
from t5train.files.output_folder import making, stage_folder
from t5train.host_resources import num_cores, require_writable
from t5train.progress import Progress, silent
from t5train.quantities import quantity
from t5train.records.changed_files import keep_changed_files
from t5train.records.digests import FileDigest, FileStamp, digest_files
from t5train.records.identity import fingerprint
from t5train.records.locations import hub_dataset_name, redacted
from t5train.records.stage_records import REMOVED, Corpus, reusable
from t5train.spec import CorpusSpec
from t5train.spec.data_spec import REPETITIONS, Repetition, TextSource
from t5train.spec.known_texts import known_texts

_STAGE_VERSION = 1  # incremented when the same files would give another corpus
_PYDOCS_FILE = "pydocs.jsonl"
_SCRATCH = ".compared"
_MANY_REMOVED = 0.2  # share of the training split; if more is removed, the log warns
_REMOVAL_VERSION = 1  # incremented when the same settings would remove other passages
_log = logging.getLogger(__name__)


def build_corpus(spec: CorpusSpec, root: Path, progress: Progress = silent, *, out: Path | None = None) -> Corpus:
    """Find or make the text, verify every file, and record where its passages are. A finished corpus is reused.

    Local files are used in place, and remote ones are downloaded to ``{root}/cache``. The fingerprint depends on the
    content of the source files and their names below the source, not on their location.

    Args:
        spec: The source, and how documents are split into train, validation and test.
        root: The root folder.
        progress: Called with the number of files hashed, then with the number of bytes read (as stored on disk).
        out: Folder of the result; ``{root}/corpus/{name}-{first 12 digits of the fingerprint}`` if left out.

    Returns:
        The record of the corpus; its counts are passages, empty passages, UTF-8 bytes of text, and about how many
        passages have the text of another one.

    Raises:
        InputError: The source is missing, empty, truncated, not UTF-8 or malformed, or was changed meanwhile.
        StorageError: The folder cannot be written, or holds something else. A full disk is noticed only once there is
            something to write, because a finished corpus needs no space.

    """
    require_writable(out or root)  # before hashing, which takes long for a large corpus
    listed = None if spec.remove_listed is None else open_listed(Path(spec.remove_listed))
    for known in (known_texts().get(each.source) for each in spec.texts()):
        if known is not None:
            _log.info("%s. Its licence: %s", known.title, known.license)
    inputs = _inputs(spec, root, listed, progress)
    folder = out or stage_folder(root, "corpus", corpus_name(spec), inputs.identity)
    if (earlier := _of_earlier_version(spec, root, folder, inputs, listed, progress)) is not None:
        folder, inputs = earlier
    sources, digests, identity = inputs.sources, inputs.digests, inputs.identity
    if listed is not None:
        listed.require_text(*({each["name"]: each[fact] for each in inputs.content} for fact in ("size", "sha256")))
    if out is None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with making(folder, identity):
        recorded = {str(source.path): digest for source, digest in digests.items()}
        if found := reusable(Corpus, folder, identity, progress, known=recorded):
            return found
        keep_changed_files(folder)
        if PYDOCS in spec.named():
            sources, recorded = _with_pydocs(spec, sources, recorded, folder, progress)
        compared = read_test_sets(spec, inputs.test_sets, folder / _SCRATCH, progress) if spec.test_sets else []
        with _of_mixture(spec):
            text = read_whole(sources, folder, spec.workers or num_cores(), progress)
        _require_text(spec, text)
        if spec.removes_passages:
            text = _without_repetitions(spec, text, compared, listed, folder, progress)
        for warning in filter(None, (text.findings.repetition_warning(), wrapping_warning(sources))):
            _log.warning("%s", warning)
        require_unchanged(inputs.stamps, digests)
        write_segments(folder, text.files)
        text.findings.write(folder)
        stored_again = [file.source.path.name for file in text.files if _is_made(file.source, folder)]
        own = [*([_PYDOCS_FILE] if PYDOCS in spec.named() else []), SEGMENTS, TEXT_FINDINGS, *stored_again]
        return Corpus(
            path=folder,
            fingerprint=identity,
            files=recorded | digest_files(folder, own),
            counts=text.findings.counts(),
        ).commit()


def corpus_name(spec: CorpusSpec) -> str:
    """Return a folder name derived from the source."""
    name = PurePosixPath(redacted(spec.source)).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "text"


class _Inputs(NamedTuple):
    """The files of a corpus, and what identifies it."""

    sources: list[SourceFile]
    stamps: dict[Path, FileStamp]
    digests: dict[SourceFile, FileDigest]
    content: list[dict[str, Any]]
    test_sets: list[list[SourceFile]]
    identity: str


def _inputs(
    spec: CorpusSpec, root: Path, listed: Listed | None, progress: Progress, *, as_before: bool = False
) -> _Inputs:
    sources = _sources(spec, root, progress, as_before=as_before)
    stamps = stamps_of(sources)
    digests = digests_of(sources, progress)
    test_sets = [files_of_test_set(each, root, progress, as_before=as_before) for each in spec.test_sets]
    content = content_of(digests)
    identified = {"kind": "corpus", "stage": _STAGE_VERSION, "files": content}
    identity = fingerprint(identified | _removal_identity(spec, test_sets, listed, progress))
    return _Inputs(sources, stamps, digests, content, test_sets, identity)


def _of_earlier_version(
    spec: CorpusSpec, root: Path, folder: Path, inputs: _Inputs, listed: Listed | None, progress: Progress
) -> tuple[Path, _Inputs] | None:
    """Return the folder and inputs of a finished corpus with hidden files or links, which earlier versions read.

    It stays valid, so that runs continue with the text that they began with. None if there is none.
    """
    is_named = folder.parent == root / "corpus"
    made = dict[str, Corpus]()
    for each in root.glob(f"corpus/{corpus_name(spec)}-*") if is_named else [folder]:
        with suppress(RecordError, UnknownVersion, Unreadable):  # reuse says what is wrong with it
            record = Corpus.load(each)
            made[record.fingerprint] = record
    if inputs.identity in made or not any(_has_more_files(each, spec, inputs) for each in made.values()):
        return None
    before = _inputs(spec, root, listed, progress, as_before=True)
    if (found := made.get(before.identity)) is None:
        return None
    _log.warning(
        "%s was made by an earlier version, which also read hidden files or links: it is used as it is", found.path
    )
    return found.path, before


def _has_more_files(record: Corpus, spec: CorpusSpec, inputs: _Inputs) -> bool:
    """Whether a corpus may be of these files and others. Files of Python and of test sets are not recorded."""
    recorded = [path for path in record.files if Path(path).is_absolute()]
    is_python = [source == PYDOCS for source in spec.named()]
    names = [each.path.name for each in inputs.sources if not is_python[each.part]]
    is_more = len(recorded) > len(names) or bool(spec.test_sets)
    return is_more and set(names) <= {Path(path).name for path in recorded}


def _sources(spec: CorpusSpec, root: Path, progress: Progress, *, as_before: bool) -> list[SourceFile]:
    """Return the files of all texts of the corpus, in order. Remote ones are downloaded."""
    found = list[SourceFile]()
    for part, text in enumerate(spec.texts()):
        with of_part(part, text):
            files = _files(text, root, progress, spec.workers, as_before=as_before)
            known = known_texts().get(text.source)
            if known is not None and known.columns:
                require_known_columns(known, files)
        found += [each._replace(part=part) for each in files]
    if spec.mixed_with:
        require_different(spec, found)
    return found


def require_different(spec: CorpusSpec, files: Sequence[SourceFile]) -> None:
    """Raise InputError if a file belongs to two texts: passages held out in one could be trained on in the other."""
    owners: dict[object, int] = {}
    for each in files:
        owner = owners.setdefault(file_identity(str(each.path)), each.part)
        if owner != each.part:
            one, other = (redacted(spec.named()[part]) for part in (owner, each.part))
            raise InputError(
                f"{each.shown} belongs to two texts of the mixture, {one!r} and {other!r}, and would be read twice. "
                "Change corpus.source or corpus.mixed_with so that no file is in two of them"
            )
    require_one_form(str(each.path) for each in files)


def _files(
    text: TextSource, root: Path, progress: Progress, workers: int | None, *, as_before: bool
) -> list[SourceFile]:
    if text.source == PYDOCS:
        return pydocs_files()
    if as_before:
        return files_of_earlier_version(text, root, progress)
    return local_files(text.source, text.revision, root, progress, text.hub_text, workers)


@contextmanager
def of_part(part: int, text: TextSource) -> Iterator[None]:
    """Let errors of other texts than the first name corpus.mixed_with, and what is chosen after #."""
    try:
        yield
    except InputError as error:
        if not part:
            raise
        message = str(error).replace("corpus.source", "corpus.mixed_with")
        if "," in text.source and "does not exist" in message:
            message += '. If it stands for several texts, give them as a list: corpus.mixed_with=\'["A", "B"]\''
        if hub_dataset_name(text.source) is not None:
            message = re.sub(r"corpus\.(?:hub_)?(config|split|column|revision)\b", r"#\1=", message)
        raise type(error)(message) from error.__cause__


@contextmanager
def _of_mixture(spec: CorpusSpec) -> Iterator[None]:
    """Let errors of files, which may belong to any of the texts, name both settings."""
    try:
        yield
    except InputError as error:
        if not spec.mixed_with:
            raise
        message = str(error).replace("corpus.source", "corpus.source, corpus.mixed_with")
        raise type(error)(message) from error.__cause__


def _with_pydocs(
    spec: CorpusSpec, sources: list[SourceFile], recorded: dict[str, FileDigest], folder: Path, progress: Progress
) -> tuple[list[SourceFile], dict[str, FileDigest]]:
    """Make Python's documentation into text. Return the files with that one in place of Python's, also the recorded."""
    part = spec.named().index(PYDOCS)
    write_pydocs(folder / _PYDOCS_FILE, progress)
    replaced = {str(each.path) for each in sources if each.part == part}
    kept = [each for each in sources if each.part != part] + [SourceFile(folder / _PYDOCS_FILE, _PYDOCS_FILE, part)]
    rest = {path: digest for path, digest in recorded.items() if path not in replaced}
    return sorted(kept, key=lambda each: each.part), rest


def check_text(spec: CorpusSpec, root: Path, progress: Progress = silent) -> tuple[Path, TextFindings]:
    """Look for everything that a text repeats, without removing it. A finished check is reused.

    Args:
        spec: The text, its splits, and test sets to compare it with. ``remove`` and ``remove_listed`` do not count.
        root: The root folder. The result is ``{root}/checks/{name}-{first 12 digits of a fingerprint}``.
        progress: Called as by ``build_corpus``, and with what is compared.

    Returns:
        The folder with ``text-findings.json``, and its content.

    Raises:
        InputError: A text is missing, empty or malformed.
        StorageError: The root is too small or cannot be written.

    """
    plain = spec.model_copy(update={"remove": (), "remove_listed": None, "test_sets": ()})
    corpus = build_corpus(plain, root, progress)
    test_sets = [files_of_test_set(each, root, progress) for each in spec.test_sets]
    contents = [content_of(digests_of(files, progress)) for files in test_sets]
    identity = fingerprint(
        {"kind": "check", "removal": _REMOVAL_VERSION, "corpus": corpus.fingerprint, "test_sets": contents}
        | spec.split_identity()
    )
    folder = stage_folder(root, "checks", corpus_name(spec), identity)
    with making(folder, identity):
        if not (folder / TEXT_FINDINGS).exists():
            compared = read_test_sets(spec, test_sets, folder / _SCRATCH, progress)
            files, findings = read_segments(corpus.path), TextFindings.of(corpus)
            if findings is None:  # an earlier version read the text
                sources = [file.source for file in files]
                findings = read_whole(sources, folder / _SCRATCH, spec.workers or num_cores(), progress).findings
            found = find_repetitions(files, compared, _search(spec, REPETITIONS, folder), progress)
            findings.model_copy(update={"repetitions": found.counts}).write(folder)
        remove_folder(folder / _SCRATCH)
        return folder, TextFindings.read(folder)


def _removal_identity(
    spec: CorpusSpec, test_sets: Sequence[Sequence[SourceFile]], listed: Listed | None, progress: Progress
) -> dict[str, Any]:
    """Return what decides which passages are removed; empty if none are, as in the fingerprints of earlier versions."""
    if not spec.removes_passages:
        return {}
    contents = [content_of(digests_of(files, progress)) for files in test_sets]
    pairs = {} if listed is None else {"listed": listed.sha256}
    return {"removal": _REMOVAL_VERSION, "remove": spec.remove, "test_sets": contents, **pairs, **spec.split_identity()}


def _search(spec: CorpusSpec, kinds: Sequence[Repetition], folder: Path, listed: Listed | None = None) -> Search:
    return Search(spec, kinds, folder / _SCRATCH, spec.workers or num_cores(), listed)


def _without_repetitions(
    spec: CorpusSpec,
    read: ReadText,
    compared: Sequence[FileSegments],
    listed: Listed | None,
    folder: Path,
    progress: Progress,
) -> ReadText:
    """Return the text without what ``spec.remove`` and ``spec.remove_listed`` remove from training."""
    found = find_repetitions(read.files, compared, _search(spec, spec.remove, folder, listed), progress)
    removed, before = found.counts[REMOVED], found.counts["train_passages"]
    share = f"removed {quantity(removed, 'passage')} of {before:,} from training ({removed / max(1, before):.1%})"
    if removed == before:
        remove_folder(folder / _SCRATCH)
        pairs = [] if listed is None else [f"those of corpus.remove_listed {listed.path}"]
        raise InputError(
            f"all {quantity(before, 'passage')} of the training split repeat others (removed are "
            f"{', '.join([*spec.remove, *pairs])}), so none is left. Change corpus.remove, "
            "corpus.remove_listed, corpus.test_sets or the text"
        )
    _log.log(logging.WARNING if removed > _MANY_REMOVED * before else logging.INFO, "%s", share)
    files = write_without(found, folder, spec.workers or num_cores(), progress)
    for part, source in enumerate(spec.named()):
        if not any(file.passages for file in files if file.source.part == part):
            remove_folder(folder / _SCRATCH)
            raise InputError(
                f"all passages of {redacted(source)!r} repeat other text, and corpus.remove is "
                f"{', '.join(spec.remove)}, so none is left. Leave it out of the mixture, or change corpus.remove"
            )
    for file in read.files:
        if _is_made(file.source, folder):
            file.source.path.unlink()  # what stays of it is stored in other files now
    remove_folder(folder / _SCRATCH)
    findings = read.findings.after_removal(files, found.counts, listed and listed.search())
    return read._replace(files=files, findings=findings)


def _is_made(source: SourceFile, folder: Path) -> bool:
    """Whether a file of passages is in the folder of the corpus, and not the user's or a download."""
    return source.path.parent == folder and is_framed(source)


def _require_text(spec: CorpusSpec, text: ReadText) -> None:
    """Raise InputError if a text of the corpus is empty, or is not what its name stands for. Log what may be wrong."""
    for part, text_source in enumerate(spec.texts()):
        source = text_source.source
        own = [(file, ids) for file, ids in zip(text.files, text.ids, strict=True) if file.source.part == part]
        with of_part(part, text_source):
            if not any(file.passages for file, _ in own):
                empty = sum(file.empty_passages for file, _ in own)
                raise InputError(
                    f"corpus.source {redacted(source)!r} holds no text (empty passages: {empty}). Set corpus.source to "
                    "files with text"
                )
            if (known := known_texts().get(source)) is not None:
                require_known_rows(source, known, own)
            require_documents(spec, [each for each in text.few_ids if each.file.part == part])
    passages, empty = text.findings.passages, text.findings.empty_passages
    if empty:
        _log.warning("empty passages, which are skipped: %d of %d", empty, passages + empty)
    for line in text.findings.odd_lines():
        _log.warning("%s", line)
