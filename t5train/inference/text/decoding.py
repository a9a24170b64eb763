"""Decoding of a batch of texts by ``generate()`` of transformers: greedily, with beams, or by sampling."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from t5train.inference.model_folder import DType, ModelFolder, quiet_transformers
from t5train.inference.text.shrinking_batch import can_shrink, generate_shrinking


class GenerationSpec(NamedTuple):
    """How to generate: greedily, with beams, or by sampling.

    ``temperature`` and ``top_p`` count only with ``sample``. ``seed`` makes sampling reproducible: it is set before
    each batch.
    """

    max_new_tokens: int | None = None
    """At most so many tokens. If left out, whoever decodes sets what the model or its task needs."""
    num_beams: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    length_penalty: float = 1.0
    """Exponent of the length by which beams divide their scores: more prefers longer texts. Of beams only."""

    @classmethod
    def of(cls, *, temperature: float | None, top_p: float | None, sample: bool = False, **others: Any) -> Self:
        """Return the spec of a request, in which a temperature or ``top_p`` implies sampling."""
        return cls(
            sample=sample or temperature is not None or top_p is not None,
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            **others,
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``generate()`` of transformers."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.num_beams,
            "do_sample": self.sample,
        }
        options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.sample else {}
        return options | ({"length_penalty": self.length_penalty} if self.num_beams > 1 else {})


class Output(NamedTuple):
    """The ids that were generated for a text, with EOS if they ``ended``, but without padding and the start."""

    ids: list[int]
    ended: bool
    input_tokens: int


class Hypothesis(NamedTuple):
    """What a model wrote for a source. ``tokens`` counts generated tokens with EOS; ``ended``: EOS was generated."""

    text: str
    tokens: int
    ended: bool


class Decoder:
    """The model and the tokenizer of a folder, on a device."""

    def __init__(self, folder: ModelFolder, device: str, dtype: DType = "float32") -> None:
        """Load both. Raises InputError if they do not fit together, DigestMismatch if they are not as recorded."""
        self.folder, self.tokenizer, self._model = folder, folder.load_tokenizer(), folder.load(device, dtype)
        eos = self._model.generation_config.eos_token_id
        self._eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    def outputs(self, texts: Sequence[str], spec: GenerationSpec, **options: Any) -> list[Output]:
        """Return what is generated for each text, all in one batch, in their order.

        ``spec`` must set ``max_new_tokens``. A text is read as it is: its prefix must be there. Padding changes logits
        by rounding only. With sampling, ``spec.seed`` is set before the batch, so that the result depends on the batch,
        too. ``options`` are more arguments of ``generate()``. Raises ``torch.OutOfMemoryError`` if the batch is too
        large for the device.
        """
        import torch  # slow to import, and read only here

        with quiet_transformers(), _seeded(spec, self._model.device), torch.inference_mode():
            inputs = self.tokenizer(list(texts), return_tensors="pt", padding=True).to(self._model.device)
            generated = self._generated(inputs, spec, options)
        lengths = inputs["attention_mask"].sum(1).tolist()
        return [self._output(ids, tokens) for ids, tokens in zip(generated, lengths, strict=True)]

    def _generated(self, inputs: Any, spec: GenerationSpec, options: dict[str, Any]) -> list[list[int]]:
        """Return ids without the start.

        Beams of a text that is done cannot leave their batch. More options, such as criteria that stop all texts, are
        for one call of ``generate()``.
        """
        given, may_shrink = spec.options(), spec.num_beams == 1 and not options
        if len(inputs["input_ids"]) > 1 and may_shrink and can_shrink(self._model.generation_config):
            return generate_shrinking(self._model, inputs, given.pop("max_new_tokens"), [*self._eos_ids], given)
        found: list[list[int]] = self._model.generate(**inputs, **given, **options)[:, 1:].tolist()
        return found

    def decode(self, sources: Sequence[str], spec: GenerationSpec) -> list[Hypothesis]:
        """Return what the model writes for each source, as ``outputs`` does, as text."""
        found = self.outputs(sources, spec)
        return [Hypothesis(self.text_of(each.ids), len(each.ids), each.ended) for each in found]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _output(self, ids: list[int], input_tokens: int) -> Output:
        """Cut ids after EOS. Without EOS, there is no padding: all were allowed."""
        tokens = next((number for number, each in enumerate(ids, start=1) if each in self._eos_ids), None)
        return Output(ids[:tokens], tokens is not None, input_tokens)


@contextmanager
def _seeded(spec: GenerationSpec, device: Any) -> Iterator[None]:
    """Seed torch within the block if tokens are sampled, and restore its generators afterwards."""
    import torch

    if not spec.sample:
        yield
        return
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng(devices=devices, **kind):
        torch.manual_seed(spec.seed)
        yield
