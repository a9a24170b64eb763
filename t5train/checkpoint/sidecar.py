"""The sidecar: a JSON file that each rank writes beside its files of a checkpoint, to describe and verify them.

DeepSpeed's own files have no digests, and they record neither the run nor the position of each parameter. In some
layouts, DeepSpeed does not write some files at all. A sidecar (``rank-00000.json``) lists the rank's files and records
what they lack. Each rank writes its sidecar last, atomically.
"""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from t5train.errors import IncompleteCheckpoint, StorageError
from t5train.files.atomic import write_json
from t5train.files.confined import child
from t5train.files.presence import ABSENT, names_in, reading
from t5train.model.parameters import PIPELINE_LAYER, ExpertLayer, ParameterSlot, Precision
from t5train.records.best_so_far import BestSoFar
from t5train.records.digests import FileDigest
from t5train.records.identity import fingerprint, is_sealed
from t5train.records.stage_records import unknown_version

_OWN_DIGEST = "sha256"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ParallelLayout(_Part):
    """How the training state is distributed over ranks, and this rank's position."""

    zero_stage: Literal[0, 1, 2, 3]
    precision: Precision
    data_parallel_rank: int = Field(ge=0)
    data_parallel_size: int = Field(ge=1)
    pipeline_rank: int = Field(0, ge=0)
    pipeline_size: int = Field(1, ge=1)
    expert_rank: int = Field(0, ge=0)
    expert_size: int = Field(1, ge=1)
    expert_data_rank: int = Field(0, ge=0)
    expert_data_size: int = Field(1, ge=1)

    def shape(self) -> tuple[Any, ...]:
        """ZeRO stage, precision and sizes, which are the same for all ranks of a checkpoint."""
        return tuple(value for name, value in self if not name.endswith("_rank"))


class DataState(_Part):
    """How far training has read, as one integer, and from which token shards."""

    samples_consumed: int = Field(ge=0)
    shards_fingerprint: str


class AdaptedModel(_Part):
    """The frozen model that a checkpoint's adapters are for. The checkpoint does not hold its weights.

    A weight with an adapter stands for ``weight + scaling x B A`` (``t5train.model.lora``).
    """

    start_fingerprint: str = Field(min_length=1)
    scaling: float = Field(gt=0)


class Sidecar(_Part):
    """One rank's record of its part of a checkpoint.

    ``files`` has the digests of the files this rank wrote, by name within the tag's folder. ``replicas`` has those of
    additional files on nodes that do not share a disk: there DeepSpeed also writes files that a rank of another node
    lists in its ``files``. For resuming, a replica is equivalent to the original, but its bytes may differ. The first
    rank of a node lists the node's replicas, which are used on that node in place of the originals.

    ``saving`` is a random value that each save of a tag draws: files from two saves of one tag are not one checkpoint.
    ``groups`` lists the optimizer's parameter groups in order, even if the module's own weights are the fp32 masters
    (ZeRO 0 in fp32). Experts in ``groups`` are those of this rank, numbered over all ranks. ``aliases`` maps a tied
    name to the name that owns the storage. All names are Hugging Face's; in the files, they have the prefix
    ``model_prefix``.

    In a pipeline, ``groups`` are those of the rank's stage, and ``pipeline_layers`` maps DeepSpeed's name of a layer to
    the layer's path in Hugging Face's model (``""`` for the model itself). DeepSpeed's name is a number such as
    ``"3"``, or ``"tied_modules.KEY"`` for a tied layer, which is listed under its number too if it has a file.

    ``skipped_steps`` counts the steps that the fp16 loss scaler skipped, and ``loss_scaler`` is its state, by
    attribute. ``generator_states`` are base64 text, by generator.

    ``best`` is None, and then left out of the file, in runs whose result is the last checkpoint. In other runs, the
    checkpoint that is the best one itself also has the witness of its weights. ``adapted`` is None, and then left out,
    unless the run trains adapters.
    """

    schema_version: Literal[1] = 1
    run_fingerprint: str = Field(min_length=1)
    step: int = Field(ge=0)
    tag: str = Field(min_length=1)
    saving: str = ""
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    layout: ParallelLayout
    files: dict[str, FileDigest]
    replicas: dict[str, FileDigest] = {}
    groups: list[list[ParameterSlot]]
    aliases: dict[str, str] = {}
    expert_layers: list[ExpertLayer] = []
    huggingface_config: dict[str, Any]
    model_prefix: str = ""
    pipeline_layers: dict[str, str] = {}
    skipped_steps: int = Field(0, ge=0)
    loss_scaler: dict[str, int | float] = {}
    best: BestSoFar | None = None
    adapted: AdaptedModel | None = None
    data: DataState
    generator_states: dict[str, str] = {}
    versions: dict[str, str] = {}

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint so far; None if there is none."""
        return self.best.step if self.best else None

    @field_validator("files", "replicas")
    @classmethod
    def _files_lie_in_the_folder(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            _require_plain(name)
        return files

    @field_validator("tag")
    @classmethod
    def _tag_is_a_folder(cls, tag: str) -> str:
        _require_plain(tag)
        return tag

    @field_validator("pipeline_layers")
    @classmethod
    def _layers_are_named_as_deepspeed_does(cls, layers: dict[str, str]) -> dict[str, str]:
        for layer in layers:
            if not re.fullmatch(PIPELINE_LAYER, layer):
                raise ValueError(f"{layer!r} is not a layer of a pipeline, such as '3' or 'tied_modules.embedding'")
        return layers

    @model_validator(mode="after")
    def _stages_have_named_layers(self) -> Self:
        if self.layout.pipeline_size > 1 and not self.pipeline_layers:
            raise ValueError(
                f"pipeline_layers is empty, but must name the layers of {self.layout.pipeline_size} pipeline stages"
            )
        return self

    @model_validator(mode="after")
    def _experts_fit_the_ranks(self) -> Self:
        for layer in self.expert_layers:
            if self.layout.data_parallel_size % layer.expert_parallel_size:
                raise ValueError(
                    f"{layer.path}: expert_parallel_size is {layer.expert_parallel_size}: it must divide "
                    f"data_parallel_size ({self.layout.data_parallel_size})"
                )
        for what in ("path", "module"):
            named = [getattr(layer, what) for layer in self.expert_layers]
            if len(set(named)) < len(named):
                raise ValueError(f"expert_layers have the {what}s {named}, but no two may be equal")
        return self

    @model_validator(mode="after")
    def _rank_is_one_of_the_world(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}: it must be below world_size ({self.world_size})")
        return self


def _require_plain(name: str) -> None:
    """Raise ValueError unless ``name`` is a plain file name: sidecars also come from other machines."""
    try:
        child(Path(), name, "the sidecar")
    except StorageError as error:
        raise ValueError(str(error)) from error


def sidecar_name(rank: int) -> str:
    """The name of a rank's sidecar, such as ``rank-00000.json``."""
    return f"rank-{rank:05d}.json"


def write(folder: Path, sidecar: Sidecar) -> None:
    """Write a rank's sidecar, with its own sha256, atomically. The rank's files must already be on disk."""
    unset = {name for name in ("best", "adapted") if getattr(sidecar, name) is None}
    document = sidecar.model_dump(mode="json", exclude=unset)
    write_json(folder / sidecar_name(sidecar.rank), document | {_OWN_DIGEST: fingerprint(document)})


def read(folder: Path, rank: int) -> Sidecar:
    """Read one rank's sidecar of a tag. Raises Unreadable and the errors of ``parsed``."""
    return _read(folder / sidecar_name(rank))


def read_all(folder: Path) -> list[Sidecar]:
    """Read all sidecars of a tag, sorted by rank; empty if there are none. Raises the errors of ``read``."""
    found = (_read(folder / name) for name in names_in(folder) if is_sidecar(name))
    return sorted(found, key=lambda sidecar: sidecar.rank)


def is_sidecar(name: str) -> bool:
    """Whether a file name in a tag's folder is that of a sidecar."""
    return PurePosixPath(name).match("rank-*.json")


def _read(path: Path) -> Sidecar:
    try:
        with reading(path):
            text = path.read_text("utf-8")
    except ABSENT:
        raise IncompleteCheckpoint(f"{path} is missing: the rank that writes it did not finish saving") from None
    except UnicodeError as error:
        raise IncompleteCheckpoint(f"{path} is damaged, or not a sidecar: {error}") from error
    return parsed(text, path)


def parsed(text: str, path: Path) -> Sidecar:
    """Parse ``text`` as the sidecar at ``path``, which may be on another machine.

    The sha256 it includes distinguishes damage from an unknown version: raises IncompleteCheckpoint if it does not
    match, and UnknownVersion if it matches but this version cannot parse the content.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise IncompleteCheckpoint(f"{path} is damaged, or not a sidecar: {error}") from error
    if not isinstance(document, dict) or not is_sealed(document, _OWN_DIGEST):
        raise IncompleteCheckpoint(f"{path} is damaged: its content does not match the sha256 it was written with")
    del document[_OWN_DIGEST]
    try:
        sidecar = Sidecar.model_validate(document)
    except ValidationError as error:
        raise unknown_version(str(path), error) from error
    if path.name != sidecar_name(sidecar.rank):
        raise IncompleteCheckpoint(f"{path} was renamed or copied: it is the sidecar of rank {sidecar.rank}")
    return sidecar
