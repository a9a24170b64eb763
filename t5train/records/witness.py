"""The witness: what the engine records of its own weights at the last step. An export is certified against it."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t5train.errors import InputError

if TYPE_CHECKING:
    import torch

WITNESS = "witness.json"
WITNESS_TENSORS = "witness.safetensors"
SCHEMA_VERSION: Literal[2] = 2
GENERATED_PROBE = "heldout"


class TensorDigest(BaseModel):
    """The shape of an fp32 tensor and the sha256 of its little-endian bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[int, ...]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class EncodedPassage(BaseModel):
    """A text and its training ids, EOS included."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    text: str
    ids: list[int] = Field(min_length=1)


class TrainedModel(BaseModel):
    """What a model card states about the run: its name, recipe and settings.

    The corpus source in ``settings`` is without credentials and local parent folders. ``start_from`` is the name of the
    folder whose weights training started from. ``layout`` has the settings of the layout at the last step, ``data`` the
    passages and tokens of each split and the samples of an epoch, and ``license`` and ``languages`` what the user
    states about the text. Runs that ended with an earlier version recorded none of these four.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    run_name: str
    recipe: str
    settings: dict[str, Any]
    start_from: str | None = None
    layout: dict[str, Any] = {}
    data: dict[str, int] = {}
    license: str | None = None
    languages: tuple[str, ...] = ()


class Witness(BaseModel):
    """The content of ``witness.json``. Beside it, ``witness.safetensors`` holds the inputs and outputs of each probe.

    These are ``{probe}.input_ids`` int64 [b, s], ``{probe}.decoder_input_ids`` int64 [b, t] and ``{probe}.logits`` fp32
    [b, t, vocab], from a forward pass of the fp32 masters on ``device_type``, with ``num_threads`` threads on a CPU.

    Greedy decoding of ``GENERATED_PROBE`` gives ``generated`` int64 [b, 1 + n], which begins with the decoder's start
    id and has padding after the end id, and ``margins`` fp32 [b, n]: by how much the chosen logit exceeded the second
    largest, relative to the largest absolute value.

    ``huggingface_config`` and ``generation_config`` are the content of an export's ``config.json`` and
    ``generation_config.json``, apart from what transformers adds. ``inputs`` has the fingerprints of all earlier stages
    and, as ``vocabulary``, the sha256 of ``spiece.model``. ``curve`` has the points (step, loss) of each line of the
    loss curve; it is empty for runs that ended with an earlier version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[2] = SCHEMA_VERSION
    run_fingerprint: str
    step: int
    tag: str
    device_type: str
    num_threads: int = Field(ge=1)
    num_parameters: int
    tensors: dict[str, TensorDigest] = Field(min_length=1)
    ties: dict[str, str]
    huggingface_config: dict[str, Any]
    generation_config: dict[str, Any]
    trained: TrainedModel
    passages: list[EncodedPassage] = Field(min_length=1)
    probes: list[str] = Field(min_length=1)
    inputs: dict[str, str]
    validation: dict[str, Any]
    curve: dict[str, list[tuple[int, float]]] = {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``folder``/witness.json. Raises InputError if it does not exist or is not a witness."""
        path = folder / WITNESS
        try:
            content = path.read_bytes()
            _require_current(path, content)
            return cls.model_validate_json(content)
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: name the folder `witness` of a run that has ended") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): repair the disk or the permissions") from error
        except ValidationError as error:
            raise InputError(f"{path} is not a witness of a training run: {error.errors()[0]['msg']}") from error


def _require_current(path: Path, content: bytes) -> None:
    """Raise InputError for a witness of an earlier version, which recorded less than certification compares."""
    try:
        found = json.loads(content).get("schema_version")
    except (ValueError, AttributeError):
        return  # validation reports what is wrong with it
    if isinstance(found, int) and found < SCHEMA_VERSION:
        raise InputError(
            f"this version of t5-pretrain cannot certify the model: {path} has schema version {found}, but version "
            f"{SCHEMA_VERSION} is needed, with held-out passages and the generation config. Certify and publish the "
            "run with the version of t5-pretrain that trained it, or train again under another --name. `consolidate` "
            "can still read the weights"
        )


def digest_tensor(tensor: "torch.Tensor") -> str:
    """The sha256 of an fp32 tensor's little-endian bytes; for any other type, its name, which equals no digest."""
    import torch

    if tensor.dtype != torch.float32:
        return str(tensor.dtype)
    values = tensor.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(values.reshape(-1).view("uint8").data).hexdigest()
