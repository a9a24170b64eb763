"""Checks a run's text before anything expensive starts: that it is there, can be read, and is enough for the run.

Files on this machine are read up to a limit, which takes about a second. A text that ends before the limit is refused
if it cannot be enough, whatever the vocabulary. The token shards show exactly whether it is
(``t5train.data.samples.loader.require_enough_samples``). Whether a small text has enough pieces for the vocabulary is
found by training one, which takes up to three seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import NamedTuple

from t5train.data.checks.listed_pairs import open_listed
from t5train.data.checks.whole_reading import of_test_set
from t5train.data.corpus import of_part, require_different
from t5train.data.download.kept_downloads import whole_digest
from t5train.data.download.source_listing import LeftOut, few
from t5train.data.passages import (
    SPLITS,
    FewIds,
    IdsOfFile,
    Row,
    SourceFile,
    Split,
    SplitRule,
    require_documents,
    split_of,
)
from t5train.data.readers import PLAIN_FORMATS, format_of, is_dump, rows
from t5train.data.samples.span_corruption import geometry
from t5train.data.sources import PYDOCS, SourceFacts, require_source
from t5train.data.vocabulary.sentencepiece_model import num_pieces, train
from t5train.data.vocabulary.tokenizer import given_proto
from t5train.errors import InputError, SpecError
from t5train.quantities import format_bytes, quantity
from t5train.records.locations import redacted
from t5train.spec import CorpusSpec, RunSpec, TokenizerSpec

LOOK_BYTES = 16 << 20
_FEW_PASSAGES, _FEW_FACTOR = 100, 8
"""A text that shows fewer passages within the limit is read so many times as far: it may have too few of them."""
_LOOK_TEST_SET_BYTES = 1 << 20
_DUMP_FACTOR = 64
"""Of dumps of Wikipedia, a smaller part is read, because their markup takes so much longer to read."""
_TRIED_BYTES, _TRIED_BYTES_PER_PIECE = 4 << 20, 200
"""A vocabulary is tried on a text up to this size and up to so many bytes per piece. Of Python's library, 100 kB give a
piece per 45 bytes, and 1.6 MB one per 150, so a larger text has enough pieces unless it repeats itself."""
_SAMPLE_BYTES, _LEAST_PIECES = 400_000, 300


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
    """What is known of a run's text before it starts."""

    sources: tuple[SourceFacts, ...]
    """Of each of the texts that the corpus is made of, without Python's documentation."""
    look: TextLook | None
    """None for Python's documentation, and for text that is not on this machine yet."""
    is_partly_made: bool = False
    """Whether Python's documentation is one of the texts."""

    @property
    def size_bytes(self) -> int:
        """The size of the files, as stored; 0 if unknown."""
        return sum(each.size_bytes for each in self.sources)

    @property
    def num_files(self) -> int:
        """The number of files."""
        return sum(len(each.sizes) for each in self.sources)

    @property
    def skipped(self) -> list[str]:
        """Files of other formats in the folders of the texts."""
        return [name for each in self.sources for name in each.skipped]

    @property
    def left_out(self) -> LeftOut:
        """Hidden files and links in the folders of the texts."""
        kinds = zip(*(each.left_out for each in self.sources), strict=True)
        return LeftOut(*([name for of_source in kind for name in of_source] for kind in kinds))

    def train_bytes(self, spec: CorpusSpec) -> int | None:
        """Return the size of the train split's text: exact if the whole text was read, otherwise from the files' sizes.

        None if it is unknown: ``why_unknown`` says why. Raises InputError for a damaged .parquet file.
        """
        if self.look is not None and self.look.is_whole:
            return self.look.text_bytes["train"]
        if self.why_unknown():
            return None
        return sum(map(_stored_text_bytes, self.sources)) * spec.split[0] // 1000

    def bytes_of_texts(self) -> list[int] | None:
        """Return about how much text each of the texts has, from the files' sizes; None if that is unknown."""
        return None if self.why_unknown() else [*map(_stored_text_bytes, self.sources)]

    def why_unknown(self) -> str:
        """Return why the size of a text that was not read to its end is unknown; empty if it is known."""
        if self.is_partly_made or not self.sources:
            return "Python's documentation becomes text when the run starts"
        return next(filter(None, map(_why_unknown, self.sources)), "")


def _stored_text_bytes(source: SourceFacts) -> int:
    from t5train.data.formats.parquet import stored_text_bytes  # pyarrow is slow to import

    local = {file.name: file for file in source.local}
    sizes = [
        stored_text_bytes(local[name]) if name.endswith(".parquet") else size or 0
        for name, size in source.sizes.items()
    ]
    return sum(sizes)


def _why_unknown(source: SourceFacts) -> str:
    of_formats = [format_of(name) for name in source.sizes if not name.endswith(PLAIN_FORMATS)]
    if not source.local and (".parquet" in of_formats or None in source.sizes.values()):
        return "the text is read after it has been downloaded"
    if any(each != ".parquet" for each in of_formats):
        return "the size of compressed text shows only when it has been read"
    return ""


NOT_READ = TextFacts((), None)
"""Of a text that is not read any more, because its token shards exist."""


def require_text(spec: RunSpec) -> TextFacts:
    """Return what is known of the text.

    Raises InputError if there is none, if what is read of it is malformed, or if it cannot be enough for the run, and
    SpecError if a small one does not give as many pieces as ``tokenizer.vocab_size`` requests.
    """
    found = require_sources(spec)
    facts = TextFacts(tuple(filter(None, found)), None, is_partly_made=None in found)
    looks = [_looked_at(spec, part, source.local) for part, source in enumerate(found) if source and source.local]
    if not looks or len(looks) < len(found):
        return facts
    look = _joined(looks)
    if look.is_whole:
        _require_passages(spec, look)
        _require_windows(spec, look)
        local = [file for source in facts.sources for file in source.local]
        _require_pieces(spec, local, look.text_bytes["train"])
    return facts._replace(look=look)


def require_sources(spec: RunSpec) -> list[SourceFacts | None]:
    """Return what is known of the texts of the corpus without reading them; None for Python's documentation.

    Raises InputError if one of them, or of the test sets, does not exist, or if corpus.remove_listed is of another
    text.
    """
    for each in spec.corpus.test_sets:
        with of_test_set():
            look_at(require_source(each, "", spec.storage.root).local, spec.corpus, _LOOK_TEST_SET_BYTES)
    listed = None if spec.corpus.remove_listed is None else open_listed(Path(spec.corpus.remove_listed))
    found = list[SourceFacts | None]()
    for part, text in enumerate(spec.corpus.texts()):
        with of_part(part, text):
            is_made = text.source == PYDOCS
            root = spec.storage.root
            found.append(None if is_made else require_source(text.source, text.revision, root, text.hub_text))
    if spec.corpus.mixed_with:
        local = [each._replace(part=part) for part, facts in enumerate(found) if facts for each in facts.local]
        require_different(spec.corpus, local)
    if listed is not None and (facts := found[0]) is not None:
        wholes = {each.name: whole_digest(each.path) for each in facts.local}  # of downloads, columns may be kept only
        listed.require_text(facts.sizes | {name: whole.size for name, whole in wholes.items() if whole is not None})
    return found


def _looked_at(spec: RunSpec, part: int, files: Sequence[SourceFile]) -> TextLook:
    """Look at one of the texts of the corpus. Raises InputError if it is malformed, or has nothing to train on."""
    try:
        with of_part(part, spec.corpus.texts()[part]):
            look = look_at(files, spec.corpus)
            if look.is_whole:
                require_documents(spec.corpus, look.ids)
    except InputError as error:
        raise InputError(f"{error}{_other_faults(files)}") from None
    if spec.corpus.mixed_with and look.is_whole:
        _require_sample(spec, part, look)
    return look


def _require_sample(spec: RunSpec, part: int, look: TextLook) -> None:
    """Raise InputError if one of the texts of a mixture cannot have a sample for training."""
    window = geometry(spec.objective).window_tokens
    if _most_tokens(look) < window:
        named = f"{'corpus.mixed_with' if part else 'corpus.source'} {redacted(spec.corpus.named()[part])!r}"
        raise InputError(
            f"{named} is {_amount(look)}, of which {quantity(look.passages['train'], 'passage')} of "
            f"{quantity(look.text_bytes['train'], 'byte')} are for training, but a sample needs {window} tokens. "
            "Add text to it, leave it out of the mixture, or lower objective.input_tokens"
        )


def _joined(looks: Sequence[TextLook]) -> TextLook:
    passages, text_bytes = Counter[Split](), Counter[Split]()
    for each in looks:
        passages.update(each.passages)
        text_bytes.update(each.text_bytes)
    ids = [of_file for each in looks for of_file in each.ids]
    return TextLook(all(each.is_whole for each in looks), _of_splits(passages), _of_splits(text_bytes), ids)


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


def _other_faults(files: Sequence[SourceFile]) -> str:
    """Return a sentence with the files that are malformed, except the first; empty if there is only one.

    Reads each file up to its first fault, and no further than ``LOOK_BYTES`` in all.
    """
    malformed, read_bytes = list[str](), 0
    for file in files:
        if read_bytes >= LOOK_BYTES:
            break
        try:
            for row in rows(file):
                read_bytes += len(row.passage.text)
                if read_bytes >= LOOK_BYTES:
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
    text = f"{_named(spec)} is {_amount(look)}"
    if not look.total_passages:
        raise InputError(f"{text}: it holds no text. Set corpus.source to files with text")
    for split, share in zip(SPLITS[:2], spec.corpus.split, strict=False):
        if not look.passages[split]:
            raise InputError(
                f"{text}, none of which falls into the {split} split (corpus.split gives it {share} of 1,000 passages, "
                f"and a passage is never divided). Split the text into more passages, at least some {3000 // share:,}: "
                "in a .txt file, each line is one"
            )


def _most_tokens(look: TextLook) -> int:
    """Return how many tokens the train split would have if each of its bytes were one."""
    return look.text_bytes["train"] + 2 * look.passages["train"]  # a space before a passage, and its end


def _require_windows(spec: RunSpec, look: TextLook) -> None:
    """Raise InputError if the train split would be too small for a batch even if every byte of it were a token."""
    window, batch = geometry(spec.objective).window_tokens, spec.optimizer.global_batch_sequences
    if _most_tokens(look) // window < batch:
        raise InputError(
            f"{_named(spec)} is {_amount(look)}, but a step takes "
            f"{quantity(batch, 'sequence')} (optimizer.global_batch_sequences) of {window} tokens each. Add text, or "
            "lower optimizer.global_batch_sequences or objective.input_tokens"
        )


def _require_pieces(spec: RunSpec, files: Iterable[SourceFile], train_bytes: int) -> None:
    """Raise SpecError if the vocabulary cannot be trained on the train split of a small text."""
    vocabulary = spec.tokenizer
    if vocabulary.path is None and train_bytes <= min(_TRIED_BYTES, _TRIED_BYTES_PER_PIECE * vocabulary.vocab_size):
        passages = (row.passage for _, row in _rows(files))
        train(vocabulary, (each.text for each in passages if split_of(spec.corpus, each.id) == "train"))


def bytes_per_token(vocabulary: TokenizerSpec, files: Iterable[SourceFile]) -> float | None:
    """Return about how many bytes of text are a token; None for text that is not here or has too little to tell.

    That of a vocabulary to train is measured with a smaller one, because training takes long: it is trained on every
    other passage of the first 400 kB, and encodes the rest. Measured on English text, doubling a vocabulary adds
    0.45 bytes, up to 5.
    """
    texts, size_bytes = list[str](), 0
    for _, row in _rows(files):
        texts.append(row.passage.text.strip())
        size_bytes += len(texts[-1].encode())
        if size_bytes >= _SAMPLE_BYTES:
            break
    trained, measured = texts[::2], texts[1::2]
    if not measured:
        return None
    if vocabulary.path is not None:
        return _size_of_pieces(given_proto(Path(vocabulary.path)), texts)
    smaller = min(vocabulary.vocab_size, max(_LEAST_PIECES, size_bytes // 2 // _TRIED_BYTES_PER_PIECE))
    try:
        model = train(vocabulary.model_copy(update={"vocab_size": smaller}), iter(trained))
    except SpecError:
        return None
    return _size_of_pieces(model, measured) * _usual_size(vocabulary.vocab_size) / _usual_size(smaller)


def _size_of_pieces(model: bytes, texts: Sequence[str]) -> float:
    """Return how many bytes of text are a token, with one for the end of each passage."""
    return sum(len(text.encode()) for text in texts) / (num_pieces(model, texts) + len(texts))


def _usual_size(vocab_size: int) -> float:
    return min(5.0, 2.25 + 0.45 * log2(vocab_size / 500))


def _named(spec: RunSpec) -> str:
    source = f"corpus.source {redacted(spec.corpus.source)!r}"
    more = len(spec.corpus.mixed_with)
    return f"{source} with {quantity(more, 'text')} of corpus.mixed_with" if more else source


def _amount(look: TextLook) -> str:
    size = look.total_bytes
    shown = format_bytes(size) if size >= 100_000 else quantity(size, "byte")
    return f"{quantity(look.total_passages, 'passage')} of {shown}"
