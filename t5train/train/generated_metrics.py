"""Scores of what the model generates for held-out pairs while training pauses, by which the best checkpoint is chosen.

All ranks decode with transformers, from the fp32 weights that the witness of this step would record. Nothing is read
from disk, and nothing is drawn at random or decided by the clock, so a run that resumes finds the same scores.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.engine.collectives import gather, gather_floats, rank, ranks_of_node, world_size
from t5train.errors import DigestMismatch
from t5train.inference.model_folder import quiet_transformers
from t5train.inference.predict.batch_plan import BatchLimits, batch_plan, with_margin
from t5train.inference.score.row_statistics import EXACT_MATCH, metrics_of, scores_of, statistics_of
from t5train.inference.text.decoding import GenerationSpec
from t5train.model.model_shape import T5Shape, cache_whole_decoder, generation_config
from t5train.progress import silent
from t5train.records.metrics import GENERATED, PREDICT_SHARE, PREDICTED_PAIRS, Values
from t5train.spec.rank_job import TrainJob
from t5train.train.witness_recording import published

_BATCH_TOKENS, _BATCH_TOKENS_ON_CPU = 1 << 13, 1 << 10
"""A large batch takes an accelerator hardly longer than a small one. For a CPU it does, so ranks share small ones."""
_NAMES = ("bleu", "chrf", "rougeL", EXACT_MATCH)
"""What ``t5train.inference.score`` calls the scores in GENERATED."""
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
        from transformers import T5Config, T5ForConditionalGeneration  # slow, so not while training pauses

        self._job, self._shape, self._config = job, shape, config
        self._new_model = partial(T5ForConditionalGeneration, T5Config.from_dict(config))
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

    def measure(self, engine: Any) -> tuple[Values, Values]:
        """Return the scores of the engine's weights, and how long training paused for how many pairs.

        A collective of all ranks, which share the batches out.
        """
        started = time.perf_counter()
        device = get_accelerator().current_device_name()
        if (sums := self._sums(engine, device, range(world_size()))) is None:
            _log.warning("%s has too little memory for predictions beside training: they are made on the CPU", device)
            of_nodes = {first for (first,) in gather([min(ranks_of_node())])}  # a host may not hold a model per rank
            sums = self._sums(engine, "cpu", sorted(of_nodes))
        names = chain.from_iterable(metric.names for metric in self._metrics)
        found = dict(zip(names, scores_of(self._metrics, sums, len(self._sample.references)), strict=True))
        scores: Values = {of: found[name] for of, name in zip(GENERATED, _NAMES, strict=True)}
        ended = time.perf_counter()
        self._paused += ended - started
        pairs, share = len(self._sample.references), self._paused / (ended - self._began)
        return scores, {"predict_seconds": ended - started, PREDICT_SHARE: share, PREDICTED_PAIRS: pairs}

    def _sums(self, engine: Any, device: str, decoders: Sequence[int]) -> Any:
        """Return the sums of the sample's statistics, [columns], or None if a device had too little memory.

        The statistics are whole numbers, so it does not matter which of the ranks ``decoders`` adds which.
        """
        weights = self._weights(engine, device if rank() in decoders else None)
        own, is_complete = np.zeros(sum(metric.columns for metric in self._metrics)), rank() not in decoders
        if weights is not None:
            with suppress(torch.OutOfMemoryError):
                own, is_complete = self._of_share(weights, device, decoders.index(rank()), len(decoders)), True
        del weights
        get_accelerator().empty_cache()
        everybody = gather_floats([is_complete, *own])
        return np.sum(everybody, axis=0)[1:] if all(row[0] for row in everybody) else None

    def _weights(self, engine: Any, device: str | None) -> dict[str, Tensor] | None:
        """Copy each weight to a device at once, so that host memory never holds the model. All ranks take part in each.

        Returns None without a device, or if it has too little memory.
        """
        weights: dict[str, Tensor] | None = None if device is None else {}
        for name, master in published(engine, self._job, self._shape, on_all_ranks=True):
            if weights is not None:
                try:
                    weights[name] = master.to(device)
                except torch.OutOfMemoryError:
                    weights = None
        return weights

    def _of_share(self, weights: dict[str, Tensor], device: str, part: int, parts: int) -> np.ndarray:
        """Return the sums of the statistics of every batch whose number, modulo ``parts``, is ``part``."""
        sums, references = np.zeros(sum(metric.columns for metric in self._metrics)), self._sample.references
        for rows, ids in self._decoded(self._model(weights, device), part, parts):
            of_rows = [references[row] for row in rows]
            sums += statistics_of(self._metrics, self._vocabulary.texts_of(ids), of_rows, silent).sum(axis=0)
        return sums

    def _model(self, weights: dict[str, Tensor], device: str) -> Any:
        from transformers import GenerationConfig

        with quiet_transformers(), torch.device("meta"):  # draws no random numbers
            model = self._new_model()
        missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
        model.tie_weights(missing_keys=set(missing), recompute_mapping=False)  # an untied output layer is not missing
        cache_whole_decoder(model.config)
        model.generation_config = GenerationConfig(**generation_config(self._config))
        return model.eval().to(device)

    def _decoded(self, model: Any, part: int, parts: int) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Yield the pairs of each batch of a part, and the ids generated for them, up to EOS.

        Batches depend on the kind of device, but not on the number of parts.
        """
        settings, sample, pad = self._job.spec.evaluate, self._sample, self._config["pad_token_id"]
        most = settings.max_new_tokens or with_margin(sample.longest_reference)
        spec = GenerationSpec(most, num_beams=settings.num_beams, length_penalty=settings.length_penalty)
        batch_tokens = _BATCH_TOKENS_ON_CPU if model.device.type == "cpu" else _BATCH_TOKENS
        limits = BatchLimits(batch_tokens, len(sample.lengths) * spec.num_beams, spec.num_beams, most)
        plan = batch_plan(sample.lengths, limits)
        for number in range(part, len(plan.starts) - 1, parts):
            rows = plan.rows_of(number)
            sources = torch.from_numpy(sample.sources[rows, : sample.lengths[rows].max()]).long().to(model.device)
            with quiet_transformers(), torch.inference_mode():
                ids = model.generate(sources, attention_mask=(sources != pad).long(), **spec.options())
            yield rows.tolist(), list(map(self._until_eos, ids[:, 1:].tolist()))

    def _until_eos(self, ids: list[int]) -> list[int]:
        eos = self._config["eos_token_id"]
        return ids[: ids.index(eos)] if eos in ids else ids
