"""How similar two texts are, exactly: this decides whether they are near-duplicates, whatever proposed them.

Words are those of ``t5train.data.checks.word_grams``. The similarity of two texts is the
Jaccard index of their sets of 5-grams: the number of different runs of five consecutive words that both have, divided
by the number that at least one has. A text of one to four words has one run, all its words. A text without words has
none, and is similar to nothing.

The default threshold is 0.8. In a passage of 100 words, a changed word that is not near an end changes five of 96 runs:
with one changed word the similarity is 91/101 = 0.90, with two 86/106 = 0.81, and with three 81/111 = 0.73. So 0.8
admits two changed words in a passage of wiki_dpr, or a shift by ten words (86/106), but no text that merely has the
same subject.
"""

from itertools import islice

from t5train.data.checks.word_grams import words_of

GRAM_WORDS = 5
NEAR_DUPLICATE = 0.8


def word_grams(text: str) -> frozenset[tuple[str, ...]]:
    """Return the different runs of five consecutive words of a text."""
    words = words_of(text)
    if len(words) < GRAM_WORDS:
        return frozenset([tuple(words)]) if words else frozenset()
    return frozenset(zip(*(islice(words, start, None) for start in range(GRAM_WORDS)), strict=False))


def similarity(grams: frozenset[tuple[str, ...]], others: frozenset[tuple[str, ...]]) -> float:
    """Return the Jaccard index of two sets of runs: from 0 to 1."""
    shared = len(grams & others)
    return shared / (len(grams) + len(others) - shared) if shared else 0.0


def text_similarity(text: str, other: str) -> float:
    """Return the similarity of two texts: from 0 to 1."""
    return similarity(word_grams(text), word_grams(other))
