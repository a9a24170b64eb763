"""Initial values of every parameter. They depend only on seed and name, so every layout starts from the same values."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from t5train.host_resources import num_cores
from t5train.model.lora import first_factor, is_adapter
from t5train.model.model_shape import T5Shape

# Factor for the variance of experts and routers (Fedus et al. 2022, section 2.4: the usual one made training unstable).
EXPERT_SCALE = 0.1

Fill = Callable[[str, nn.Parameter], None]
"""Fills a parameter in place with the initial value for its Hugging Face name. Called by several threads at a time."""

# A core draws a billion values in about 12 s. With more threads, memory is the limit.
_MOST_THREADS = 16


class NoDefaultValues(TorchFunctionMode):
    """Leaves the weights of modules as they are in memory: torch's default values would be drawn only to be replaced.

    Models built inside must be filled.
    """

    def __torch_function__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        """Skip the functions of torch.nn.init, which return the tensor that they fill."""
        settings = settings or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return settings["tensor"] if "tensor" in settings else arguments[0]
        return function(*arguments, **settings)


def fill_all(parameters: Mapping[str, nn.Parameter], fill: Fill) -> None:
    """Fill parameters, by Hugging Face name, several at a time."""
    with _threads() as threads:
        for done in [threads.submit(fill, name, parameter) for name, parameter in parameters.items()]:
            done.result()


def filled(sizes: Mapping[str, torch.Size], fill: Fill) -> Iterator[Tensor]:
    """Yield the initial values, fp32, for Hugging Face names, in order. Threads make only the next few in advance."""
    with _threads() as threads:
        coming: deque[Future[Tensor]] = deque()
        for name, size in sizes.items():
            coming.append(threads.submit(_filled, name, size, fill))
            if len(coming) >= _MOST_THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _filled(name: str, size: torch.Size, fill: Fill) -> Tensor:
    parameter = nn.Parameter(torch.empty(size), requires_grad=False)
    fill(name, parameter)
    return parameter


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(num_cores(), _MOST_THREADS))


def initialise(name: str, parameter: nn.Parameter, shape: T5Shape, seed: int) -> None:
    """Fill a parameter in place with the initial value for a seed and its Hugging Face name."""
    with torch.no_grad():
        parameter.copy_(first_value(name, parameter.shape, shape, seed))


def first_value(name: str, size: torch.Size, shape: T5Shape, seed: int) -> Tensor:
    """Return the initial value, fp32 [*size]: ones for norms, otherwise normal with T5's deviation for that name.

    Those of adapters are LoRA's.
    """
    if is_adapter(name):
        return first_factor(name, size, seed)
    if name.endswith("layer_norm.weight"):
        return torch.ones(size)
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.empty(size).normal_(0.0, deviation(name, shape), generator=generator)


def deviation(name: str, shape: T5Shape) -> float:
    """Return the standard deviation of T5's initialisation (Mesh TensorFlow's, which scales q instead of attention)."""
    scale = math.sqrt(EXPERT_SCALE) if ".experts." in name or ".router." in name else 1.0
    return scale * _dense_deviation(name, shape)


def _dense_deviation(name: str, shape: T5Shape) -> float:
    match name.split(".")[-2]:
        case "shared":
            return 1.0
        case "q":
            return 1 / math.sqrt(shape.d_model * shape.d_kv)
        case "o":
            return 1 / math.sqrt(shape.inner)
        case "wo":
            return 1 / math.sqrt(shape.d_ff)
        case "k" | "v" | "wi" | "wi_0" | "wi_1" | "relative_attention_bias" | "lm_head" | "classifier":
            return 1 / math.sqrt(shape.d_model)
    raise KeyError(f"no initialisation is known for {name}")
