"""Decoding of a batch of sources by ``generate()`` of transformers: greedily, with beams, or by sampling."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from t5train.release.inference.generation import GenerationSpec, seeded
from t5train.release.inference.model_folder import ModelFolder, quiet_transformers


class Hypothesis(NamedTuple):
    """What a model wrote for a source. ``tokens`` counts generated tokens with EOS; ``ended``: EOS was generated."""

    text: str
    tokens: int
    ended: bool


class Decoder:
    """The model and the tokenizer of a folder, on a device."""

    def __init__(self, folder: ModelFolder, device: str) -> None:
        """Load both. Raises InputError if they do not fit together, DigestMismatch if they are not as recorded."""
        self._tokenizer, self._model = folder.load_tokenizer(), folder.load(device)
        eos = self._model.generation_config.eos_token_id
        self._eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    def decode(self, sources: Sequence[str], spec: GenerationSpec, max_new_tokens: int) -> list[Hypothesis]:
        """Return what the model writes for each source, all in one batch, in their order.

        A source is read as it is: its prefix must be there. ``max_new_tokens`` counts unless ``spec`` sets it. Padding
        changes logits by rounding only. With sampling, ``spec.seed`` is set before the batch, so that the result
        depends on the batch, too. Raises ``torch.OutOfMemoryError`` if the batch is too large for the device.
        """
        import torch  # slow to import, and read only here

        inputs = self._tokenizer(list(sources), return_tensors="pt", padding=True).to(self._model.device)
        with quiet_transformers(), seeded(spec, self._model.device), torch.inference_mode():
            generated = self._model.generate(**inputs, **spec.options(max_new_tokens))
        return [self._hypothesis(ids[1:]) for ids in generated.tolist()]  # without the token that starts the decoder

    def _hypothesis(self, ids: list[int]) -> Hypothesis:
        """Return the hypothesis that generated ids stand for. Without EOS, there is no padding: all were allowed."""
        tokens = next((number for number, each in enumerate(ids, start=1) if each in self._eos_ids), None)
        text: Any = self._tokenizer.decode(ids[:tokens], skip_special_tokens=True)
        return Hypothesis(str(text), tokens or len(ids), tokens is not None)
