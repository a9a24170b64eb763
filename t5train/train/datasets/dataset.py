"""What the training loop needs of a data set, whether it is of text or of pairs."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.samples.loader import Samples
from t5train.engine.forward_backward import Passes
from t5train.records.metrics import Values
from t5train.spec.rank_job import Shards


class Measured(NamedTuple):
    """Results of the model on held-out samples, by the name of the metric, and on how many of what they were."""

    values: Values
    counts: Values


class Dataset(Protocol):
    """Samples to train on, and measurements on those that were held out.

    Measurements divide the samples among ranks. Every rank makes the same number of passes over the same number of
    samples, even if none of its samples count: at ZeRO 3, with experts on several ranks and in a pipeline, a forward
    pass is a collective.
    """

    @property
    def shards(self) -> Shards:
        """The shards that have the samples."""

    @property
    def train(self) -> Samples | PairSamples:
        """The train split."""

    @property
    def held_out(self) -> Samples | PairSamples:
        """The validation split."""

    def validate(self, passes: Passes) -> Measured:
        """Measure the model on the validation split; one of the values is ``validation_loss``."""

    def shuffled(self, passes: Passes) -> Values:
        """Return the loss on the same targets with the encoder input of another sample.

        It is higher than that of the validation if the model uses its input.
        """

    def test(self, passes: Passes) -> Values:
        """Return values and counts of the test split, measured as those of validation; empty if it has no sample."""

    def baseline(self) -> Mapping[str, float]:
        """Return the loss that the model has to beat: that of a model that knows only how frequent tokens are."""

    def described(self) -> dict[str, Any]:
        """Return the fields of TrainedModel that describe the data, without credentials and local folders."""
