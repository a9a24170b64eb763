"""Scores of what the model generates for held-out pairs while training pauses, by which the best checkpoint is chosen.

Rank 0 decodes with transformers, from the fp32 weights that the witness of this step would record. Nothing is read from
disk, and nothing is drawn at random, so a run that resumes finds the same scores.
"""

import logging
import time
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.engine.collectives import gather_floats, rank
from t5train.errors import DigestMismatch
from t5train.inference.model_folder import quiet_transformers
from t5train.inference.predict.batch_plan import batch_plan, with_margin
from t5train.inference.score.row_statistics import EXACT_MATCH, metrics_of, scores_of, statistics_of
from t5train.inference.text.decoding import GenerationSpec
from t5train.model.model_shape import T5Shape, generation_config
from t5train.progress import silent
from t5train.records.metrics import Values
from t5train.spec.evaluate_spec import GENERATED
from t5train.spec.rank_job import TrainJob
from t5train.train.witness_recording import published

_BATCH_TOKENS = 1 << 13
_WARNING_SHARE = 0.1
_log = logging.getLogger(__name__)


class _Sample(NamedTuple):
    """Held-out sources, int32 [pairs, tokens] and how long each is, int64 [pairs]; and their references."""

    sources: np.ndarray
    lengths: np.ndarray
    references: list[str]
    longest_reference: int


class GeneratedMetrics:
    """Scores of generated text for one run. Raises InputError without the packages of the extra ``score``."""

    def __init__(self, job: TrainJob, shape: T5Shape, held_out: PairSamples, config: dict[str, Any]) -> None:
        """Take the sample. ``config`` is the content of config.json. Raises DigestMismatch for another vocabulary."""
        self._job, self._shape, self._config = job, shape, config
        proto = job.vocabulary or b""
        if sha256(proto).hexdigest() != job.shards().inputs["vocabulary"]:
            raise DigestMismatch(
                "the vocabulary in this attempt's job is not that of the pair shards: start the run again"
            )
        self._vocabulary = Tokenizer(proto)
        self._metrics = metrics_of(0, 0)
        self._sample = self._taken(held_out)
        self._began, self._paused = time.perf_counter(), 0.0

    def _taken(self, held_out: PairSamples) -> _Sample:
        batch = held_out.batch(0, min(held_out.num_samples, self._job.spec.evaluate.best_pairs))
        assert batch.segments is not None  # noqa: S101 - for the type checker: batches of pairs have segments
        lengths = (batch.segments.inputs > 0).sum(axis=1)
        # Unknown pieces are kept, so that what lacks them is not taken for the whole text.
        references = self._vocabulary.texts_of(batch.targets.tolist(), unknown=True)
        return _Sample(batch.inputs, lengths, references, int((batch.segments.targets > 0).sum(axis=1).max()))

    def measure(self, engine: Any) -> Values:
        """Return the scores of the engine's weights. A collective of all ranks, which wait for rank 0."""
        started = time.perf_counter()
        masters = published(engine, self._job, self._shape)
        weights = {name: master for name, master in masters if rank() == 0}  # all ranks take part in each
        scores = self._scores(weights) if rank() == 0 else [0.0] * len(GENERATED)
        found = dict(zip(GENERATED, gather_floats(scores)[0], strict=True))
        self._note_pause(time.perf_counter() - started)
        return dict(found)

    def _note_pause(self, seconds: float) -> None:
        self._paused += seconds
        share = self._paused / (time.perf_counter() - self._began)
        level = logging.WARNING if share > _WARNING_SHARE and rank() == 0 else logging.INFO
        _log.log(
            level,
            "predicting took %.1f s, and %.0f%% of the time so far: evaluate.best_pairs and "
            "storage.validate_every_steps bound it",
            *(seconds, 100 * share),
        )

    def _scores(self, weights: dict[str, Tensor]) -> list[float]:
        hypotheses = self._vocabulary.texts_of(self._generated(weights))
        references = self._sample.references
        sums = statistics_of(self._metrics, hypotheses, references, silent).sum(axis=0)
        names = chain.from_iterable(metric.names for metric in self._metrics)
        found = dict(zip(names, scores_of(self._metrics, sums, len(references)), strict=True))
        return [found[name] for name in ("bleu", "chrf", "rougeL", EXACT_MATCH)]

    def _generated(self, weights: dict[str, Tensor]) -> list[list[int]]:
        model, device = self._model(weights), get_accelerator().current_device_name()
        try:
            return self._decoded(model.to(device))
        except torch.OutOfMemoryError:
            _log.warning("%s has too little memory for predictions beside training: they are made on the CPU", device)
        model.to("cpu")
        get_accelerator().empty_cache()
        return self._decoded(model)

    def _model(self, weights: dict[str, Tensor]) -> Any:
        from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

        with quiet_transformers():
            # Copies no weights and draws no random numbers. Unlike load_state_dict, it leaves an output layer untied.
            model = T5ForConditionalGeneration.from_pretrained(
                None, config=T5Config.from_dict(self._config), state_dict=weights, dtype=torch.float32
            )
            model.generation_config = GenerationConfig(**generation_config(self._config))
        return model.eval()

    def _decoded(self, model: Any) -> list[list[int]]:
        """Return the ids generated for each source, up to EOS. Batches do not depend on the number of ranks."""
        settings, sample, pad = self._job.spec.evaluate, self._sample, self._config["pad_token_id"]
        most = settings.max_new_tokens or with_margin(sample.longest_reference)
        spec = GenerationSpec(num_beams=settings.num_beams, length_penalty=settings.length_penalty)
        plan, found = batch_plan(sample.lengths, _BATCH_TOKENS, spec.num_beams, most), dict[int, list[int]]()
        for number in range(len(plan.starts) - 1):
            rows = plan.rows_of(number)
            sources = torch.from_numpy(sample.sources[rows, : sample.lengths[rows].max()]).long().to(model.device)
            with quiet_transformers(), torch.inference_mode():
                ids = model.generate(sources, attention_mask=(sources != pad).long(), **spec.options(most))
            found.update(zip(rows.tolist(), map(self._until_eos, ids[:, 1:].tolist()), strict=True))
        return [found[row] for row in range(len(found))]

    def _until_eos(self, ids: list[int]) -> list[int]:
        eos = self._config["eos_token_id"]
        return ids[: ids.index(eos)] if eos in ids else ids
