"""The program that ranks run in test_memory_estimate.py: it measures the peak bytes of live tensors in a training step.

``python memory_program.py JOBS`` reads the JSON file JOBS, ``[{"name", "spec", "shards", "run_folder", "is_fused"}]``,
and writes ``{name}.rank-{rank}.json`` beside it for each job.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from t5train.data.samples.loader import Prefetched
from t5train.engine.deepspeed_config import BUCKET_ELEMENTS
from t5train.engine.gradient_accumulation import Fp32Sums
from t5train.engine.gradient_reduction import GradientReduction
from t5train.engine.optimizer import AdamWRms
from t5train.train import loop
from tests.support.training import rank_main
from tests.support.training.fused_ranks import fused

INTERPRETED_ELEMENTS = 1 << 16
Tensors = Sequence[weakref.ref[torch.Tensor]]


def _report(entry: dict[str, Any]) -> dict[str, int]:
    with _fused() if entry["is_fused"] else nullcontext():
        return {"bytes": _peak_bytes(entry)}


@contextmanager
def _fused() -> Iterator[None]:
    """The fused update with large chunks: the interpreter takes milliseconds for each. They cost no other memory."""
    from t5train.engine import partition_update  # needs Triton

    with (
        fused(BUCKET_ELEMENTS),
        mock.patch.object(partition_update, "CHUNK_ELEMENTS", INTERPRETED_ELEMENTS),
        mock.patch.object(partition_update, "_BLOCK_ELEMENTS", INTERPRETED_ELEMENTS),
    ):
        yield


def _peak_bytes(entry: dict[str, Any]) -> int:
    """The peak of bytes in live tensors, beyond those that were live before the trainer was made.

    It is sampled in two steps, because the first one makes the moments: after gradients are summed, before they are
    reduced and, with the fused update, at the end of that; when the optimizer starts, and while the fused update runs.
    Never during a backward pass, in which activations are alive.
    """
    before, seen = _live_bytes(), [0]
    trainer = loop.Trainer(rank_main.job_of(entry))
    gc.collect()
    earlier = [weakref.ref(tensor) for tensor in _tensors()]
    gc.freeze()  # gc then skips the objects that exist now, which saves a second per sample
    watched = [(Fp32Sums, "hand_over"), (DeepSpeedEngine, "allreduce_gradients"), (AdamWRms, "_rms")]
    if entry["is_fused"]:
        from t5train.engine.fused_update import FusedUpdate  # needs Triton

        watched += [(FusedUpdate, "_settings"), (GradientReduction, "finish")]
    with ExitStack() as stack:
        for owner, name in watched:
            stack.enter_context(_watched(owner, name, seen, earlier))
        batches = stack.enter_context(Prefetched(loop.micro_batches(trainer.dataset.train, trainer.spec, 0), 1))
        trainer._take_step(batches)
        trainer._take_step(batches)
    gc.unfreeze()
    return max(seen) - before


def _watched(owner: type, name: str, seen: list[int], earlier: Tensors) -> Any:
    original: Callable[..., Any] = getattr(owner, name)

    def sample_first(*arguments: Any, **options: Any) -> Any:
        seen.append(_live_bytes(earlier))
        return original(*arguments, **options)

    return mock.patch.object(owner, name, sample_first)


def _tensors() -> list[torch.Tensor]:
    """Live tensors, except those that ``gc.freeze`` hides."""
    return [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]


def _live_bytes(earlier: Tensors = ()) -> int:
    """Bytes of all live tensors. ``earlier`` are tensors that ``gc.freeze`` hides; they count while they are alive."""
    gc.collect()
    tensors = _tensors() + [tensor for each in earlier if (tensor := each()) is not None]
    hidden = [getattr(tensor, name, None) for tensor in tensors for name in ("ds_tensor", "grad_accum")]
    hidden += [tensor.grad for tensor in tensors if tensor.is_leaf]
    storages = [tensor.untyped_storage() for tensor in [*tensors, *hidden] if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    rank_main.run_jobs(_report)
