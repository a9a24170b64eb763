"""The job of a rank: one JSON file, the same for all ranks of an attempt."""

from pathlib import Path
from typing import NamedTuple

from pydantic import Base64Bytes, BaseModel, ConfigDict

from t5train.errors import SpecError
from t5train.files.run_folder import CHECKPOINTS, METRICS, METRICS_CSV, PROFILES, TENSORBOARD, WITNESS_FOLDER
from t5train.records.best_so_far import BestSoFar
from t5train.records.stage_records import PairShards, TokenShards
from t5train.spec import RunSpec

Shards = TokenShards | PairShards
"""What a run trains on."""


def load_shards(spec: RunSpec, folder: Path) -> Shards:
    """Load the manifest of a run's shards. The stage that made or reused them has verified their digests."""
    kind: type[Shards] = PairShards if spec.is_fine_tuning else TokenShards
    return kind.load(folder)


class TrainingProgress(BaseModel):
    """State of training besides weights and moments. ``loss_scaler`` has the fp16 loss scaler's attributes by name.

    ``best`` is None in runs whose result is the last checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int = 0
    skipped_steps: int = 0
    loss_scaler: dict[str, int | float] = {}
    best: BestSoFar | None = None

    @property
    def optimizer_steps(self) -> int:
        """Steps that changed the weights; the loss scaler skips the others."""
        return self.step - self.skipped_steps

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer has moments to save; before its first step it has none."""
        return self.optimizer_steps > 0


class Consolidated(BaseModel):
    """A consolidated checkpoint of the run, from which any layout can resume. ``folder`` holds weights and moments."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    folder: Path
    fingerprint: str
    clock: TrainingProgress


class StartingModel(NamedTuple):
    """The folder of a model to start from, and the fingerprint of its weights."""

    folder: Path
    fingerprint: str


class TrainJob(BaseModel):
    """One attempt at a run: what to train, on which data, where, and what to start from.

    The attempt resumes from the checkpoint ``resume_tag``, or from ``consolidated``, a checkpoint of another layout.
    With neither, training begins at step 0: from the weights in ``spec.model.start_from`` if ``start_fingerprint`` is
    set, otherwise from newly initialised weights. ``start_fingerprint`` is the fingerprint of these weights, and
    ``start_name`` is the user's name of their folder. ``unique_id`` is the id of the run, which tells it from others
    with the same fingerprint. With ``node_local``, folders are on each node's own disk, and hold only what its ranks
    wrote or what was staged there. With ``decays_all``, weight decay also shrinks norms and position biases, as in the
    version that began the run. ``vocabulary`` is the content of ``spiece.model`` if validations predict text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    spec: RunSpec
    run_fingerprint: str
    run_folder: Path
    shards_folder: Path
    node_local: bool = False
    resume_tag: str | None
    consolidated: Consolidated | None = None
    start_fingerprint: str | None = None
    start_name: str | None = None
    unique_id: str | None = None
    decays_all: bool = False
    vocabulary: Base64Bytes | None = None

    @classmethod
    def read(cls, path: Path) -> "TrainJob":
        """Read the job from a JSON file. Raises SpecError if it is not one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SpecError(f"{path} is not the job of a training attempt: {error}") from error

    def shards(self) -> Shards:
        """See ``load_shards``."""
        return load_shards(self.spec, self.shards_folder)

    @property
    def begins_from(self) -> StartingModel | None:
        """The model of ``spec.model.start_from`` if the attempt needs its weights, otherwise None.

        Adapters need them always, other runs only to begin.
        """
        folder, fingerprint = self.spec.model.start_from, self.start_fingerprint
        has_own = (self.resume_tag or self.consolidated) and self.spec.finetune.lora.rank is None
        if folder is None or fingerprint is None or has_own:
            return None
        return StartingModel(Path(folder), fingerprint)

    @property
    def checkpoints_folder(self) -> Path:
        """The folder with all tags."""
        return self.run_folder / CHECKPOINTS

    @property
    def witness_folder(self) -> Path:
        """The folder of the witness."""
        return self.run_folder / WITNESS_FOLDER

    @property
    def metrics_path(self) -> Path:
        """The file with one JSON line per step."""
        return self.run_folder / METRICS

    @property
    def tensorboard_folder(self) -> Path:
        """The folder with the same metrics for TensorBoard."""
        return self.run_folder / TENSORBOARD

    @property
    def csv_path(self) -> Path | None:
        """The file with the same metrics as a table; None if it is not asked for."""
        return self.run_folder / METRICS_CSV if self.spec.monitor.csv else None

    @property
    def profiles_folder(self) -> Path:
        """The folder with profiler traces."""
        return self.run_folder / PROFILES
