"""What a rank writes beside its files of a checkpoint: enough to verify them and to know what is in them.

DeepSpeed's own files name neither the run nor the place of each parameter, carry no digest, and some of them
are never written in some layouts. A *sidecar* (``rank-00000.json``, written last and atomically by each rank)
says all of it. A tag is complete when the sidecars of every rank, of one run, step and layout, are there and
their files verify; that, and never DeepSpeed's file ``latest``, decides what may be resumed or consolidated.

There are three answers to whether a tag is complete: yes; no, because something is absent or was read and differs
(IncompleteCheckpoint); and that this cannot be known now: a file cannot be read (Unreadable), a sidecar is of another
version (UnknownVersion), or the tag holds a file that nobody recorded (UnlistedFile).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from t5train.atomic import write_json
from t5train.confined import child
from t5train.errors import DigestMismatch, IncompleteCheckpoint, StorageError
from t5train.fingerprint import fingerprint, is_sealed
from t5train.host_resources import num_cores
from t5train.presence import ABSENT, file_size, is_folder, names_in, reading
from t5train.progress import Progress, silent
from t5train.records import FileDigest, unknown_version, verify_file
from t5train.unlisted_files import require_listed

Precision = Literal["fp32", "bf16", "fp16"]
_OWN_DIGEST = "sha256"
_EXPERTS, _GATE = "deepspeed_moe.experts.deepspeed_experts.", "deepspeed_moe.gate.wg."
_LAYER = r"\d+|tied_modules\.[^.]+"
_SAME_ON_EVERY_RANK = (
    "run_fingerprint",
    "step",
    "tag",
    "saving",
    "world_size",
    "aliases",
    "expert_layers",
    "model_prefix",
    "pipeline_layers",
    "huggingface_config",
    "skipped_steps",
    "loss_scaler",
    "data",
)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ParallelLayout(_Part):
    """How the training state is spread over ranks, and where this rank stands in it."""

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
        """Stage, precision and sizes: what all ranks of a checkpoint have in common."""
        return tuple(value for name, value in self if not name.endswith("_rank"))


class ParameterSlot(_Part):
    """Where one parameter lies in the flat buffer of its parameter group, all ranks' partitions joined.

    At ZeRO 3, which cuts every parameter by itself, it is where each rank's part begins in that rank's buffer.
    ``name`` is Hugging Face's; ``offset`` and ``numel`` count elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    numel: int = Field(ge=0)

    @classmethod
    def of(cls, name: str, shape: Sequence[int], offset: int) -> Self:
        """The slot of a parameter of this shape at this offset."""
        return cls(name=name, shape=tuple(shape), offset=offset, numel=math.prod(shape))

    @model_validator(mode="after")
    def _shape_agrees(self) -> Self:
        if math.prod(self.shape) != self.numel:
            raise ValueError(f"{self.name} has the shape {self.shape}, which does not hold {self.numel} elements")
        return self


class ExpertLayer(_Part):
    """One layer with a mixture of experts, Hugging Face's sparse layer ``path`` (``"encoder.block.1.layer.1.mlp"``).

    ``module`` is what the files call DeepSpeed's ``MoE`` in it, behind the model's prefix; it names its experts and
    their gate otherwise than Hugging Face. Expert-parallel rank e of ``expert_parallel_size`` holds experts
    ``e * n`` to ``e * n + n - 1``, n being ``num_experts // expert_parallel_size``.
    """

    path: str = Field(min_length=1)
    module: str = Field(min_length=1)
    num_experts: int = Field(ge=1)
    expert_parallel_size: int = Field(ge=1)

    def huggingface_name(self, name: str) -> str:
        """Hugging Face's name for what the files call ``name``, experts numbered over all ranks."""
        experts, gate = f"{self.module}.{_EXPERTS}", f"{self.module}.{_GATE}"
        if name.startswith(experts):
            return f"{self.path}.experts.expert_{name.removeprefix(experts)}"
        return f"{self.path}.router.classifier.{name.removeprefix(gate)}" if name.startswith(gate) else name

    @model_validator(mode="after")
    def _ranks_hold_equally_many(self) -> Self:
        if self.num_experts % self.expert_parallel_size:
            raise ValueError(
                f"{self.path}: num_experts is {self.num_experts}: it must be a multiple of expert_parallel_size "
                f"({self.expert_parallel_size})"
            )
        return self


class DataState(_Part):
    """How far training has read, as one integer, and from which token shards."""

    samples_consumed: int = Field(ge=0)
    shards_fingerprint: str


class Sidecar(_Part):
    """One rank's account of its part of a checkpoint.

    ``files`` holds what this rank wrote, by name within the tag's folder. ``replicas`` lie beside them on nodes that
    share no disk: there DeepSpeed writes again what a rank of another node answers for, saying the same to who resumes
    from it, though nothing promises the same bytes. A node's first rank lists them; there they do for the original.
    ``saving`` is drawn each time a tag is written: parts of two savings of one tag are not one checkpoint.
    ``groups`` lists the optimizer's parameter groups in order, also where the module's own weights are the fp32 masters
    (ZeRO 0 in fp32).
    ``aliases`` maps a tied name to the name that owns the storage. Experts in ``groups`` are those of this rank,
    numbered over all ranks. All names are Hugging Face's; the files hold them behind ``model_prefix``. In a pipeline,
    ``groups`` are those of the rank's stage, and ``pipeline_layers`` maps what DeepSpeed calls a layer (``"3"``, or
    ``"tied_modules.KEY"`` for a tied one, which has its number too if it has a file) to its path in Hugging Face's
    model, ``""`` for the model itself. ``skipped_steps`` are those that fp16's loss scaler dropped, and ``loss_scaler``
    its state, by attribute. Generator states are base64 text, by generator.
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
    data: DataState
    generator_states: dict[str, str] = {}
    versions: dict[str, str] = {}

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
            if not re.fullmatch(_LAYER, layer):
                raise ValueError(f"{layer!r} is not a layer of a pipeline, such as '3' or 'tied_modules.embedding'")
        return layers

    @model_validator(mode="after")
    def _stages_have_named_layers(self) -> Self:
        if self.layout.pipeline_size > 1 and not self.pipeline_layers:
            raise ValueError(f"pipeline_layers is empty: the layers of {self.layout.pipeline_size} stages need names")
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
                raise ValueError(f"expert_layers have the {what}s {named}: each must have its own")
        return self

    @model_validator(mode="after")
    def _rank_is_one_of_the_world(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}: it must be below world_size ({self.world_size})")
        return self


def _require_plain(name: str) -> None:
    """Sidecars also come from other machines, and their names are joined to folders here."""
    try:
        child(Path(), name, "the sidecar")
    except StorageError as error:
        raise ValueError(str(error)) from error


def huggingface_name(name: str, model_prefix: str, pipeline_layers: Mapping[str, str]) -> str:
    """Hugging Face's name of a parameter that the engine's module calls ``name``.

    Raises ValueError when the name does not begin with ``model_prefix``, or with a layer of the pipeline.
    """
    if not name.startswith(model_prefix):
        raise ValueError(f"{name!r} does not begin with {model_prefix!r}")
    rest = name.removeprefix(model_prefix)
    if not pipeline_layers:
        return rest
    match = re.fullmatch(rf"({_LAYER})\.(.+)", rest)
    if match is None or match[1] not in pipeline_layers:
        raise ValueError(f"{name!r} is in none of the pipeline's layers {sorted(pipeline_layers)}")
    path = pipeline_layers[match[1]]
    return f"{path}.{match[2]}" if path else match[2]


def sidecar_name(rank: int) -> str:
    """``rank-00000.json``."""
    return f"rank-{rank:05d}.json"


def write(folder: Path, sidecar: Sidecar) -> None:
    """Put a rank's sidecar, with its own sha256 in it, into the folder of its tag: atomically, after its files."""
    document = sidecar.model_dump(mode="json")
    write_json(folder / sidecar_name(sidecar.rank), document | {_OWN_DIGEST: fingerprint(document)})


def read(folder: Path, rank: int) -> Sidecar:
    """One rank's sidecar of a tag; errors as of ``parsed``, and Unreadable."""
    return _read(folder / sidecar_name(rank))


def read_all(folder: Path) -> list[Sidecar]:
    """All sidecars of a tag by rank; empty when there are none. Errors as of ``read``."""
    found = (_read(folder / name) for name in names_in(folder) if is_sidecar(name))
    return sorted(found, key=lambda sidecar: sidecar.rank)


def require_complete(folder: Path, progress: Progress = silent) -> list[Sidecar]:
    """Every rank's sidecar, by rank, after every file was compared with its digest.

    Raises IncompleteCheckpoint that names the rank or file: absent, altered, or of another run, step or layout;
    Unreadable for a file that cannot be read now; UnknownVersion for a sidecar of another version; and UnlistedFile for
    a file that no rank wrote, which DeepSpeed, who finds files by pattern, would unpickle all the same.
    """
    sidecars = require_agreement(read_all(folder), folder)
    files = files_of(sidecars)
    require_listed(f"checkpoint {folder}", names_in(folder), files)
    try:
        _verify(folder, files, progress)
    except DigestMismatch as error:
        raise IncompleteCheckpoint(f"checkpoint {folder}: {error}") from error
    return sidecars


def _verify(folder: Path, files: Mapping[str, FileDigest], progress: Progress) -> None:
    """Compare files with their digests, one on each core."""
    total, done = sum(digest.size for digest in files.values()), 0
    with ThreadPoolExecutor(num_cores()) as threads:
        verified = threads.map(verify_file, [folder / name for name in files], files.values())
        for digest, _ in zip(files.values(), verified, strict=True):
            done += digest.size
            progress("checkpoint bytes verified", done, total)


def complete_tags(checkpoints: Path) -> list[str]:
    """Names of the complete tags in a DeepSpeed save folder, the newest step first.

    Sidecars must agree and files have their sizes; ``require_complete`` then reads the chosen one's digests. A tag
    that was renamed is none: a run renames what it is about to remove, and may be killed before it has. Raises
    Unreadable and UnknownVersion for a tag of which this cannot be known: an older one must not take its place.
    """
    found: list[tuple[int, str]] = []
    for name in names_in(checkpoints):
        folder = checkpoints / name
        sidecars = _if_complete(folder) if is_folder(folder) else None
        if sidecars is not None:
            found.append((sidecars[0].step, name))
    return [name for _, name in sorted(found, reverse=True)]


def files_of(sidecars: Sequence[Sidecar]) -> dict[str, FileDigest]:
    """The files of all ranks; IncompleteCheckpoint when two ranks claim one name with different content."""
    files: dict[str, FileDigest] = {}
    for sidecar in sidecars:
        for name, digest in sidecar.files.items():
            if files.setdefault(name, digest) != digest:
                raise IncompleteCheckpoint(
                    f"rank {sidecar.rank} of tag {sidecar.tag} recorded another digest of {name} than a rank before it"
                )
    return files


def _if_complete(folder: Path) -> list[Sidecar] | None:
    try:
        sidecars = require_agreement(read_all(folder), folder)
        files = files_of(sidecars)
    except IncompleteCheckpoint:
        return None
    whole = all(file_size(folder / name) == digest.size for name, digest in files.items())
    return sidecars if whole and sidecars[0].tag == folder.name else None


def require_agreement(sidecars: list[Sidecar], where: Path | str) -> list[Sidecar]:
    """The sidecars, if they are those of every rank of one checkpoint; else IncompleteCheckpoint says why not."""
    if not sidecars:
        raise IncompleteCheckpoint(f"{where} has no sidecar {sidecar_name(0)}: it was never finished")
    first = sidecars[0]
    for sidecar in sidecars:
        _require_same(where, first, sidecar)
    missing = sorted(set(range(first.world_size)) - {sidecar.rank for sidecar in sidecars})
    if missing:
        raise IncompleteCheckpoint(
            f"{where} lacks {sidecar_name(missing[0])} (ranks {missing} of {first.world_size}): choose another tag"
        )
    return sidecars


def _require_same(where: Path | str, first: Sidecar, other: Sidecar) -> None:
    differing = [name for name in _SAME_ON_EVERY_RANK if getattr(first, name) != getattr(other, name)]
    if first.layout.shape() != other.layout.shape():
        differing.append("layout")
    if differing:
        raise IncompleteCheckpoint(
            f"{where}: {sidecar_name(other.rank)} and {sidecar_name(first.rank)} differ in {', '.join(differing)}: "
            "they are not of one checkpoint; choose another tag"
        )


def is_sidecar(name: str) -> bool:
    """Whether a file of a tag is a sidecar, by its name."""
    return PurePosixPath(name).match("rank-*.json")


def _read(path: Path) -> Sidecar:
    try:
        with reading(path):
            text = path.read_text("utf-8")
    except ABSENT:
        raise IncompleteCheckpoint(f"{path} is missing: its rank has not finished") from None
    except UnicodeError as error:
        raise IncompleteCheckpoint(f"{path} is not a sidecar: {error}") from error
    return parsed(text, path)


def parsed(text: str, path: Path) -> Sidecar:
    """The sidecar that ``text`` is, which lies at ``path``, here or elsewhere.

    Its own sha256 tells damage from the unknown: IncompleteCheckpoint when that does not fit, UnknownVersion when it
    does and this version cannot make sense of the rest.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise IncompleteCheckpoint(f"{path} is not a sidecar: {error}") from error
    if not isinstance(document, dict) or not is_sealed(document, _OWN_DIGEST):
        raise IncompleteCheckpoint(f"{path} is damaged: its content has not the sha256 it was written with")
    del document[_OWN_DIGEST]
    try:
        sidecar = Sidecar.model_validate(document)
    except ValidationError as error:
        raise unknown_version(str(path), error) from error
    if path.name != sidecar_name(sidecar.rank):
        raise IncompleteCheckpoint(f"{path} speaks for rank {sidecar.rank}: it was renamed or copied")
    return sidecar
