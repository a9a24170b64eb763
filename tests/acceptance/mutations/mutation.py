"""Mutations of the product: plausible faults, and the tests that must fail because of them.

The text files of this folder list them by topic. Each begins with its name and the file, and goes on in indented lines:
the claims that it breaks, the text that is replaced (``-``), the text that replaces it (``+``), and the tests.
"""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path


class Misplaced(Exception):
    """A mutation that does not fit the code any more: its anchor occurs not at all, or more than once."""


@dataclass(frozen=True)
class Mutation:
    """A fault that is planted by replacing a text that occurs exactly once in a file.

    Each claim names a page (``proven``, ``safety``, ``faults`` or ``resumes``) and, after a colon, the first words of a
    row of its tables, or, for ``proven``, words of the README's "What is proven". ``tests`` are pytest's node ids, the
    cheapest that show the fault; at least one of them must fail.
    """

    name: str
    claims: tuple[str, ...]
    file: str
    anchor: str
    replacement: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """Return the file's text with the fault. Raises Misplaced unless the anchor occurs exactly once."""
        if (found := text.count(self.anchor)) != 1:
            raise Misplaced(f"{self.name}: its anchor occurs {found} times in {self.file}: {self.anchor!r}")
        return text.replace(self.anchor, self.replacement)

    @property
    def digest(self) -> str:
        """What identifies the mutation in the record of outcomes, besides its name."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]

    @property
    def test_files(self) -> list[Path]:
        """The files of the named tests, relative to the repository, each once."""
        return list(dict.fromkeys(Path(test.partition("::")[0]) for test in self.tests))


def _read(block: str) -> Mutation:
    """Return the mutation that begins a text and that indented lines describe."""
    head, *lines = block.splitlines()
    name, _, file = head.partition(" in ")
    of_word = defaultdict[str, list[str]](list)
    for line in lines:
        word, _, text = line.removeprefix("    ").partition(" ")
        of_word[word].append(text)
    assert of_word.keys() <= {"claim", "-", "+", "test"}, block
    anchor, replacement = ("\n".join(of_word[sign]) for sign in "-+")
    return Mutation(name, tuple(of_word["claim"]), file, anchor, replacement, tuple(of_word["test"]))


MUTATIONS = tuple(
    _read(block)
    for topic in sorted(Path(__file__).parent.glob("*.txt"))
    for block in re.split(r"^(?=\S)", topic.read_text("utf-8"), flags=re.MULTILINE)
    if block and not block.startswith("#")
)
