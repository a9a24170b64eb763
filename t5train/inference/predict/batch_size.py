"""How large batches are: as many sequences as make a device faster, as far as they fit into its memory.

A step of the decoder reads all weights once, and starts some 35 kernels a layer, for however many sequences: so its
time hardly depends on their number until arithmetic fills the device. On a core of a CPU, a step of T5 small takes
12 ms and 1.9 ms for each sequence: 32 of them reach 84% of the rate of many, and 64 reach 91%.

Of GPUs, this is arithmetic, not yet measured. With about 60 TFLOPS in fp32 (H100, H200), each sequence costs the
decoder and the output two operations for each of their parameters: 0.3 GFLOP of base, 3.4 of 3B. Where a step is bound
by starting kernels, at 25 ms (base) and 50 ms (3B), arithmetic fills it from 5,000 and from 900 sequences on. 1,024
sequences are 8 times as many as those of 32 rows with 4 beams, and 32 times as many as without.

What they keep in memory are keys and values of all layers of the decoder, of sources and of hypotheses: 73,728 bytes a
token of base, and 786,432 of 3B (v1.0, in fp32). With sources and hypotheses of 64 tokens, 1,024 sequences of base take
9 GiB. Of 3B, they would take 96 GiB: 80 GiB beside 11 GiB of weights hold 428 (13 times the loop's 32 rows greedily,
3.3 times with 4 beams), and 139 GiB hold 939 (29 and 7.3 times).
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from t5train.files.atomic import write_json
from t5train.inference.model_folder import PATH, DType, ModelFolder
from t5train.model.starting_model import HuggingFaceFolder

BATCHES = "batches.json"
"""In the folder of predictions until it is complete: the most tokens of a batch."""
_MOST_SEQUENCES = {"cpu": 64}
_MOST_ON_ACCELERATORS = 1024
_SHARES = 32
"""A small file makes so many batches, if they need not be less than half as large, so that many processes have work."""
_USED = 3 / 4
"""Of the memory beside the weights. The rest is for logits, activations and what is lost between blocks."""
_USUAL = {"num_layers": 6, "num_heads": 8, "d_kv": 64, "d_ff": 2048}  # what transformers assumes
_WIDTHS: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_TENSORS_AT_ONCE = 3  # of a layer's feed-forward network, and of its attention


class BatchSize(NamedTuple):
    """What decides how large batches are."""

    folder: ModelFolder
    device: str
    """The kind of device, such as cpu."""
    dtype: DType
    num_beams: int
    device_bytes: int
    """What ``t5train.inference.predict.devices.device_bytes`` returns; of several machines, the least."""

    def sequences(self, rows: int) -> int:
        """Return how many sequences, those of all beams counted, a batch has at most, of so many rows in all."""
        most = _MOST_SEQUENCES.get(self.device, _MOST_ON_ACCELERATORS)
        return min(most, max(most // 2, rows * self.num_beams // _SHARES))

    def tokens(self, longest: int) -> int:
        """Return how many tokens of sources and hypotheses, once for each beam, fit into the memory of a device.

        ``longest`` is the number of tokens of the longest source. The smallest accelerator counts, rounded down to a
        power of two: the number of processes changes nothing, nor what else a device holds.
        """
        size, width = _sizes(self.folder.config), _WIDTHS[self.dtype]
        kept = 2 * size["num_decoder_layers"] * size["num_heads"] * size["d_kv"] * width
        read = _TENSORS_AT_ONCE * (size["d_ff"] + size["num_heads"] * longest) * width  # once for all beams
        room = self.device_bytes
        if self.device != "cpu":
            memory = 1 << (self.device_bytes.bit_length() - 1)
            room = int(_USED * (memory - _num_parameters(self.folder) * width))
        return max(1, room // max(kept, read // self.num_beams))

    def recorded_tokens(self, file: Path, longest: int) -> int:
        """Return ``tokens`` as a file recorded them when a job began; it is written if it is missing.

        So parts that are done stay valid where a job is continued on devices with more memory, or less.
        """
        if not file.exists():
            write_json(file, {"batch_tokens": self.tokens(longest)})
        return int(json.loads(file.read_bytes())["batch_tokens"])


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a configuration. Loading finds what is wrong with it."""
    found = {name: size for name in _USUAL if isinstance(size := config.get(name), int) and size > 0}
    size = _USUAL | found
    decoder = config.get("num_decoder_layers")
    return size | {"num_decoder_layers": decoder if isinstance(decoder, int) and decoder > 0 else size["num_layers"]}


def _num_parameters(folder: ModelFolder) -> int:
    return sum(prod(each.shape) for each in HuggingFaceFolder.open(folder.path, PATH).tensors.values())
