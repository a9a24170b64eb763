"""Evaluation of a T5 on text: its loss and accuracy at span corruption, next to the unigram baseline."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from t5train.data.passages import SourceFile, Split
from t5train.data.samples.loader import HELD_OUT_SEED, noise_keys
from t5train.data.samples.span_corruption import Geometry, corrupt, geometry, is_content
from t5train.data.sources import PYDOCS, local_files, write_pydocs
from t5train.errors import InputError, SpecError
from t5train.inference.model_folder import ModelFolder, Vocabulary, chosen_device
from t5train.inference.text.evaluation_text import (
    EvaluationText,
    drawn_as_in_validation,
    read_windows,
    split_text,
    start_of_text,
    whole_text,
)
from t5train.progress import Progress, silent
from t5train.release.model_card import RecordedRun
from t5train.spec import CorpusSpec, ObjectiveSpec, ShardsSpec, StorageSpec
from t5train.spec.settings import explain

_log = logging.getLogger(__name__)


class EvaluationSpec(NamedTuple):
    """What to evaluate on. What is left out is as in training if the folder records it, else as for T5.

    Without ``split``, the whole text is used; with it, only the passages that training would put into that split.
    ``max_sequences`` takes the first sequences. Of the validation and the test split, which are read whole, it takes
    those that a run with that ``storage.validate_sequences`` measures, drawn from all of the split. ``seed`` changes
    their masks, but not which they are.
    """

    noise_density: float | None = None
    mean_span_tokens: float | None = None
    input_tokens: int | None = None
    split: Split | None = None
    batch_sequences: int = 8
    max_sequences: int | None = None
    seed: int = HELD_OUT_SEED


_USUAL = EvaluationSpec()


class Evaluation(NamedTuple):
    """Losses in nats per token and shares of what the model predicts rightly, given all earlier target tokens.

    All are of masked tokens, so without sentinels and the closing EOS, except ``all_targets_loss``. ``unigram_loss`` is
    the unigram baseline: the loss of a model that knows only how often each token occurs in the rest of the text.
    ``span_accuracy`` is the share of masked spans of which every token is predicted rightly.

    ``loss_per_byte`` can be compared between vocabularies. It is the sum of the losses of the masked tokens that spell
    text, in nats, divided by ``masked_bytes``: the bytes that they spell in UTF-8, after the vocabulary's
    normalisation, with each ``\u2581`` as a space. Ends of documents and the ``unknown_tokens`` spell nothing, and
    count in neither. It is None if nothing was spelled. ``bits_per_byte`` is the same in bits.

    ``split_as_trained`` is whether the validation or test split has as many tokens as it had in training: if not, its
    text is different, and training may have used some of its passages. It is None for other text, and if the folder
    does not record that number.
    """

    loss: float
    perplexity: float
    all_targets_loss: float
    unigram_loss: float
    loss_per_byte: float | None
    bits_per_byte: float | None
    token_accuracy: float
    span_accuracy: float
    sequences: int
    tokens: int
    spans: int
    mean_span_tokens: float
    masked_bytes: int
    unknown_tokens: int
    passages: int
    split: Split | None
    split_as_trained: bool | None
    noise_density: float
    input_tokens: int
    seed: int
    device: str


def evaluate(
    path: Path,
    corpus: str,
    spec: EvaluationSpec = _USUAL,
    device: str | None = None,
    root: Path | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure how well a T5 fills in masked spans of a text, by the same rule as validation in training.

    The same arguments give the same result. Batches change it only by rounding.

    Args:
        path: Folder with config.json, safetensors and a vocabulary: an export of this project, or any other T5.
        corpus: Text to evaluate on: a path, pattern or fsspec URL, or ``pydocs``.
        spec: How text is masked, and how much of it is used.
        device: Device to use, such as ``cuda:1`` or ``cpu``; this machine's accelerator, if it has one, if left out.
        root: Root folder, in whose ``cache`` remote text is kept; the default one if left out.
        progress: Called with the number of passages or sequences tokenised, then of sequences evaluated.

    Returns:
        The measurements.

    Raises:
        InputError: The folder or the text cannot be used, or the text is too short.
        SpecError: The model is not a T5, or the settings of masking are not possible.

    """
    folder = ModelFolder.open(path)
    if folder.run.tasks:
        _log.warning(
            "this model was fine-tuned on pairs (%s): what follows is how well it fills gaps, which it was not trained "
            "for. Its card has the results of its tasks; for other pairs, use `t5-pretrain predict` and `score`",
            ", ".join(folder.run.tasks),
        )
    objective = _objective(folder.run.settings, spec)
    shape, vocabulary = geometry(objective), folder.vocabulary()
    text = _read(
        folder.run.settings, corpus, spec, shape, vocabulary, (root or StorageSpec().root).absolute(), progress
    )
    used = chosen_device(device)
    sums = _Sums(vocabulary, text)
    model = folder.load(used)
    for inputs, targets in _batches(text, shape, vocabulary, spec):
        sums.add(targets, *_predicted(model, inputs, targets))
        progress(f"sequences evaluated, loss (masked tokens) {sums.loss:.4f}", sums.sequences, len(text.windows))
    return Evaluation(
        loss=sums.loss,
        perplexity=math.exp(min(sums.loss, 700.0)),
        all_targets_loss=sums.all_targets / sums.targets,
        unigram_loss=sums.unigram / sums.tokens,
        loss_per_byte=sums.loss_per_byte,
        bits_per_byte=None if sums.loss_per_byte is None else sums.loss_per_byte / math.log(2),
        token_accuracy=sums.right / sums.tokens,
        span_accuracy=sums.right_spans / sums.spans,
        sequences=sums.sequences,
        tokens=sums.tokens,
        spans=sums.spans,
        mean_span_tokens=sums.tokens / sums.spans,
        masked_bytes=sums.bytes,
        unknown_tokens=sums.unknown,
        passages=text.passages,
        split=spec.split,
        split_as_trained=_split_as_trained(folder.run, spec.split, text),
        noise_density=objective.noise_density,
        input_tokens=objective.input_tokens,
        seed=spec.seed,
        device=used,
    )


def _objective(settings: dict[str, Any], spec: EvaluationSpec) -> ObjectiveSpec:
    asked = {name: getattr(spec, name) for name in ("noise_density", "mean_span_tokens", "input_tokens")}
    chosen = settings.get("objective", {}) | {name: value for name, value in asked.items() if value is not None}
    try:
        return ObjectiveSpec.model_validate(chosen)
    except ValidationError as error:
        raise SpecError(explain(error, ObjectiveSpec)) from None


def _read(
    settings: dict[str, Any],
    corpus: str,
    spec: EvaluationSpec,
    shape: Geometry,
    vocabulary: Vocabulary,
    root: Path,
    progress: Progress,
) -> EvaluationText:
    with TemporaryDirectory() as temporary:
        files = _files(corpus, Path(temporary), root, progress)
        window, most = shape.window_tokens, spec.max_sequences
        if spec.split is None and most is not None:
            return read_windows(start_of_text(files), vocabulary, window, most, progress)
        if spec.split is None:
            return read_windows(whole_text(files, progress), vocabulary, window)
        recorded = settings.get("corpus", {})
        rule = CorpusSpec.model_validate({key: recorded[key] for key in ("split", "split_seed") if key in recorded})
        shard_tokens = settings.get("shards", {}).get("shard_tokens", ShardsSpec().shard_tokens)
        if spec.split == "train" and most is not None:
            start = split_text(files, rule, spec.split, shard_tokens, progress)
            return read_windows(start, vocabulary, window, most, progress)
        sequences = split_text(files, rule, spec.split, shard_tokens, progress, reading=progress)
        return drawn_as_in_validation(read_windows(sequences, vocabulary, window), most)


def _split_as_trained(run: RecordedRun, split: Split | None, text: EvaluationText) -> bool | None:
    recorded = run.data.get(f"{split}_tokens")
    corpus = run.settings.get("corpus", {})
    if recorded is not None and (corpus.get("remove") or corpus.get("remove_listed")):
        _log.warning(
            "passages were removed from this model's training text (corpus.remove, remove_listed), but are in this "
            "one: its passages are cut into other sequences than in training, and its train split is larger"
        )
    if recorded is not None and corpus.get("mixed_with"):
        _log.warning(
            "this model was trained on a mixture of texts (corpus.mixed_with). Of one of them, the passages of a split "
            "are the same as in training if it has not changed, which cannot be compared here"
        )
        return None
    return None if recorded is None or split == "train" else recorded == int(text.counts.sum())


def _files(corpus: str, folder: Path, root: Path, progress: Progress) -> list[SourceFile]:
    if corpus != PYDOCS:
        return local_files(corpus, "", root, progress)
    write_pydocs(folder / "pydocs.jsonl", progress)
    return [SourceFile(folder / "pydocs.jsonl", "pydocs.jsonl")]


def _batches(
    text: EvaluationText, shape: Geometry, vocabulary: Vocabulary, spec: EvaluationSpec
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets.

    The noise of a window depends only on the seed and its number; with ``HELD_OUT_SEED``, it is that of validation.
    """
    for start in range(0, len(text.windows), spec.batch_sequences):
        batch = slice(start, start + spec.batch_sequences)
        key = noise_keys(spec.seed, np.zeros_like(text.numbers[batch]), text.numbers[batch])
        yield corrupt(text.windows[batch], key, shape, vocabulary.first_sentinel_id, vocabulary.eos_id)


def _predicted(model: Any, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of every target float64 [n, t], and whether it is the most likely token, bool [n, t]."""
    import torch

    from t5train.model.t5 import shift_right

    labels = torch.from_numpy(targets.astype(np.int64)).to(model.device)
    input_ids = torch.from_numpy(inputs.astype(np.int64)).to(model.device)
    start_id = int(model.config.decoder_start_token_id)
    try:
        with torch.inference_mode():
            logits = model(input_ids=input_ids, decoder_input_ids=shift_right(labels, start_id), use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none")
            right = logits.argmax(-1) == labels
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{model.device} has too little memory for {len(inputs)} sequences at once. Set a lower --batch-sequences"
        ) from error
    return losses.cpu().numpy().astype(np.float64), right.cpu().numpy()


class _Sums:
    """What is added up over batches."""

    def __init__(self, vocabulary: Vocabulary, text: EvaluationText) -> None:
        self._vocabulary = vocabulary
        # Each token is predicted from the rest of the text: its own occurrence does not count, every id counts once.
        self._unigram = -np.log(np.maximum(text.counts, 1) / (text.counts.sum() - 1 + vocabulary.size))
        self.all_targets = self.content = self.unigram = self.spelled = 0.0
        self.sequences = self.targets = self.tokens = self.right = self.spans = self.right_spans = 0
        self.bytes = self.unknown = 0

    @property
    def loss(self) -> float:
        """The loss of the content so far."""
        return self.content / self.tokens

    @property
    def loss_per_byte(self) -> float | None:
        """The loss of the tokens that spell text so far, for each byte of it."""
        return self.spelled / self.bytes if self.bytes else None

    def add(self, targets: np.ndarray, losses: np.ndarray, right: np.ndarray) -> None:
        """Add a batch, all arrays [n, t]."""
        content = is_content(targets, self._vocabulary.first_sentinel_id)
        in_bytes = self._vocabulary.spelled_bytes[targets] * content
        self.sequences += len(targets)
        self.all_targets += float(losses.sum())
        self.targets += losses.size
        self.content += float(losses[content].sum())
        self.unigram += float(self._unigram[targets[content]].sum())
        self.tokens += int(content.sum())
        self.right += int((right & content).sum())
        self.spelled += float(losses[in_bytes > 0].sum())
        self.bytes += int(in_bytes.sum())
        self.unknown += int((content & (in_bytes == 0) & (targets != self._vocabulary.eos_id)).sum())
        self._add_spans(content, right)

    def _add_spans(self, content: np.ndarray, right: np.ndarray) -> None:
        """Count spans: each begins where a content token follows a sentinel."""
        begins = content.copy()
        begins[:, 1:] &= ~content[:, :-1]
        number = np.cumsum(begins.ravel()) - 1
        wrong = np.bincount(number[(content & ~right).ravel()], minlength=int(begins.sum()))
        self.spans += len(wrong)
        self.right_spans += int((wrong == 0).sum())
