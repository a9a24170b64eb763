"""What the training engine says of its own weights at the last step: the reference an export is held against."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t5train.errors import InputError

if TYPE_CHECKING:
    import torch

WITNESS = "witness.json"
WITNESS_TENSORS = "witness.safetensors"


class TensorDigest(BaseModel):
    """Shape of an fp32 tensor and sha256 of its little-endian bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[int, ...]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Witness(BaseModel):
    """``witness.json``; beside it ``witness.safetensors`` holds, for each probe, inputs and fp32 logits.

    ``{probe}.input_ids`` int64 [b, s], ``{probe}.decoder_input_ids`` int64 [b, t], ``{probe}.logits`` fp32
    [b, t, vocab]: a forward of the fp32 masters on ``device_type``, with ``num_threads`` threads on a CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    run_fingerprint: str
    step: int
    tag: str
    device_type: str
    num_threads: int = Field(ge=1)
    num_parameters: int
    tensors: dict[str, TensorDigest] = Field(min_length=1)
    ties: dict[str, str]
    huggingface_config: dict[str, Any]
    probes: list[str] = Field(min_length=1)
    inputs: dict[str, str] = {}
    validation: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``folder``/witness.json; InputError when there is none, or it is not a witness."""
        path = folder / WITNESS
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: name the folder `witness` of a run that has ended") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): repair the disk or the permissions") from error
        except ValidationError as error:
            raise InputError(f"{path} is not a witness of a training run: {error.errors()[0]['msg']}") from error


def digest_tensor(tensor: "torch.Tensor") -> str:
    """sha256 of an fp32 tensor's little-endian bytes; for any other type its name, which equals no digest."""
    import torch

    if tensor.dtype != torch.float32:
        return str(tensor.dtype)
    values = tensor.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(values.reshape(-1).view("uint8").data).hexdigest()
