"""The training loop, which every rank runs from the start of its job to the last step, or until it is asked to stop."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from t5train.checkpoint import saving
from t5train.checkpoint.host_copies import fit_in_memory
from t5train.checkpoint.running_save import RunningSave
from t5train.checkpoint.state_loading import StoredState, fill_of
from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.samples.loader import PREFETCHED_BATCHES, Batch, Prefetched, Samples
from t5train.data.samples.span_corruption import row_lengths
from t5train.data.vocabulary.held_out import read_held_out
from t5train.engine.collectives import bits_of, data_rank, digest64, float_of, gather, rank
from t5train.engine.engine import (
    accelerator_memory_bytes,
    build_engine,
    model_of,
    peak_host_memory_bytes,
    set_learning_rate,
)
from t5train.engine.expert_routing import Routing
from t5train.engine.forward_backward import Passes, passes_of
from t5train.engine.partitions import master_groups_of
from t5train.errors import Preempted
from t5train.files.heartbeat import Heartbeat
from t5train.files.run_folder import tag_of
from t5train.model.model_shape import T5Shape, huggingface_config, resolve
from t5train.records.metrics import Metrics, Values, loss_curve_points
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from t5train.train import sanity_checks, witness_recording
from t5train.train.datasets.dataset import Dataset, Measured
from t5train.train.datasets.opening import open_dataset
from t5train.train.generated_metrics import GeneratedMetrics
from t5train.train.learning_rate import learning_rate
from t5train.train.peak_flops import accelerator_peak_flops, utilization
from t5train.train.step_profile import StepProfile
from t5train.train.wandb_sync import SyncJob, WandbProcess

_log = logging.getLogger(__name__)


class Trainer:
    """One rank's part of an attempt at a run."""

    def __init__(
        self, job: TrainJob, heart: Heartbeat | None = None, is_stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        """Load state and build the engine.

        ``heart`` reports the phases of the work. ``is_stop_requested`` returns whether this rank was asked to stop.
        """
        self.job, self.spec, self.is_stop_requested = job, job.spec, is_stop_requested
        self.heart = heart or Heartbeat(None, dict(job.spec.cluster.deadlines))
        self.heart.enter("compile", 0)
        self.dataset: Dataset = open_dataset(job.spec, job.shards_folder)
        self.shards = self.dataset.shards
        self.shape: T5Shape = resolve(self.spec.model, int(self.shards.counts["vocab_size"]))
        pad_id, eos_id = int(self.shards.counts["pad_id"]), int(self.shards.counts["eos_id"])
        self.huggingface_config = huggingface_config(self.shape, pad_id, eos_id)
        self.generated = None
        if self.spec.evaluate.generates and isinstance(self.dataset.held_out, PairSamples):
            self.generated = GeneratedMetrics(job, self.shape, self.dataset.held_out, self.huggingface_config)
        read_held_out(job.shards_folder)  # needed only for the witness at the end, but any error should be raised now
        # For dropout: different on every rank, the same in every run. Weights and samples have their own seeds.
        torch.manual_seed((self.spec.optimizer.seed << 20) + rank())
        stored = StoredState.of(job, self.shape)
        fill = fill_of(job, self.shape, stored)
        self.engine: Any = build_engine(self.spec, self.shape, pad_id, fill, job.node_local, job.decays_all)
        self.step = saving.resume(self.engine, job, stored)
        self.best = saving.best_so_far(job) if self.spec.evaluate.best_metric else None
        self._validated: _Validated | None = None
        self._running_save = RunningSave(job, self.heart)
        self.peak_flops = accelerator_peak_flops(self.spec.optimizer.precision)
        self.routing = Routing(model_of(self.engine))
        self.passes: Passes = passes_of(self.engine, self.spec, self.routing)
        self.movement = sanity_checks.Movement(
            master_groups_of(self.engine), self._applied_steps(), self.spec.data_parallel_size, gather
        )

    def run(self) -> None:
        """Train to the last step, saving and validating on the way; then record the witness.

        If any rank was asked to stop, saves a checkpoint after the step and raises Preempted.
        """
        with ExitStack() as stack:
            metrics = None
            if rank() == 0:
                metrics = stack.enter_context(
                    Metrics(self.job.metrics_path, self.job.tensorboard_folder, self.step, self.job.csv_path)
                )
                if self.spec.monitor.wandb:  # after the lines that are trained again were removed
                    stack.enter_context(WandbProcess(SyncJob.of(self.job, self.step)))
                self._record_baseline(metrics)
            batches = Prefetched(micro_batches(self.dataset.train, self.spec, self.step), PREFETCHED_BATCHES)
            stack.enter_context(batches)
            folder = self.job.profiles_folder if metrics else None
            if profile := StepProfile.of(self.spec.profile, folder, self.step):
                stack.enter_context(profile)
            while not self._is_over():
                if profile:
                    profile.begin(self.step + 1)
                values, must_stop = self._take_step(batches)
                if profile and profile.end(self.step):
                    self._write(profile)
                if metrics:
                    metrics.write(self.step, values)
                if must_stop:
                    self._end_early(metrics)
                self._validate_when_due(metrics)
                self._save_when_due(metrics)
            self._conclude(metrics)

    def _is_over(self) -> bool:
        ends_early = self.best is not None and self.spec.evaluate.ends_training(self.best)
        return ends_early or self.step >= self.spec.optimizer.num_steps

    def _take_step(self, batches: Prefetched) -> tuple[Values, bool]:
        """Take a step. Returns its metrics, and whether any rank was asked to stop, which is the same on all ranks."""
        started, waited, self.step = time.perf_counter(), batches.waited_seconds, self.step + 1
        computed = time.process_time()
        self.heart.enter("step", self.step)
        rate = learning_rate(self.spec.optimizer, self.step)
        set_learning_rate(self.engine, rate)
        seen, real_tokens = list[bytes](), list[int]()
        result = self.passes.step(self._taken(batches, seen, real_tokens))
        own = [bits_of(result.loss), digest64(b"".join(seen)), self.is_stop_requested(), sum(real_tokens)]
        everybody = gather([*own, self._running_save.is_written()])
        loss = sum(float_of(row[0]) for row in everybody) / len(everybody)
        sanity_checks.require_finite(self.step, loss, result.gradient_norm)
        sanity_checks.require_distinct_batches(self.step, [row[1] for row in everybody], self.spec.data_parallel_size)
        sanity_checks.require_few_skips(self.step, self.engine.skipped_steps)
        if all(row[4] for row in everybody):
            self._running_save.conclude()
        seconds = time.perf_counter() - started
        values: Values = {
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "tokens_per_second": self._tokens_a_step() / seconds,
            "tokens_seen": self.step * self._tokens_a_step(),
            "skipped_steps": int(self.engine.skipped_steps),
            "memory_bytes": accelerator_memory_bytes(),
            "host_memory_bytes": peak_host_memory_bytes(),
            "seconds": seconds,
            "cpu_seconds": time.process_time() - computed,
            "process_cpu_seconds": time.process_time(),
            "data_wait_seconds": batches.waited_seconds - waited,
            **({"real_tokens_per_second": real / seconds} if (real := sum(row[3] for row in everybody)) else {}),
            **self._utilization(seconds),
            **self.routing.of_step(result.router_loss),
        }
        return values, any(row[2] for row in everybody)

    def _taken(self, batches: Prefetched, seen: list[bytes], real_tokens: list[int]) -> Iterator[Batch]:
        """Yield the micro-batches of this step. Adds the identities of their samples, and their tokens of pairs."""
        for _ in range(self.spec.gradient_accumulation):
            batch = next(batches)
            seen.append(sanity_checks.identity_of(batch.sample_ids, batch.epochs))
            if batch.segments:
                real_tokens += [int((side > 0).sum()) for side in (batch.segments.inputs, batch.segments.targets)]
            yield batch

    def _validate_when_due(self, metrics: Metrics | None) -> None:
        is_last = self.step == self.spec.optimizer.num_steps
        if not self._is_judged() if is_last else self.step % self.spec.storage.validate_every_steps:
            return
        started = time.perf_counter()
        validated = self._validate()
        seconds: Values = {"validate_seconds": time.perf_counter() - started}
        if self.generated is not None:
            self.heart.enter("predict", self.step)
            scores, paused = self.generated.measure(self.engine)
            seconds |= paused
            validated = validated._replace(found=validated.found._replace(values=validated.found.values | scores))
        self._report(metrics, validated.found.values | seconds | validated.routing)
        self._report_experts(metrics)
        evaluate = self.spec.evaluate
        if self.best is not None and evaluate.best_metric is not None:
            value = validated.found.values[evaluate.best_metric]
            self.best, self._validated = self.best.after(self.step, value, evaluate.is_higher_better), validated

    def _is_judged(self) -> bool:
        """Whether this step is validated to choose the best checkpoint. It is then also saved, with the choice."""
        is_due = self.step % self.spec.storage.validate_every_steps == 0
        return self.best is not None and (is_due or self.step == self.spec.optimizer.num_steps)

    def _validate(self) -> "_Validated":
        """Validate, and check that the loss is finite: no other check has used the weights since their last update."""
        self.heart.enter("validate", self.step)
        found = self.dataset.validate(self.passes)
        sanity_checks.require_finite(self.step, float(found.values["validation_loss"] or 0), None)
        return _Validated(found, self.routing.of_validation())

    def _save_when_due(self, metrics: Metrics | None) -> None:
        last = self.step == self.spec.optimizer.num_steps
        if last or self._is_judged() or self.step % self.spec.storage.checkpoint_every_steps == 0:
            self._save(metrics, may_go_on=not last)

    def _save(self, metrics: Metrics | None, *, may_go_on: bool) -> None:
        """Save a checkpoint, and report how long training waited.

        If training ``may_go_on`` while files are written, it only waits until all ranks have copied their states. It
        also waits for the checkpoint before this one.
        """
        started = time.perf_counter()
        self._finish_save()
        self.heart.enter("save", self.step)
        self.movement.require(self.step, self._applied_steps())
        is_best = self.best is not None and self.best.step == self.step
        record = partial(self._record_witness, metrics, self._validated) if is_best and self._validated else None
        is_copied = may_go_on and fit_in_memory(self.spec, self.shape, records_witness=record is not None)
        described = saving.Described(self.huggingface_config, self.shards.fingerprint, self.best)
        write = saving.begin(self.engine, self.job, self.step, described, record, is_copied=is_copied)
        self._running_save.begin(self.step, write)
        if not is_copied:
            self._running_save.finish()
        self._report(metrics, {"save_seconds": time.perf_counter() - started})

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, for as long as a save may take."""
        self.heart.enter("save", self.step)
        self._running_save.finish()

    def _write(self, profile: StepProfile) -> None:
        """Write rank 0's trace. The others wait here, where they are allowed as much time as for a save."""
        self.heart.enter("save", self.step)
        profile.write()
        gather([self.step])

    def _end_early(self, metrics: Metrics | None) -> NoReturn:
        if self._is_judged():  # training that resumes after this step does not return to it
            self._validate_when_due(metrics)
        self._save(metrics, may_go_on=False)
        raise Preempted(
            f"the ranks were asked to stop (SIGTERM). They stopped after step {self.step} and saved it: run the same "
            "command again to resume from it"
        )

    def _conclude(self, metrics: Metrics | None) -> None:
        self._finish_save()
        if self.best is None:  # otherwise the best checkpoint has its witness
            validated = self._validate()
            self._record_witness(metrics, validated, self.job.witness_folder)
            self._report_experts(metrics)

    def _record_witness(self, metrics: Metrics | None, validated: "_Validated", folder: Path) -> None:
        """Measure what is not measured at every validation, and record the witness with all of it."""
        self.heart.enter("validate", self.step)
        summary: Values = {
            **validated.found.values,
            **self.dataset.shuffled(self.passes),
            **(self.dataset.baseline() if metrics else {}),
            **validated.found.counts,
            **validated.routing,
            **self.dataset.test(self.passes),
        }
        self._report(metrics, summary)
        inputs = {**self.shards.inputs, "shards": self.shards.fingerprint}
        if self.job.start_fingerprint is not None:
            inputs["start_from"] = self.job.start_fingerprint
        facts = {
            "run_fingerprint": self.job.run_fingerprint,
            "step": self.step,
            "tag": tag_of(self.step),
            "inputs": inputs,
            "validation": summary,
            "curve": loss_curve_points(self.job.metrics_path) if metrics else {},
        }
        self.heart.enter("save", self.step)
        record = partial(witness_recording.record, self.engine, self.job, self.shape, self.dataset)
        record(self.huggingface_config, facts, folder)

    def _record_baseline(self, metrics: Metrics) -> None:
        """Record the loss that the model has to beat, unless an earlier attempt at the run has recorded the same."""
        baseline = self.dataset.baseline()
        if not baseline.items() <= metrics.recorded.items():
            metrics.write(self.step, dict(baseline))

    def _report(self, metrics: Metrics | None, values: Values) -> None:
        if metrics:
            metrics.write(self.step, values)
            _log.info("step %d: %s", self.step, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def _report_experts(self, metrics: Metrics | None) -> None:
        """Write statistics of experts to the metrics. They are not logged, because there are too many numbers."""
        if metrics and (values := self.routing.of_experts()):
            metrics.write(self.step, values)

    def _applied_steps(self) -> int:
        """Return the number of steps so far that changed the weights. If a cosine ends at zero, the last does not."""
        stands_still = self.step > 0 and learning_rate(self.spec.optimizer, self.step) == 0
        return self.step - int(self.engine.skipped_steps) - stands_still

    def _utilization(self, seconds: float) -> Values:
        """Return ``mfu``, the share of the accelerators' peak that a step of this duration used; empty if unknown."""
        used = utilization(self.spec, self.shape, seconds, self.peak_flops)
        return {} if used is None else {"mfu": used}

    def _tokens_a_step(self) -> int:
        return self.spec.optimizer.global_batch_sequences * sum(row_lengths(self.spec))


class _Validated(NamedTuple):
    """The results of a validation, and how its tokens were routed to experts."""

    found: Measured
    routing: Values


def micro_batches(samples: Samples | PairSamples, spec: RunSpec, step: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches from the step after ``step`` to the last. They depend only on the step."""
    whole = spec.optimizer.global_batch_sequences
    for done in range(step, spec.optimizer.num_steps):
        targets = samples.targets_of(done * whole, whole) if isinstance(samples, PairSamples) else 0
        for micro in range(spec.gradient_accumulation):
            batch = samples.batch(first_sample(spec, done, micro), spec.layout.micro_batch_sequences)
            if batch.segments:
                batch = batch._replace(segments=batch.segments._replace(global_targets=targets))
            yield batch


def first_sample(spec: RunSpec, done: int, micro: int) -> int:
    """Return the index, in the endless order, of the first sample of micro-batch ``micro`` in step ``done + 1``."""
    within = (micro * spec.data_parallel_size + data_rank(spec)) * spec.layout.micro_batch_sequences
    return done * spec.optimizer.global_batch_sequences + within
