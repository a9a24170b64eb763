"""Checks a run's pairs before anything expensive starts: that their files exist, and have the columns."""

from infra.head.preflight.text_checks import TextFacts, require_text
from t5train.data.sources import require_source
from t5train.spec import RunSpec
from t5train.spec.data_spec import HubText
from t5train.spec.pairs_spec import GENERATED


def require_data(spec: RunSpec) -> TextFacts:
    """Return what ``require_pairs`` or ``require_text`` returns of the data of a run. Raises their errors."""
    return require_pairs(spec) if spec.is_fine_tuning else require_text(spec)


def require_pairs(spec: RunSpec) -> TextFacts:
    """Return what is known of the files of pairs.

    Raises InputError if there are none, or if the first rows of those on this machine lack a column.
    """
    pairs, root = spec.pairs, spec.storage.root
    named = [*pairs.tasks(), *pairs.held_out("validation"), *pairs.held_out("test")]
    found = [
        require_source(each.location, each.revision, root, HubText(each.config, each.split, each.source))
        for each in named
        if each.location not in GENERATED
    ]
    return TextFacts(tuple(found), None)
