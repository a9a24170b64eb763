"""Checks a run's text before anything expensive starts: that it is there, can be read, and is enough for the run.

Files on this machine are read up to a limit, which takes about a second. A text that ends before the limit is refused
if it cannot be enough, whatever the vocabulary. The token shards show exactly whether it is
(``t5train.data.samples.loader.require_enough_samples``). Whether a small text has enough pieces for the vocabulary is
found by training one, which takes up to three seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from t5train.data.checks.document_ids import IdsOfFile, require_documents
from t5train.data.checks.listed_pairs import open_listed
from t5train.data.checks.test_sets import of_test_set
from t5train.data.download.partial_file import whole_digest
from t5train.data.passages import SPLITS, FewIds, Row, SourceFile, Split, SplitRule, split_of
from t5train.data.readers import PLAIN_FORMATS, format_of, is_dump, rows
from t5train.data.samples.span_corruption import geometry
from t5train.data.sources import PYDOCS, SourceFacts, few, require_source
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.errors import InputError
from t5train.host_resources import format_bytes, quantity
from t5train.locations import redacted
from t5train.spec import CorpusSpec, RunSpec

LOOK_BYTES = 16 << 20
_FEW_PASSAGES, _FEW_FACTOR = 100, 8
"""A text that shows fewer passages within the limit is read so many times as far: it may have too few of them."""
_LOOK_TEST_SET_BYTES = 1 << 20
_DUMP_FACTOR = 64
"""Of dumps of Wikipedia, a smaller part is read, because their markup takes so much longer to read."""
_TRIED_BYTES, _TRIED_BYTES_PER_PIECE = 4 << 20, 200
"""A vocabulary is tried on a text up to this size and up to so many bytes per piece. Of Python's library, 100 kB give a
piece per 45 bytes, and 1.6 MB one per 150, so a larger text has enough pieces unless it repeats itself."""


class TextLook(NamedTuple):
    """What the first files of a text hold, up to ``LOOK_BYTES`` of text."""

    is_whole: bool
    """Whether that is the whole text."""
    passages: dict[Split, int]
    text_bytes: dict[Split, int]
    """The size of the passages' texts in UTF-8."""
    ids: list[IdsOfFile]

    @property
    def total_passages(self) -> int:
        """The number of passages in all splits."""
        return sum(self.passages.values())

    @property
    def total_bytes(self) -> int:
        """The size of all passages' texts in UTF-8."""
        return sum(self.text_bytes.values())


class TextFacts(NamedTuple):
    """What is known of a run's text before it starts. Both are None for Python's documentation."""

    source: SourceFacts | None
    look: TextLook | None
    """None also for text that is not on this machine yet."""

    @property
    def size_bytes(self) -> int:
        """The size of the files, as stored; 0 if unknown."""
        return self.source.size_bytes if self.source else 0

    def train_bytes(self, spec: CorpusSpec) -> int | None:
        """Return the size of the train split's text: exact if the whole text was read, otherwise from the files' sizes.

        None if it is unknown: ``why_unknown`` says why. Raises InputError for a damaged .parquet file.
        """
        if self.look is not None and self.look.is_whole:
            return self.look.text_bytes["train"]
        if self.source is None or self.why_unknown():
            return None
        from t5train.data.parquet import stored_text_bytes  # pyarrow is slow to import

        local = {file.name: file for file in self.source.local}
        sizes = [
            stored_text_bytes(local[name]) if name.endswith(".parquet") else size or 0
            for name, size in self.source.sizes.items()
        ]
        return sum(sizes) * spec.split[0] // 1000

    def why_unknown(self) -> str:
        """Return why the size of a text that was not read to its end is unknown; empty if it is known."""
        if self.source is None:
            return "Python's documentation becomes text when the run starts"
        of_formats = [format_of(name) for name in self.source.sizes if not name.endswith(PLAIN_FORMATS)]
        if not self.source.local and (".parquet" in of_formats or None in self.source.sizes.values()):
            return "the text is read after it has been downloaded"
        if any(each != ".parquet" for each in of_formats):
            return "the size of compressed text shows only when it has been read"
        return ""


NOT_READ = TextFacts(None, None)
"""Of a text that is not read any more, because its token shards exist."""


def require_text(spec: RunSpec) -> TextFacts:
    """Return what is known of the text.

    Raises InputError if there is none, if what is read of it is malformed, or if it cannot be enough for the run, and
    SpecError if a small one does not give as many pieces as ``tokenizer.vocab_size`` requests.
    """
    source = require_sources(spec)
    if source is None:
        return TextFacts(None, None)
    if not source.local:
        return TextFacts(source, None)
    try:
        look = look_at(source.local, spec.corpus)
    except InputError as error:
        raise InputError(f"{error}{_other_faults(source.local)}") from None
    if look.is_whole:
        require_documents(spec.corpus, look.ids)
        _require_passages(spec, look)
        _require_windows(spec, look)
        _require_pieces(spec, source.local, look.text_bytes["train"])
    return TextFacts(source, look)


def require_sources(spec: RunSpec) -> SourceFacts | None:
    """Return what is known of the text without reading it; None for Python's documentation.

    Raises InputError if the text or one of the test sets does not exist, or if corpus.remove_listed is of another text.
    """
    for each in spec.corpus.test_sets:
        with of_test_set():
            look_at(require_source(each, "", spec.storage.root).local, spec.corpus, _LOOK_TEST_SET_BYTES)
    listed = None if spec.corpus.remove_listed is None else open_listed(Path(spec.corpus.remove_listed))
    if spec.corpus.source == PYDOCS:
        return None
    facts = require_source(spec.corpus.source, spec.corpus.revision, spec.storage.root, spec.corpus.hub_text())
    if listed is not None:
        wholes = {each.name: whole_digest(each.path) for each in facts.local}  # of downloads, columns may be kept only
        listed.require_text(facts.sizes | {name: whole.size for name, whole in wholes.items() if whole is not None})
    return facts


def look_at(files: Iterable[SourceFile], rule: SplitRule, limit_bytes: int = LOOK_BYTES) -> TextLook:
    """Read files up to a limit. Raises InputError if what is read is malformed."""
    files = list(files)
    if any(is_dump(each.name) for each in files):
        limit_bytes //= _DUMP_FACTOR
    passages, text_bytes, ids = Counter[Split](), Counter[Split](), {file: FewIds() for file in files}
    for file, row in _rows(files):
        read_bytes, is_few = sum(text_bytes.values()), sum(passages.values()) < _FEW_PASSAGES
        if read_bytes >= limit_bytes * (_FEW_FACTOR if is_few else 1):
            return _look(passages, text_bytes, ids, is_whole=False)
        split = split_of(rule, row.passage.id)
        passages[split] += 1
        text_bytes[split] += len(row.passage.text.encode())
        ids[file].add(row)
    return _look(passages, text_bytes, ids, is_whole=True)


def _look(
    passages: Counter[Split], text_bytes: Counter[Split], ids: Mapping[SourceFile, FewIds], *, is_whole: bool
) -> TextLook:
    found = [IdsOfFile(file, each.found) for file, each in ids.items()]
    return TextLook(is_whole, _of_splits(passages), _of_splits(text_bytes), found)


def _other_faults(files: Sequence[SourceFile], limit_bytes: int = LOOK_BYTES) -> str:
    """Return a sentence with the files that are malformed, except the first; empty if there is only one.

    Reads each file up to its first fault, and no further than the limit in all.
    """
    malformed, read_bytes = list[str](), 0
    for file in files:
        if read_bytes >= limit_bytes:
            break
        try:
            for row in rows(file):
                read_bytes += len(row.passage.text)
                if read_bytes >= limit_bytes:
                    break
        except InputError:
            malformed.append(file.name)
    return f". Also malformed: {few(malformed[1:])}" if len(malformed) > 1 else ""


def _rows(files: Iterable[SourceFile]) -> Iterator[tuple[SourceFile, Row]]:
    """Yield the rows that have text, each with its file."""
    return ((file, row) for file in files for row in rows(file) if row.passage.text.strip())


def _of_splits(counts: Counter[Split]) -> dict[Split, int]:
    return {split: counts[split] for split in SPLITS}


def _require_passages(spec: RunSpec, look: TextLook) -> None:
    """Raise InputError if no passage falls into the train or validation split."""
    text = f"corpus.source {redacted(spec.corpus.source)!r} is {_amount(look)}"
    if not look.total_passages:
        raise InputError(f"{text}: it holds no text. Set corpus.source to files with text")
    for split, share in zip(SPLITS[:2], spec.corpus.split, strict=False):
        if not look.passages[split]:
            raise InputError(
                f"{text}, none of which falls into the {split} split (corpus.split gives it {share} of 1,000 passages, "
                f"and a passage is never divided). Split the text into more passages, at least some {3000 // share:,}: "
                "in a .txt file, each line is one"
            )


def _require_windows(spec: RunSpec, look: TextLook) -> None:
    """Raise InputError if the train split would be too small for a batch even if every byte of it were a token."""
    window, batch = geometry(spec.objective).window_tokens, spec.optimizer.global_batch_sequences
    most_tokens = look.text_bytes["train"] + 2 * look.passages["train"]  # a space before a passage, and its end
    if most_tokens // window < batch:
        raise InputError(
            f"corpus.source {redacted(spec.corpus.source)!r} is {_amount(look)}, but a step takes "
            f"{quantity(batch, 'sequence')} (optimizer.global_batch_sequences) of {window} tokens each. Add text, or "
            "lower optimizer.global_batch_sequences or objective.input_tokens"
        )


def _require_pieces(spec: RunSpec, files: Iterable[SourceFile], train_bytes: int) -> None:
    """Raise SpecError if the vocabulary cannot be trained on the train split of a small text."""
    vocabulary = spec.tokenizer
    if vocabulary.path is None and train_bytes <= min(_TRIED_BYTES, _TRIED_BYTES_PER_PIECE * vocabulary.vocab_size):
        passages = (row.passage for _, row in _rows(files))
        train(vocabulary, (each.text for each in passages if split_of(spec.corpus, each.id) == "train"))


def _amount(look: TextLook) -> str:
    size = look.total_bytes
    shown = format_bytes(size) if size >= 100_000 else quantity(size, "byte")
    return f"{quantity(look.total_passages, 'passage')} of {shown}"
