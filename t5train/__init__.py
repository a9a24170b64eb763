"""The library: from text or pairs to shards of tokens, and from a checkpoint to a published, certified model.

The names below are the public API. They are imported on first use, because nodes import this package with only the
standard library, and the head imports it without torch. Not here: launching training (infra.head.training_run), and
anything that needs Prefect (tasks, flows).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from t5train.checkpoint.consolidate.consolidation import consolidate
    from t5train.checkpoint.resume import load_run_spec
    from t5train.data.corpus import build_corpus
    from t5train.data.pairs.pair_shards import build_pair_shards
    from t5train.data.pairs.pairs import build_pairs
    from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
    from t5train.data.shards import build_shards
    from t5train.data.vocabulary.tokenizer import build_tokenizer
    from t5train.errors import T5TrainError
    from t5train.inference.evaluation.export_evaluation import evaluate_export
    from t5train.inference.text.evaluation import evaluate
    from t5train.inference.text.generation import generate
    from t5train.release.certification import certify_in_fresh_process as certify
    from t5train.release.export import export
    from t5train.release.fetching import fetch
    from t5train.release.publication import publish
    from t5train.release.verification import verify
    from t5train.spec.recipes import recipe
else:

    def __getattr__(name: str) -> object:
        """Import a name of the public API. Hidden from mypy, which would otherwise accept any attribute."""
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _SOURCES[name].partition(":")
        return getattr(import_module(module), attribute)


_SOURCES = {
    "T5TrainError": "t5train.errors:T5TrainError",
    "build_corpus": "t5train.data.corpus:build_corpus",
    "build_pair_shards": "t5train.data.pairs.pair_shards:build_pair_shards",
    "build_pairs": "t5train.data.pairs.pairs:build_pairs",
    "build_pairs_tokenizer": "t5train.data.pairs.pairs_tokenizer:build_pairs_tokenizer",
    "build_shards": "t5train.data.shards:build_shards",
    "build_tokenizer": "t5train.data.vocabulary.tokenizer:build_tokenizer",
    "certify": "t5train.release.certification:certify_in_fresh_process",
    "consolidate": "t5train.checkpoint.consolidate.consolidation:consolidate",
    "evaluate": "t5train.inference.text.evaluation:evaluate",
    "evaluate_export": "t5train.inference.evaluation.export_evaluation:evaluate_export",
    "export": "t5train.release.export:export",
    "fetch": "t5train.release.fetching:fetch",
    "generate": "t5train.inference.text.generation:generate",
    "load_run_spec": "t5train.checkpoint.resume:load_run_spec",
    "publish": "t5train.release.publication:publish",
    "recipe": "t5train.spec.recipes:recipe",
    "verify": "t5train.release.verification:verify",
}
__all__ = [
    "T5TrainError",
    "build_corpus",
    "build_pair_shards",
    "build_pairs",
    "build_pairs_tokenizer",
    "build_shards",
    "build_tokenizer",
    "certify",
    "consolidate",
    "evaluate",
    "evaluate_export",
    "export",
    "fetch",
    "generate",
    "load_run_spec",
    "publish",
    "recipe",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
