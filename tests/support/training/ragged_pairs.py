"""Random pairs of uneven lengths, and batches of rows that hold one or several of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from t5train.data.samples import keyed_random
from t5train.data.samples.loader import Batch, Segments
from t5train.model.initialization import initialise
from t5train.model.lora import add_adapters, first_factor
from t5train.model.model_shape import T5Shape, huggingface_config, resolve
from t5train.model.parameters import name_of_factor
from t5train.model.t5 import T5
from t5train.spec import LoraSpec, ModelSpec

VOCABULARY, SEED = 100, 3
PAD, EOS = 0, 1
UNUSED = (97, 98, 99)
"""Ids that no pair has."""
LENGTHS = ((9, 2), (3, 7), (6, 6), (4, 1), (12, 9), (2, 3), (5, 8), (7, 4))
"""Of source and target of each pair."""
PACKED = ((0, 1, 3), (2, 5, 6), (4,), (7,))
"""Pairs of the rows of a batch: full to different degrees."""
UNPACKED = tuple((pair,) for pair in range(len(LENGTHS)))
INPUT_TOKENS, TARGET_TOKENS = 18, 19
MODELS: dict[str, dict[str, Any]] = {
    "relu, tied": {"version": "v1.0", "num_layers": 2, "num_decoder_layers": 3},
    "gated, not tied": {"version": "v1.1", "num_layers": 3, "num_decoder_layers": 1},
    "gated, tied": {"version": "v1.0", "feed_forward": "gated-gelu", "num_layers": 1, "num_decoder_layers": 2},
}
_SIDE = (11, 12)


class Pair(NamedTuple):
    """Token ids of both sides, with EOS."""

    source: np.ndarray
    target: np.ndarray


def make_pairs(seed: int = 0) -> list[Pair]:
    """A pair for each of LENGTHS."""
    generator = np.random.default_rng(seed)
    return [Pair(*(np.append(generator.integers(3, UNUSED[0], n - 1), EOS) for n in both)) for both in LENGTHS]


def batch_of(
    rows: Sequence[Sequence[int]],
    pairs: Sequence[Pair],
    lengths: tuple[int, int] = (INPUT_TOKENS, TARGET_TOKENS),
    has_keys: bool = False,
    global_targets: int | None = None,
) -> Batch:
    """A batch of rows that hold the pairs of these numbers. Its keys follow from the number of a pair."""
    sides = [_side(rows, pairs, side, lengths[side]) for side in (0, 1)]
    (inputs, input_segments, input_keys), (targets, target_segments, target_keys) = sides
    keys = (input_keys, target_keys) if has_keys else (None, None)
    ids = np.arange(len(rows))
    total = int((target_segments > 0).sum()) if global_targets is None else global_targets
    return Batch(ids, ids * 0, inputs, targets, Segments(input_segments, target_segments, *keys, total))


def _side(
    rows: Sequence[Sequence[int]], pairs: Sequence[Pair], side: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, segments = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    keys = np.zeros((len(rows), length), np.int64)
    for row, held in enumerate(rows):
        begin = 0
        for number, pair in enumerate(held):
            size = len(pairs[pair][side])
            within = slice(begin, begin + size)
            tokens[row, within], segments[row, within] = pairs[pair][side], number + 1
            keys[row, within] = keyed_random.keys(_SIDE[side], pair, np.arange(size)).view(np.int64)
            begin += size
    return tokens, segments, keys


def fill(name: str, parameter: torch.nn.Parameter, shape: T5Shape) -> None:
    """Set a parameter to random values; also B of adapters, which would start at zero."""
    initialise(name, parameter, shape, SEED)
    if name.endswith(".lora_b"):
        parameter.data.copy_(first_factor(f"{name}.lora_a", parameter.shape, SEED))


def make_model(
    name: str, dropout_rate: float = 0.0, dtype: torch.dtype = torch.float32, lora: LoraSpec | None = None
) -> T5:
    """One of MODELS, with random weights, in training mode."""
    spec = ModelSpec.model_validate({"preset": "smoke", "dropout_rate": dropout_rate, **MODELS[name]})
    shape = resolve(spec, VOCABULARY)
    model = T5(shape, decoder_start_id=PAD)
    add_adapters(model, lora or LoraSpec())
    for path, parameter in model.named_parameters():
        fill(name_of_factor(path), parameter, shape)
    return model.to(dtype).train()


def load_with_transformers(model: T5, folder: Path) -> Any:
    """The same model of Hugging Face's, loaded from a folder, because only then weights are tied as the config says."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(model.shape, pad_id=PAD, eos_id=EOS)))
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return loaded.eval()


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by name."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def distance(found: Tensor, expected: Tensor) -> float:
    """The distance relative to what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
