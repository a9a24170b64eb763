"""The witness: what the engine records of its own weights at the last step. An export is certified against it."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from t5train.errors import InputError
from t5train.records.identity import installed_versions

if TYPE_CHECKING:
    import torch

WITNESS = "witness.json"
WITNESS_TENSORS = "witness.safetensors"
WITNESS_FILES = (WITNESS, WITNESS_TENSORS)
SCHEMA_VERSION: Literal[2] = 2
GENERATED_PROBE = "heldout"
_HUB_START = re.compile("([^/@]+/[^/@]+)@([0-9a-f]{40})")


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


LONGEST_TRAIN_TARGET = "longest_train_target"
"""Among the ``data`` of a run on pairs: the number of tokens of the longest target that was trained on, with EOS."""


class TrainedTask(BaseModel):
    """A task that a model was fine-tuned on: its name, and the text that precedes each of its sources."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    task: str
    prefix: str


class TrainedModel(BaseModel):
    """What a model card states about the run: its name, recipe and settings.

    The corpus source in ``settings`` is without credentials and local parent folders. ``start_from`` is the name of the
    folder whose weights training started from, or OWNER/NAME@COMMIT of a model on the Hub. ``layout`` has the settings
    of the layout at the last step, ``data`` the passages and tokens of each split and the samples of an epoch, and
    ``license`` and ``languages`` what the user states about the text. Runs that ended with an earlier version recorded
    none of these four. ``tasks`` are those of a run on pairs, in the order of ``pairs.train``; without any, they are
    left out of the file.
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
    tasks: tuple[TrainedTask, ...] = ()

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks of a run on pairs; empty for one on text."""
        return [task.task for task in self.tasks]

    @property
    def lora(self) -> dict[str, Any]:
        """The settings of LoRA; empty for a run that trained all weights."""
        lora: dict[str, Any] = self.settings.get("finetune", {}).get("lora", {})
        return lora

    @property
    def hub_start(self) -> tuple[str, str] | None:
        """Name and commit of the model on the Hub that training started from; None for a folder, or without a start."""
        found = _HUB_START.fullmatch(self.start_from or "")
        return None if found is None else (found[1], found[2])

    @model_serializer(mode="wrap")
    def _without_empty_tasks(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {name: value for name, value in document.items() if name != "tasks" or value}


class Witness(BaseModel):
    """The content of ``witness.json``. Beside it, ``witness.safetensors`` holds the inputs and outputs of each probe.

    These are ``{probe}.input_ids`` int64 [b, s], ``{probe}.decoder_input_ids`` int64 [b, t] and ``{probe}.logits`` fp32
    [b, t, vocab] and, of a run on pairs, ``{probe}.attention_mask`` int64 [b, s], which is 0 for padding. They are from
    a forward pass of the fp32 masters on ``device_type``, with ``num_threads`` threads on a CPU.

    Greedy decoding of ``GENERATED_PROBE`` gives ``generated`` int64 [b, 1 + n], which begins with the decoder's start
    id and has padding after the end id, and ``margins`` fp32 [b, n]: by how much the chosen logit exceeded the second
    largest, relative to the largest absolute value.

    ``huggingface_config`` and ``generation_config`` are the content of an export's ``config.json`` and
    ``generation_config.json``, apart from what transformers adds. ``inputs`` has the fingerprints of all earlier stages
    and, as ``vocabulary``, the sha256 of ``spiece.model``. ``curve`` has the points (step, loss) of each line of the
    loss curve, and ``environment`` what decides how the logits were rounded (``computing_environment``). Both are empty
    for runs that ended with an earlier version. ``adapters`` has the factors of the adapters of LoRA, by their names in
    ``t5train.model.lora``; without LoRA, it is left out of the file.
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
    adapters: dict[str, TensorDigest] = {}
    ties: dict[str, str]
    huggingface_config: dict[str, Any]
    generation_config: dict[str, Any]
    trained: TrainedModel
    passages: list[EncodedPassage] = Field(min_length=1)
    probes: list[str] = Field(min_length=1)
    inputs: dict[str, str]
    validation: dict[str, Any]
    curve: dict[str, list[tuple[int, float]]] = {}
    environment: dict[str, str] = {}

    @model_serializer(mode="wrap")
    def _without_empty_adapters(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {name: value for name, value in document.items() if name != "adapters" or value}

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
    except (ValueError, AttributeError, RecursionError):
        return  # validation reports what is wrong with it
    if isinstance(found, int) and found < SCHEMA_VERSION:
        raise InputError(
            f"this version of t5-pretrain cannot certify the model: {path} has schema version {found}, but version "
            f"{SCHEMA_VERSION} is needed, with held-out passages and the generation config. Certify and publish the "
            "run with the version of t5-pretrain that trained it, or train again under another --name. `consolidate` "
            "can still read the weights"
        )


_CPU_INFO = Path("/proc/cpuinfo")
# The last four are of ARM.
_PROCESSOR = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "CPU implementer", "CPU variant",
    "CPU part", "CPU revision",
)  # fmt: skip
_ACCELERATOR = ("name", "major", "minor", "multi_processor_count", "gcnArchName")
_VECTOR_EXTENSIONS = ("sse4", "avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
_CPU_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
)  # fmt: skip
_ACCELERATOR_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip
_LIBRARIES = {"MKL": r"Math Kernel Library Version ([\d.]+)", "oneDNN": r"MKL-DNN v([\d.]+)"}


def computing_environment(device_type: str) -> dict[str, str]:
    """Return what decides how results are rounded on a kind of device: the hardware, its limits and the libraries.

    Processors of one name can have other instruction sets, and libraries can be told not to use them. Therefore
    ``arithmetic`` is a digest of the results of fixed computations. Equal environments give equal bits with the same
    number of threads, which the caller sets.
    """
    import torch

    of_device = _of_cpu() if device_type == "cpu" else _of_accelerator(device_type)
    variables = _CPU_VARIABLES if device_type == "cpu" else _ACCELERATOR_VARIABLES
    return {
        **of_device,
        **{name: os.environ[name] for name in variables if os.environ.get(name)},
        "torch": str(torch.__version__),
        "arithmetic": _arithmetic(device_type),
    }


def differing_environment(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Describe each difference between two environments."""
    names = [name for name in {**recorded, **here} if recorded.get(name) != here.get(name)]
    unset = "not set"
    return [f"{name} ({recorded.get(name, unset)} in training, {here.get(name, unset)} here)" for name in names]


def _of_cpu() -> dict[str, str]:
    import torch

    facts = dict[str, str]()
    if _CPU_INFO.exists():
        first, _, _ = _CPU_INFO.read_text("utf-8", "replace").partition("\n\n")
        lines = (line.partition(":") for line in first.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
    described = [f"{name} {facts[name]}" for name in _PROCESSOR if name in facts]
    flags = facts.get("flags", facts.get("Features", "")).split()
    build = {name: re.search(pattern, torch.__config__.show()) for name, pattern in _LIBRARIES.items()}
    return {
        "processor": ", ".join([platform.machine(), *described]),
        "vector extensions": " ".join(sorted(each for each in flags if each.startswith(_VECTOR_EXTENSIONS))),
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        **{name: found[1] for name, found in build.items() if found},
    }


def _of_accelerator(device_type: str) -> dict[str, str]:
    import torch

    properties = getattr(torch.get_device_module(device_type), "get_device_properties", lambda: None)()
    described = [f"{name} {getattr(properties, name)}" for name in _ACCELERATOR if hasattr(properties, name)]
    cudnn: Any = torch.backends.cudnn
    found = {
        "processor": ", ".join(described),
        **{name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")},
        "cudnn": cudnn.version(),
    }
    found |= installed_versions(("nvidia-cublas", "nvidia-cublas-cu12"))
    return {name: str(value) for name, value in found.items() if value}


def _arithmetic(device_type: str) -> str:
    """Return a digest of matrix products, a softmax and a norm of fixed numbers in fp32."""
    import torch

    whole = torch.randint(-(1 << 15), 1 << 15, (256, 768), generator=torch.Generator().manual_seed(0))
    numbers = (whole.float() / (1 << 15)).to(device_type)  # exact on every processor
    with torch.no_grad():
        products = [numbers @ numbers.T, numbers[:9] @ numbers[:, :64].repeat(3, 1), numbers.T @ numbers]
        softmax = (products[0] / 8).softmax(-1)
        norm = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-6)
    results = [digest_tensor(each) for each in (*products, softmax, norm, torch.tanh(numbers))]
    return hashlib.sha256("".join(results).encode()).hexdigest()[:16]


def of_probe(tensors: Mapping[str, "torch.Tensor"], probe: str) -> dict[str, "torch.Tensor"]:
    """Return the recorded inputs of a probe, by the names of transformers' arguments."""
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return {name: tensors[key] for name in names if (key := f"{probe}.{name}") in tensors}


def digest_tensor(tensor: "torch.Tensor") -> str:
    """The sha256 of an fp32 tensor's little-endian bytes; for any other type, its name, which equals no digest."""
    import torch

    if tensor.dtype != torch.float32:
        return str(tensor.dtype)
    values = tensor.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(values.reshape(-1).view("uint8").data).hexdigest()
