"""Opens the data set of a run: of text, or of pairs."""

from pathlib import Path

from t5train.records.stage_records import PairShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import load_shards
from t5train.train.datasets.dataset import Dataset
from t5train.train.datasets.pair_dataset import PairDataset
from t5train.train.datasets.text_dataset import TextDataset


def open_dataset(spec: RunSpec, shards_folder: Path) -> Dataset:
    """Open the shards of a run. Raises InputError if they have too few samples for its settings."""
    shards = load_shards(spec, shards_folder)
    return PairDataset(shards, spec) if isinstance(shards, PairShards) else TextDataset(shards, spec)
