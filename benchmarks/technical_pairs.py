"""Make pairs of English and another language from message catalogues and the descriptions of Debian's packages.

::

    python -m benchmarks.technical_pairs PACKAGES --language de --out DIR
        [--descriptions TRANSLATION_EN TRANSLATION_DE] [--test gnucash,inkscape,findutils,sed,tar]
        [--validation evolution,gedit,wget,coreutils]

PACKAGES has a folder for each package, unpacked with ``dpkg-deb -x``; the two files of descriptions are those that apt
keeps with ``Acquire::Languages``. A name such as gnucash holds out that package and those like gnucash-common: all
their catalogues and descriptions. DIR gets train.jsonl, validation.jsonl and test.jsonl, with the columns en, de and
origin.

Kept are pairs of 2 to 60 English words whose sides differ; white space is one space, and markers of keys to press are
removed if both sides have one. Each source is there once, with its first translation: catalogues come first, in
alphabetical order of packages, and then descriptions. One that training has is in neither of the others, and one that
validation has is not in test.
"""

import argparse
import gettext
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from t5train.files.atomic import replacing

SPLITS = ("train", "validation", "test")
_FEWEST_WORDS, _MOST_WORDS, _MOST_CHARACTERS = 2, 60, 600
_KEY = re.compile(r"[_~&](?=\w)")
_CONTEXT = "\x04"
"""Ends the context of a message, which stands before it."""


class Pair(NamedTuple):
    """A text and its translation, and the package that has them."""

    source: str
    target: str
    package: str


def catalogue_pairs(packages: Path, language: str) -> Iterator[Pair]:
    """Yield the messages of all catalogues that can be read, singular ones only."""
    for path in sorted(packages.glob(f"*/**/{language}/LC_MESSAGES/*.mo")):
        with open(path, "rb") as file:
            try:
                messages = gettext.GNUTranslations(file)._catalog  # gettext cannot list messages otherwise
            except (OSError, ValueError, LookupError, struct.error) as error:
                print(f"{path} is left out: {error}", file=sys.stderr)
                continue
        package = path.relative_to(packages).parts[0]
        for message, translation in messages.items():
            if isinstance(message, str) and message:  # not the header, nor a tuple of a message with its plural
                yield Pair(message.rpartition(_CONTEXT)[2], translation, package)


def description_pairs(english: Path, translated: Path) -> Iterator[Pair]:
    """Yield the paragraphs of the descriptions that have as many in both files."""
    originals = {digest: paragraphs for _, digest, paragraphs in _descriptions(english)}
    for package, digest, paragraphs in _descriptions(translated):
        original = originals.get(digest, [])
        if len(original) == len(paragraphs):
            yield from (Pair(*both, package) for both in zip(original, paragraphs, strict=True))


def _descriptions(file: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield package, digest and paragraphs of each description."""
    for stanza in file.read_text("utf-8").split("\n\n"):
        fields = dict(re.findall(r"^(\S+): ((?:.*\n?)(?: .*\n?)*)", stanza, re.MULTILINE))
        text = next((value for name, value in fields.items() if re.fullmatch("Description-[a-z]{2}", name)), None)
        if text is not None:
            first, _, rest = text.partition("\n")
            yield fields["Package"].strip(), fields["Description-md5"].strip(), [first, *re.split(r"\n? \.\n", rest)]


def cleaned(pair: Pair) -> Pair | None:
    """Return a pair as it is kept, or None if it is not."""
    source, target = (" ".join(text.split()) for text in pair[:2])
    if len(_KEY.findall(source)) == len(_KEY.findall(target)) == 1:
        source, target = _KEY.sub("", source), _KEY.sub("", target)
    is_long_enough = _FEWEST_WORDS <= len(source.split()) <= _MOST_WORDS
    is_short_enough = max(len(source), len(target)) <= _MOST_CHARACTERS
    is_kept = target and source != target and is_long_enough and is_short_enough and "<trans>" not in target
    return Pair(source, target, pair.package) if is_kept else None


def is_of(package: str, names: set[str]) -> bool:
    """Whether a package has one of the names, or a part of its name between hyphens is one."""
    return not names.isdisjoint([package, *package.split("-")])


def split_pairs(pairs: Iterator[Pair], held_out: dict[str, set[str]]) -> dict[str, dict[str, Pair]]:
    """Return the pairs of each split by their sources. ``held_out`` has the names of packages of validation and test.

    What test holds out is in no other split, even if validation would have it, too.
    """
    found: dict[str, dict[str, Pair]] = {split: {} for split in SPLITS}
    for pair in filter(None, map(cleaned, pairs)):
        split = next((name for name in ("test", "validation") if is_of(pair.package, held_out[name])), "train")
        found[split].setdefault(pair.source, pair)
    seen = set(found["train"])
    for split in SPLITS[1:]:
        found[split] = {source: pair for source, pair in found[split].items() if source not in seen}
        seen |= set(found[split])
    return found


def main() -> int:
    """Write the pairs, and print how many there are."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("packages", type=Path, help="folder with a folder of each unpacked package")
    made.add_argument("--language", default="de", help="code of the other language; de by default")
    made.add_argument("--descriptions", type=Path, nargs=2, metavar="FILE", help="those in English, and translated")
    made.add_argument("--test", default="gnucash,inkscape,findutils,sed,tar", help="names of packages to test on")
    made.add_argument("--validation", default="evolution,gedit,wget,coreutils", help="names of those to validate on")
    made.add_argument("--out", type=Path, required=True, help="folder for the files")
    given = made.parse_args()

    def pairs() -> Iterator[Pair]:
        yield from catalogue_pairs(given.packages, given.language)
        if given.descriptions:
            yield from description_pairs(*given.descriptions)

    given.out.mkdir(parents=True, exist_ok=True)
    held_out = {split: set(getattr(given, split).split(",")) for split in SPLITS[1:]}
    for split, found in split_pairs(pairs(), held_out).items():
        with replacing(given.out / f"{split}.jsonl") as file:
            for pair in found.values():
                row = {"en": pair.source, given.language: pair.target, "origin": pair.package}
                file.write(orjson.dumps(row) + b"\n")
        largest = Counter(pair.package for pair in found.values()).most_common(8)
        print(f"{split}: {len(found):,} pairs, most of {', '.join(f'{name} ({count:,})' for name, count in largest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
