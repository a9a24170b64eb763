"""Which complete checkpoints a run keeps, and how much disk space they take, computed before the first is written.

The table shows the size of one checkpoint in bytes, for R ranks, N parameters, E of them in experts, and b bytes per
weight (4 in fp32, else 2). In a pipeline, N and R are the parameters and ranks of a stage. A test compares the sizes
with DeepSpeed 0.19's files. Each rank also writes a few kilobytes of other files.

================== =========================================== =======================
what               who writes it                               bytes
================== =========================================== =======================
masters, moments   every rank; at ZeRO 0 the first on a disk   12 N/R; at ZeRO 0 12 N
weights            the first on a disk, or of its stage        b (N - E); 0 at ZeRO 3, and in fp32 at ZeRO 0
experts            the first that holds them                   b E / expert_parallel_size
================== =========================================== =======================

Ranks that resume read more than they write if experts or a stage's weights were written to another disk.
"""

import math
from collections.abc import Mapping, Sequence

from t5train.data.samples.span_corruption import geometry
from t5train.model.model_shape import T5Shape, count_expert_parameters
from t5train.model.parameters import count_trained
from t5train.model.pipeline.pipeline_split import stage_parameters
from t5train.spec import RunSpec


def kept(
    sizes: Mapping[int, int],
    keep_last: int,
    keep_every: int | None = None,
    most_bytes: int | None = None,
    bests: Mapping[int, int | None] | None = None,
) -> set[int]:
    """The steps of the complete checkpoints to keep; ``sizes`` has the size of each in bytes, by step.

    Kept are the ``keep_last`` newest, and those whose step is a multiple of ``keep_every``. While these and another one
    of the newest's size exceed ``most_bytes``, the oldest is dropped. The newest is always kept.

    ``bests`` has the step of the best checkpoint as of each, which is kept with it.
    """

    def with_bests(steps: Sequence[int]) -> set[int]:
        found = (bests.get(step) for step in steps) if bests else ()
        return {*steps, *(best for best in found if best in sizes and best is not None)}

    newest_first = sorted(sizes, reverse=True)
    chosen = newest_first[:keep_last]
    chosen += [step for step in newest_first[keep_last:] if keep_every and step % keep_every == 0]
    if most_bytes is not None:  # the next one is complete before an old one is removed
        while len(chosen) > 1 and sum(sizes[step] for step in [*with_bests(chosen), chosen[0]]) > most_bytes:
            chosen.pop()
    return with_bests(chosen)


def most_held(num_steps: int, save_every: int, keep_last: int, keep_every: int | None = None) -> int:
    """The maximum number of checkpoints that a run has at a time: those that are ``kept``, and the one being written.

    A run saves every ``save_every`` steps and at the last step. It has the most checkpoints at the last step.
    """
    num_before = -(-num_steps // save_every) - 1
    older = max(0, num_before - keep_last)
    marked = older * save_every // math.lcm(save_every, keep_every) if keep_every else 0
    return min(num_before, keep_last) + marked + 1


_STATE = 12  # fp32 masters and two moments


def bytes_held(spec: RunSpec, shape: T5Shape, ranks: range) -> int:
    """The maximum disk space, in bytes, that the run's checkpoints take at a time on a disk to which ``ranks`` write.

    This counts the checkpoints that ``storage`` allows, and the one that is written before an old one is removed. One
    of them may also include files that were copied to the disk for the ranks to resume from.
    """
    written, whole = _bytes(spec, shape, ranks), _bytes(spec, shape, range(spec.cluster.ranks))
    storage = spec.storage
    count: float = _most_held_by(spec)
    if storage.checkpoint_bytes is not None:  # per disk; the head has whole checkpoints, and all keep the same steps
        count = min(count, max(3 if spec.evaluate.best_metric else 2, storage.checkpoint_bytes / whole))
    return round(count * written) + _bytes(spec, shape, ranks, is_read=True) - written


def _most_held_by(spec: RunSpec) -> int:
    """``most_held``; if a best checkpoint is chosen, an upper bound: validations save too, and keep one more each."""
    storage, steps = spec.storage, spec.optimizer.num_steps
    if spec.evaluate.best_metric is None:
        return most_held(steps, storage.checkpoint_every_steps, storage.keep_last, storage.keep_every_steps)
    save_every = math.gcd(storage.checkpoint_every_steps, storage.validate_every_steps)
    kept_before = most_held(steps, save_every, storage.keep_last, storage.keep_every_steps) - 1
    return min(2 * kept_before, -(-steps // save_every) - 1) + 1


def bytes_of_one(spec: RunSpec, shape: T5Shape) -> int:
    """The size of one checkpoint in bytes, on a disk to which all ranks write."""
    return _bytes(spec, shape, range(spec.cluster.ranks))


def bytes_written(spec: RunSpec, shape: T5Shape, ranks: range) -> int:
    """The size in bytes of the files of one checkpoint that ``ranks``, which share a disk, write to it."""
    return _bytes(spec, shape, ranks)


def _bytes(spec: RunSpec, shape: T5Shape, ranks: range, is_read: bool = False) -> int:
    """The size in bytes of the files of one checkpoint that ``ranks`` write or, if ``is_read``, read."""
    weight = 4 if spec.optimizer.precision == "fp32" else 2
    if spec.layout.pipeline_stages > 1:
        return _of_stages(spec, shape, ranks, weight, is_read)
    parameters, experts = count_trained(shape, spec.finetune.lora), count_expert_parameters(shape)
    if spec.layout.zero_stage == 0:
        return (_STATE + weight % 4) * parameters  # in fp32, the weights are the masters
    state = len(ranks) * -(-_STATE * parameters // spec.cluster.ranks)
    if spec.layout.zero_stage == 3:
        return state
    size = spec.layout.expert_parallel_size
    holders = min(len(ranks), size) if is_read else len(range(ranks.start, min(ranks.stop, size)))
    return state + weight * (parameters - experts + holders * experts // size)


def _of_stages(spec: RunSpec, shape: T5Shape, ranks: range, weight: int, is_read: bool) -> int:
    """As ``_bytes``, for a pipeline. The first rank of a stage writes the stage's weights; all its ranks read them."""
    parameters = stage_parameters(shape, spec.layout.pipeline_stages, geometry(spec.objective))
    size = spec.data_parallel_size
    state = sum(-(-_STATE * parameters[rank // size] // size) for rank in ranks)
    stages = {rank // size for rank in ranks if is_read or rank % size == 0}
    return state + weight * sum(parameters[stage] for stage in stages)
