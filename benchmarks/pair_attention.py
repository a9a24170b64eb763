"""Compare passes over rows of pairs with our attention kernels and with torch's attention, on one GPU, in bf16.

::

    python -m benchmarks.pair_attention [--preset base] [--rows 64] [--input-tokens 256] [--target-tokens 256]
        [--dropout 0.1] [--mean-tokens 20] [--layers 3] [--passes 20] [--only kernels]

Both train the same T5 v1.1, compiled with CUDA graphs as an engine compiles it, on the same random rows: pairs with
lengths of an exponential distribution, packed in order. Both use the kernel of the gated GELU. torch's attention reads
a mask of all queries and keys, and with dropout keeps its weights. The table shows milliseconds of a forward and
backward pass, real tokens a second, peak memory, the loss of the first batch, and how far its gradients are from those
with torch's attention, relative to their norm. A second table has the kernels of a pass, by kind; time in which none
runs is left out.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measured_result import Figure, add_into, measured_here, spread
from t5train.data.samples.loader import Segments
from t5train.engine.forward_backward import rows_of
from t5train.model.initialization import initialise
from t5train.model.kernels import biased_attention, gated_gelu
from t5train.model.model_shape import T5Shape, resolve
from t5train.model.t5 import T5, PairRows
from t5train.spec import ModelSpec
from t5train.train.step_benchmark import kind_of

BATCHES = 4
WARM_UP = 2 * BATCHES
VOCABULARY = 32_100
ATTENTIONS = ("torch", "kernels")


class Batch(NamedTuple):
    """Arguments of the model."""

    inputs: Tensor
    targets: Tensor
    rows: PairRows

    @property
    def real_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.rows.input_segments > 0).sum() + (self.rows.target_segments > 0).sum())


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--target-tokens", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--mean-tokens", type=int, default=20, help="of a source, and of a target")
    parser.add_argument("--layers", type=int, default=3, help="of the encoder, and of the decoder; more compile longer")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--only", choices=ATTENTIONS, help="measure this attention alone")
    add_into(parser)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.pair_attention needs an NVIDIA GPU: torch finds none on this machine")
    shape = resolve(
        ModelSpec(
            preset=given.preset,
            dropout_rate=given.dropout,
            num_layers=given.layers,
            num_decoder_layers=given.layers,
        ),
        VOCABULARY,
    )
    generator = np.random.default_rng(1)
    lengths = given.input_tokens, given.target_tokens
    batches = [_batch(generator, given.rows, lengths, given.mean_tokens, given.dropout > 0) for _ in range(BATCHES)]
    names = (given.only,) if given.only else ATTENTIONS
    found = {name: _measured(shape, name == "kernels", batches, given.passes) for name in names}
    tokens = statistics.mean(each.real_tokens for each in batches)
    reference = found[ATTENTIONS[0]].gradients if given.only is None else None
    rows: list[dict[str, Figure]] = [
        {
            "attention": name,
            "ms a pass": spread(each.ms, 2),
            "real tokens/s": round(tokens / statistics.median(each.ms) * 1e3),
            "GiB": round(each.memory / 2**30, 2),
            "loss": round(each.loss, 5),
            "distance of gradients": None if reference is None else _distance(each.gradients, reference),
        }
        for name, each in found.items()
    ]
    share = tokens / (given.rows * sum(lengths))
    notes = (
        f"{given.preset} with {given.layers} layers a side, {given.rows} rows of {lengths}, dropout {given.dropout}; "
        f"{share:.2f} of the tokens are real."
    )
    measured_here("Passes over rows of pairs, by attention", rows, notes).show(given.into)
    kinds = sorted({kind for each in found.values() for kind in each.kernels})
    parts: list[dict[str, Figure]] = [
        {"kernels": kind, **{f"ms, {name}": round(each.kernels.get(kind, 0.0), 3) for name, each in found.items()}}
        for kind in kinds
    ]
    print(measured_here("Kernels of a pass over rows of pairs", parts, notes).text())


def _distance(gradients: Tensor, reference: Tensor) -> str:
    return f"{float((gradients - reference).norm() / reference.norm()):.1e}"


def _batch(
    generator: np.random.Generator, rows: int, lengths: tuple[int, int], mean_tokens: int, has_keys: bool
) -> Batch:
    segments = np.stack([_packed(generator, lengths, mean_tokens) for _ in range(rows)])
    inputs, targets = (segments[:, side, : lengths[side]] for side in (0, 1))
    draw = partial(generator.integers, 1 << 62)
    keys = [draw(size=each.shape) if has_keys else None for each in (inputs, targets)]
    of_pairs = Segments(inputs, targets, keys[0], keys[1], int((targets > 0).sum()))
    tokens = [torch.from_numpy(generator.integers(3, VOCABULARY, each.shape)).cuda() for each in (inputs, targets)]
    return Batch(*tokens, PairRows(*(None if each is None else each.cuda() for each in rows_of(of_pairs, 1))))


def _packed(generator: np.random.Generator, lengths: tuple[int, int], mean_tokens: int) -> np.ndarray:
    """Segments of a row, [2, the longer side]: pairs until one does not fit."""
    row, begins, number = np.zeros((2, max(lengths)), np.int32), [0, 0], 1
    while True:
        sizes = 2 + generator.exponential(mean_tokens - 2, 2).astype(int)
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        if any(end > length for end, length in zip(ends, lengths, strict=True)):
            return row
        for side in (0, 1):
            row[side, begins[side] : ends[side]] = number
        begins, number = ends, number + 1


class Measured(NamedTuple):
    """What a model took: milliseconds of each pass, and of a pass by kind of kernel, bytes, and the first batch's loss
    and gradients.
    """

    ms: list[float]
    kernels: dict[str, float]
    memory: int
    loss: float
    gradients: Tensor


def _measured(shape: T5Shape, uses_kernels: bool, batches: list[Batch], passes: int) -> Measured:
    model = T5(shape, decoder_start_id=0)
    for name, parameter in model.named_parameters():
        initialise(name, parameter, shape, seed=1)
    model = model.to("cuda", torch.bfloat16).train()
    gated_gelu.use_in(model)
    if uses_kernels:
        biased_attention.use_in(model)
    model.compile(mode="reduce-overhead")
    torch.cuda.reset_peak_memory_stats()
    first = next(_passes(model, batches[:1]))[1]
    gradients = torch.cat([each.grad.float().flatten() for each in model.parameters() if each.grad is not None])
    taken = [ms for ms, _ in _passes(model, batches * ((passes + WARM_UP) // len(batches) + 1))]
    memory = torch.cuda.max_memory_allocated()
    kernels = _kernels(model, batches)
    del model
    torch.compiler.reset()
    return Measured(taken[WARM_UP : WARM_UP + passes], kernels, memory, first, gradients.cpu())


def _kernels(model: T5, batches: list[Batch]) -> dict[str, float]:
    """Return the milliseconds of a pass by kind of kernel: that of ``bench``, with the gated GELU for itself."""
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in _passes(model, batches):
            pass
    found: dict[str, float] = {}
    for event in run.events() or []:
        if event.device_type.name != "CPU":
            kind = "gated GELU" if event.name.startswith("gelu_") else kind_of(event.name)
            found[kind] = found.get(kind, 0.0) + event.device_time / 1e3 / len(batches)
    return found


def _passes(model: T5, batches: list[Batch]) -> Iterator[tuple[float, float]]:
    """Yield milliseconds and loss of each pass."""
    for batch in batches:
        model.zero_grad()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        began.record()
        loss = model(*batch)
        loss.backward()
        ended.record()
        ended.synchronize()
        yield began.elapsed_time(ended), float(loss.detach())


if __name__ == "__main__":
    main()
