"""Checks a run's pairs before anything expensive starts: their files exist, and their first rows are pairs."""

from itertools import islice

from infra.head.preflight.text_checks import TextFacts, require_text
from t5train.data.pairs.pair_reading import pair_rows
from t5train.data.pairs.pair_sources import require_pair_source
from t5train.data.passages import SPLITS
from t5train.data.readers import OpenFile
from t5train.data.sources import SourceFacts
from t5train.spec import RunSpec
from t5train.spec.pairs_spec import PairSource

_FIRST_ROWS = 100


def require_data(spec: RunSpec) -> TextFacts:
    """Return what ``require_pairs`` or ``require_text`` returns of the data of a run. Raises their errors."""
    return require_pairs(spec) if spec.is_fine_tuning else require_text(spec)


def require_pairs(spec: RunSpec) -> TextFacts:
    """Return what is known of the files of pairs.

    Raises InputError if there are none, or if the first rows of one on this machine are malformed or lack a column.
    """
    pairs, root, facts = spec.pairs, spec.storage.root, list[SourceFacts]()
    for split, named in zip(SPLITS, (pairs.tasks(), pairs.held_out("validation"), pairs.held_out("test")), strict=True):
        for source in named:
            if (found := require_pair_source(f"pairs.{split}", source, root)) is not None:
                _look_at(found, source)
                facts.append(found)
    return TextFacts(tuple(facts), None)


def _look_at(found: SourceFacts, columns: PairSource) -> None:
    for file in found.local:
        with OpenFile() as opened:
            for _ in islice(pair_rows(file, columns, opened), _FIRST_ROWS):
                pass
