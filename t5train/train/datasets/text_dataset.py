"""Text, of which a model learns to fill in masked spans."""

from collections.abc import Mapping
from typing import Any

from t5train.data.passages import SPLITS
from t5train.data.samples.loader import Samples, num_windows, require_batch, windows_of_texts
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.unknown_pieces import counts_with_unknown, recorded_unknown
from t5train.engine.forward_backward import Passes
from t5train.records.locations import shareable_source
from t5train.records.metrics import UNIGRAM, Values
from t5train.records.stage_records import OF_TEXT, REMOVED, REPEATED, TokenShards
from t5train.spec import RunSpec
from t5train.spec.known_texts import languages_of, licence_of
from t5train.train import validation
from t5train.train.datasets.dataset import Measured

_UNITS = ("documents", "tokens")


class TextDataset:
    """Span-corrupted windows of token shards. Raises InputError if there are too few."""

    def __init__(self, shards: TokenShards, spec: RunSpec) -> None:
        self.shards, self._spec = shards, spec
        self.train, self.held_out = self._samples("train"), self._samples("validation")
        require_batch(spec, self.train.num_samples)

    def validate(self, passes: Passes) -> Measured:
        """See Dataset."""
        losses = validation.validate(passes, self.held_out, self.shards, self._spec)
        return Measured(
            {"validation_loss": losses.all_targets, "validation_content_loss": losses.content},
            {"validation_sequences": losses.sequences, "validation_content_tokens": losses.content_tokens},
        )

    def shuffled(self, passes: Passes) -> Values:
        """See Dataset."""
        losses = validation.validate(passes, self.held_out, self.shards, self._spec, shuffled=True)
        return {"shuffled_content_loss": losses.content}

    def test(self, passes: Passes) -> Values:
        """See Dataset."""
        if not num_windows(self.shards, "test", geometry(self._spec.objective).window_tokens):
            return {}
        losses = validation.validate(passes, self._samples("test"), self.shards, self._spec)
        return {
            "test_loss": losses.all_targets,
            "test_content_loss": losses.content,
            "test_sequences": losses.sequences,
        }

    def baseline(self) -> Mapping[str, float]:
        """See Dataset."""
        return {UNIGRAM: validation.unigram_loss(self.held_out, self.shards, self._spec)}

    def described(self) -> dict[str, Any]:
        """See Dataset."""
        corpus, settings = self._spec.corpus, self._spec.identity()
        settings["corpus"]["source"] = shareable_source(corpus.source)
        for name in settings["corpus"].keys() & {"mixed_with", "test_sets"}:
            settings["corpus"][name] = list(map(shareable_source, settings["corpus"][name]))
        sources = [each.source for each in corpus.texts()]
        return {
            "settings": settings,
            "data": self._counts(),
            "license": licence_of(sources, corpus.license),
            "languages": languages_of(sources, corpus.languages),
        }

    def _counts(self) -> dict[str, int]:
        counts = {f"{split}_{unit}": int(self.shards.counts[f"{split}_{unit}"]) for split in SPLITS for unit in _UNITS}
        repeated = {name: int(count) for name, count in self.shards.counts.items() if name in {REPEATED, REMOVED}}
        of_texts = windows_of_texts(self.shards, "train", geometry(self._spec.objective).window_tokens)
        mixed = {f"{OF_TEXT}{text}": samples for text, samples in enumerate(of_texts) if len(of_texts) > 1}
        unknown = recorded_unknown(counts_with_unknown(self.shards))
        return {**counts, **repeated, **unknown, "train_samples": sum(of_texts), **mixed}

    def _samples(self, split: str) -> Samples:
        return Samples(self.shards, split, self._spec.objective, self._spec.optimizer.seed)
