"""Opens the data set of a job: of text, or of pairs."""

from t5train.records.stage_records import PairShards
from t5train.spec.rank_job import TrainJob
from t5train.train.datasets.dataset import Dataset
from t5train.train.datasets.pair_dataset import PairDataset
from t5train.train.datasets.text_dataset import TextDataset


def open_dataset(job: TrainJob) -> Dataset:
    """Open the shards of a job. Raises InputError if they have too few samples for its settings."""
    shards = job.shards()
    return PairDataset(shards, job.spec) if isinstance(shards, PairShards) else TextDataset(shards, job.spec)
