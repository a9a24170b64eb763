"""DeepSpeed's pipeline engine, changed to keep the copies of a tied weight equal to the last bit."""

from typing import Any, ClassVar

from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import engine, schedule

from t5train.engine.gradient_accumulation import Fp32Sums
from t5train.model.pipeline_model import T5Pipeline


class PipelineEngine(engine.PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """An engine for one pipeline stage."""

    def __init__(self, model: T5Pipeline, optimizer: Any, config: dict[str, Any], sums: Fp32Sums | None) -> None:
        """If ``sums`` is given, a step takes its gradients from it after the last pass."""
        mpu = model.mpu()
        whole = DeepSpeedConfig(config, mpu)
        super().__init__(args=None, model=model, optimizer=optimizer, mpu=mpu, config=config, config_class=whole)
        self._sums = sums
        self._holders = {key: comm.new_group(ranks) for key, ranks in sorted(_holders(model).items())}

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of a tied weight over its copies in all stages of all model replicas at once.

        DeepSpeed would sum over the stages of each replica, and every stage would then average over replicas in its own
        buckets. Different buckets may add in a different order, so the copies would drift apart. After the sum here,
        the average is one of equal numbers, in any order. All stages process shared modules in the order of their keys;
        in the order of layers, two stages could deadlock.
        """
        if self._sums:
            self._sums.hand_over()
        for key, tied in sorted(self.module.tied_comms.items()):
            if len(tied["ranks"]) > 1:
                for weight in tied["module"].parameters():
                    weight.grad.div_(self.dp_world_size)
                    comm.all_reduce(weight.grad, group=self._holders[key])

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **engine.PipelineEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
    }


def _holders(model: T5Pipeline) -> dict[str, list[int]]:
    """Return the ranks that hold a copy of each tied module, in all model replicas."""
    grid = model.mpu()
    return {
        key: sorted(
            grid.stage_to_global(stage_id=stage, data=copy)
            for stage in stages
            for copy in range(grid.get_data_parallel_world_size())
        )
        for key, stages in model.tied_stages().items()
    }
