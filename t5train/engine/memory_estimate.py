"""Estimates the memory of a run's state by formula, before anything is allocated.

Bytes per rank, with R ranks, N parameters, n of which a rank computes with (fewer than N if experts or the layers of a
pipeline are spread), b bytes per weight (4 in fp32, otherwise 2), and g bytes per gradient that is summed over the
passes of a step (4, or b if a step has one pass). The formulas are derived from the source of DeepSpeed 0.19; a test
compares them with the live tensors of its engines.

============== ===================================== =========================
ZeRO, offload  accelerator                           host
============== ===================================== =========================
0              (2 b + 8) n, in 16 bits 8 n more
1              (b + g) n + (b + 12) N/R
2              b n + 16 N/R
3              (b + g + 12) N/R
1, optimizer   (b + g) n                             (16 + b) N/R
2, optimizer   b n, with several passes g N/R more   (16 + b) N/R
3, optimizer   b N/R                                 (16 + g) N/R
3, all                                               (16 + b + g) N/R
1, fused       (b + g) n + (b + 12) N/R              (b n less: see below)
2, fused       b n + (g + 12) N/R
============== ===================================== =========================

With the fused update of bf16 on NVIDIA GPUs, gradients are not copied to fp32 and no operator needs temporary memory.
If no gradients are averaged over ranks (one rank, or one for each stage of a pipeline), they are not copied at all.

With adapters, N counts their elements, and the frozen weights take b bytes each, on every rank or, at ZeRO 3, divided.

In addition, memory is needed for what is fetched, reduced and updated at a time, for the batches that are prefetched
(the order of samples is computed on demand and takes no memory), and for activations. Activations are not counted here:
they grow with the micro-batch, and depend on how the model is compiled.
"""

from typing import NamedTuple

from t5train.data.samples.loader import PREFETCHED_BATCHES
from t5train.data.samples.span_corruption import geometry, row_lengths
from t5train.engine.deepspeed_config import (
    BUCKET_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    decoder_block_elements,
    sums_passes,
)
from t5train.model.model_shape import T5Shape, count_expert_parameters, count_parameters
from t5train.model.parameters import count_trained
from t5train.spec import RunSpec

PROCESS_BYTES = 1 << 30
"""Minimum host memory of a rank before it trains: Python, torch and an accelerator's driver."""
UNCUT_BUCKET_ELEMENTS = 500_000_000
"""How many elements DeepSpeed reduces at a time at ZeRO 0."""
FETCHED, PROCESS, WITNESS = "parameters fetched", "process", "witness at the end, rank 0"
_MASTER, _MOMENTS = 4, 8
_ID, _TOKEN, _NOISE = 8, 4, 12
_SEGMENT, _KEY = 4, 8


class Held(NamedTuple):
    """One kind of memory of a rank, in bytes on its accelerator and in host memory."""

    what: str
    accelerator: int
    host: int


class _Sizes(NamedTuple):
    """Sizes that determine the memory of a rank.

    ``whole`` is the number of trained parameters that a rank computes with, ``part`` its share of the partitioned ones.
    ``weight`` and ``summed`` are the bytes of a weight and of a gradient that is summed over the passes of a step.
    """

    whole: int
    part: int
    weight: int
    summed: int


def held_by_a_rank(spec: RunSpec, shape: T5Shape) -> list[Held]:
    """Return the peak memory of a rank during a step, for each kind separately."""
    layout, sizes = spec.layout, _sizes(spec, shape)
    if layout.zero_stage == 0:
        state = _replicated(sizes)
    elif fuses_update(spec):
        state = _fused(sizes, layout.zero_stage, spec.data_parallel_size == 1, records_passes(spec))
    else:
        state = _cut_up(sizes, layout.zero_stage, layout.offload)
        if layout.zero_stage == 3:
            state += _fetched(sizes.weight, spec, shape)
    if spec.finetune.lora.rank is not None:
        state.append(_frozen(sizes.weight, spec, shape))
    model = _MASTER * count_parameters(shape)
    return [
        *(held for held in state if held[1:] != (0, 0)),
        Held("batches prepared", 0, _batches(spec)),
        Held(PROCESS, 0, PROCESS_BYTES),
        Held(WITNESS, model, model),
    ]


def fuses_update(spec: RunSpec) -> bool:
    """Return whether a run on NVIDIA GPUs uses the fused update. A run may not know its accelerators yet."""
    is_supported = spec.optimizer.precision == "bf16" and spec.layout.zero_stage in {1, 2}
    is_supported = is_supported and spec.finetune.lora.rank is None
    return is_supported and spec.layout.offload == "none" and spec.cluster.accelerator in {None, "cuda"}


def records_passes(spec: RunSpec) -> bool:
    """Return whether pipeline stages run as CUDA graphs where the update is fused.

    Dropout would draw other numbers in them, and to compute activations again, torch reads the state of its generator.
    """
    is_plain = spec.model.dropout_rate == 0 and not spec.model.activation_checkpointing
    return spec.layout.pipeline_stages > 1 and spec.model.compile and is_plain and sums_passes(spec)


def host_bytes(spec: RunSpec, shape: T5Shape, ranks: range | None = None) -> int:
    """Return the host memory that all ranks, or ``ranks``, need on a machine. On the CPU, all their memory counts."""
    ranks = range(spec.cluster.ranks) if ranks is None else ranks
    on_cpu = spec.cluster.accelerator == "cpu"
    held = {one.what: one.host + on_cpu * one.accelerator for one in held_by_a_rank(spec, shape)}
    witness = held.pop(WITNESS) // (1 + on_cpu)  # it is never in both kinds of memory at once
    # To predict, every rank has the whole model: where there are accelerators, in their memory, else one for all ranks.
    predicting = (len(ranks) if on_cpu else 1) if spec.evaluate.generates else 0
    return len(ranks) * sum(held.values()) + witness * max(predicting, 0 in ranks)


def _batches(spec: RunSpec) -> int:
    """Return the bytes of the prefetched batches, the one in use and the one being made, with its random numbers."""
    batch, tokens = spec.layout.micro_batch_sequences, sum(row_lengths(spec))
    made, noise = _ID + _TOKEN * tokens, 0
    if spec.is_fine_tuning:
        made += (_SEGMENT + _KEY * spec.has_dropout) * tokens
    else:
        noise = _NOISE * geometry(spec.objective).window_tokens
    return batch * (made * (PREFETCHED_BATCHES + 2) + noise)


def _sizes(spec: RunSpec, shape: T5Shape) -> _Sizes:
    """Return the sizes. A pipeline stage counts as an even share of the layers, plus a copy of the embedding."""
    parameters, experts = count_trained(shape, spec.finetune.lora), count_expert_parameters(shape)
    whole, part = (
        parameters - experts + experts // spec.layout.expert_parallel_size,
        -(-parameters // spec.cluster.ranks),
    )
    if (stages := spec.layout.pipeline_stages) > 1:
        whole = min(parameters, parameters // stages + shape.vocab_size * shape.d_model)
        part = -(-whole // spec.data_parallel_size)
    weight = 4 if spec.optimizer.precision == "fp32" else 2
    return _Sizes(whole, part, weight, summed=4 if sums_passes(spec) else weight)


def _replicated(sizes: _Sizes) -> list[Held]:
    """Return the state at ZeRO 0: every rank holds everything.

    In 16 bits, the optimizer also holds fp32 copies of weights and gradients. fp32 sums of gradients add nothing: they
    are freed before these copies are made.
    """
    whole, weight = sizes.whole, sizes.weight
    copies = 0 if weight == _MASTER else _MASTER * whole
    return [
        Held("weights", weight * whole, 0),
        Held("gradients", weight * whole + copies, 0),
        Held("masters", copies, 0),
        Held("moments", _MOMENTS * whole, 0),
        Held("reduced at a time", weight * min(whole, UNCUT_BUCKET_ELEMENTS), 0),
    ]


def _cut_up(sizes: _Sizes, stage: int, offload: str) -> list[Held]:
    whole, part, weight, _ = sizes
    on_host = offload != "none"
    here = 0 if on_host else 1
    weights = weight * (part if stage == 3 else whole)
    return [
        Held("weights", *((0, weights) if offload == "all" else (weights, 0))),
        _gradients(sizes, stage, on_host),
        Held("masters", here * _MASTER * part, (1 - here) * _MASTER * part),
        Held("moments", here * _MOMENTS * part, (1 - here) * _MOMENTS * part),
        Held("weights on their way back", 0, weight * part if on_host and stage < 3 else 0),
        Held("reduced at a time", weight * BUCKET_ELEMENTS, 0),
        Held("updated at a time", *_scratch(part, stage, on_host)),
    ]


def _fetched(weight: int, spec: RunSpec, shape: T5Shape) -> list[Held]:
    """Return what ZeRO 3 fetches: two blocks (t5train.engine.gathered_blocks), and embedding and output layer.

    With several ranks, each block is received in a buffer of its own; with one that has all weights, no block is.
    """
    ranks, is_offloaded = spec.cluster.ranks, spec.layout.offload == "all"
    buffers = 4 if ranks > 1 else 2 * is_offloaded
    received = 2 / ranks if ranks > 1 and is_offloaded else 0
    embeddings = (1 if shape.tied else 2) * shape.vocab_size * shape.d_model
    return [
        Held("blocks gathered", int(weight * (buffers + received) * decoder_block_elements(shape)), 0),
        Held(FETCHED, weight * embeddings, 0),
    ]


def _frozen(weight: int, spec: RunSpec, shape: T5Shape) -> Held:
    """Return the weights that adapters are for, which have neither gradients nor optimizer state."""
    held = weight * count_parameters(shape)
    if spec.layout.zero_stage == 3:
        held = -(-held // spec.cluster.ranks)
    return Held("frozen weights", *((0, held) if spec.layout.offload == "all" else (held, 0)))


def _fused(sizes: _Sizes, stage: int, is_alone: bool, keeps_sums: bool) -> list[Held]:
    """Return the state with the fused update. Without other ranks to average with, there are no copies of gradients.

    CUDA graphs keep the fp32 sums of gradients while the update uses the rounded ones.
    """
    whole, part, weight, summed = sizes
    gradients = summed * part if stage == 2 else summed * whole + weight * part * (not is_alone)
    gradients += weight * whole * keeps_sums
    return [
        Held("weights", weight * whole, 0),
        Held("gradients", gradients, 0),
        Held("masters", _MASTER * part, 0),
        Held("moments", _MOMENTS * part, 0),
        # One bucket is reduced while others are filled: of the dense parameters, and of the experts.
        Held("reduced at a time", weight * min(whole, 3 * BUCKET_ELEMENTS) * (not is_alone), 0),
    ]


def _gradients(sizes: _Sizes, stage: int, on_host: bool) -> Held:
    """Return the memory of the gradients, including the fp32 ones that the optimizer takes.

    ZeRO 1 reduces gradients after the backward passes, ZeRO 2 and 3 during them. At ZeRO 2, the optimizer takes the
    fp32 sums themselves; with offload, the sums also stay on the accelerator.
    """
    whole, part, weight, summed = sizes
    at_once = summed * whole if stage == 1 else 0
    if stage == 2 and on_host and summed > weight:
        at_once = summed * part
    kept = (summed * part if stage == 3 else 0) + _MASTER * part
    return Held("gradients", at_once if on_host else at_once + kept, kept if on_host else 0)


def _scratch(part: int, stage: int, on_host: bool) -> tuple[int, int]:
    """Return the temporary memory of torch's operators: (accelerator, host). The host operator needs none."""
    return (0 if on_host else _MASTER * (min(part, SUB_GROUP_ELEMENTS) if stage == 3 else part), 0)
