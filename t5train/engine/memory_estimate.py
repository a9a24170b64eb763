"""How much memory the state of a run takes: by formula, before anything of it exists.

Bytes a rank, with R ranks, N parameters, n of them those a rank computes with (fewer where experts or a pipeline's
layers are spread), b bytes a weight (4 in fp32, else 2), and g bytes of a gradient that is summed over the passes of a
step (4, but b where a step has one pass). Read off DeepSpeed 0.19 and held against its engines' live
tensors by a test.

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
============== ===================================== =========================

To this come what is fetched, reduced and updated at a time, the batches that are prepared ahead (the order of samples
is computed place by place and takes no memory), and activations. These last are not counted here: they grow
with the micro-batch, and depend on what a compiler makes of the model.
"""

from typing import NamedTuple

from t5train.data.loader import PREFETCHED_BATCHES
from t5train.data.span_corruption import geometry
from t5train.engine.deepspeed_config import BUCKET_ELEMENTS, LIVE_ELEMENTS, SUB_GROUP_ELEMENTS, sums_passes
from t5train.model.model_shape import T5Shape, count_expert_parameters, count_parameters
from t5train.spec import RunSpec

PROCESS_BYTES = 1 << 30
"""Host memory of a rank that trains nothing yet, at least: Python, torch, an accelerator's driver."""
UNCUT_BUCKET_ELEMENTS = 500_000_000
"""What DeepSpeed reduces at a time at ZeRO 0."""
FETCHED, PROCESS, WITNESS = "parameters fetched", "process", "witness at the end, rank 0"
_MASTER, _MOMENTS = 4, 8
_ID, _TOKEN, _NOISE = 8, 4, 12


class Held(NamedTuple):
    """What one rank holds, in bytes on its accelerator and in host memory."""

    what: str
    accelerator: int
    host: int


class _Sizes(NamedTuple):
    """Parameters: ``whole`` those a rank computes with, ``part`` its share of what is cut up.

    ``weight`` and ``summed`` are the bytes of a weight and of a gradient that is summed over the passes of a step.
    """

    whole: int
    part: int
    weight: int
    summed: int


def held_by_a_rank(spec: RunSpec, shape: T5Shape) -> list[Held]:
    """What a rank holds of each kind at the moment of a step when it holds most of that."""
    layout, sizes = spec.layout, _sizes(spec, shape)
    state = _replicated(sizes) if layout.zero_stage == 0 else _cut_up(sizes, layout.zero_stage, layout.offload)
    model = _MASTER * count_parameters(shape)
    return [
        *(held for held in state if held[1:] != (0, 0)),
        Held("batches prepared", 0, _batches(spec)),
        Held(PROCESS, 0, PROCESS_BYTES),
        Held(WITNESS, model, model),
    ]


def host_bytes(spec: RunSpec, shape: T5Shape, ranks: range | None = None) -> int:
    """Host memory that all ranks, or ``ranks``, take of a machine; on the CPU with what is on the accelerator."""
    ranks = range(spec.cluster.ranks) if ranks is None else ranks
    on_cpu = spec.cluster.accelerator == "cpu"
    held = {one.what: one.host + on_cpu * one.accelerator for one in held_by_a_rank(spec, shape)}
    witness = held.pop(WITNESS) // (1 + on_cpu)  # it moves from one to the other
    return len(ranks) * sum(held.values()) + witness * (0 in ranks)


def _batches(spec: RunSpec) -> int:
    """Those that wait, the one in use and the one being made, with what its noise is drawn with."""
    shape, batch = geometry(spec.objective), spec.layout.micro_batch_sequences
    made = _ID + _TOKEN * (shape.input_tokens + shape.target_tokens)
    noise = _NOISE * shape.window_tokens
    return batch * (made * (PREFETCHED_BATCHES + 2) + noise)


def _sizes(spec: RunSpec, shape: T5Shape) -> _Sizes:
    """Of a pipeline's stage an even share of the layers, and the embedding, of which several stages have a copy."""
    parameters, experts = count_parameters(shape), count_expert_parameters(shape)
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
    """Everything whole on every rank; in 16 bits the optimizer has copies of weights and gradients in fp32.

    Sums of gradients in fp32 are gone when those copies are made, and take no more.
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
        Held(FETCHED, weight * min(whole, LIVE_ELEMENTS) if stage == 3 else 0, 0),
        _gradients(sizes, stage, on_host),
        Held("masters", here * _MASTER * part, (1 - here) * _MASTER * part),
        Held("moments", here * _MOMENTS * part, (1 - here) * _MOMENTS * part),
        Held("weights on their way back", 0, weight * part if on_host and stage < 3 else 0),
        Held("reduced at a time", weight * BUCKET_ELEMENTS, 0),
        Held("updated at a time", *_scratch(part, stage, on_host)),
    ]


def _gradients(sizes: _Sizes, stage: int, on_host: bool) -> Held:
    """ZeRO 1 reduces them when the backward passes are over, ZeRO 2 and 3 as they come; the optimizer takes fp32.

    At ZeRO 2 what is summed in fp32 is what the optimizer takes; of one in host memory it stays on the accelerator.
    """
    whole, part, weight, summed = sizes
    at_once = summed * whole if stage == 1 else 0
    if stage == 2 and on_host and summed > weight:
        at_once = summed * part
    kept = (summed * part if stage == 3 else 0) + _MASTER * part
    return Held("gradients", at_once if on_host else at_once + kept, kept if on_host else 0)


def _scratch(part: int, stage: int, on_host: bool) -> tuple[int, int]:
    """What torch's operators need beside the state; the operator for host memory needs nothing."""
    return (0 if on_host else _MASTER * (min(part, SUB_GROUP_ELEMENTS) if stage == 3 else part), 0)
