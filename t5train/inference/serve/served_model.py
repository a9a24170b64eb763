"""The model of a server: reads questions, and generates for batches of texts."""

from collections.abc import Callable, Sequence
from threading import Lock

from t5train.errors import InputError, T5TrainError
from t5train.inference.model_folder import ModelFolder
from t5train.inference.serve.limits import Limits
from t5train.inference.serve.question import SHOWN, Question
from t5train.inference.serve.text_queue import Asked
from t5train.inference.text.decoding import Decoder, GenerationSpec
from t5train.inference.text.generation import Generated, generate_batch, usual_new_tokens

_CHARACTERS_A_TOKEN = 64
"""No text has so many on average. To count the tokens of a megabyte would keep all others waiting for seconds."""


class ServedModel:
    """A loaded model. Questions may be read by several threads at once, while one decodes."""

    def __init__(self, folder: ModelFolder, device: str, limits: Limits) -> None:
        """Load the model. Raises InputError if it is incomplete, and DigestMismatch if it is not as recorded."""
        self._folder, self._limits = folder, limits
        # Padding changes the state of a tokenizer, which fails while another thread uses it.
        self._counting, self._lock = folder.load_tokenizer(), Lock()
        self._device, self._decoder = device, Decoder(folder, device)  # last: it finds what was changed meanwhile
        self.tasks: Sequence[str] = list(folder.run.tasks)

    def asked(self, question: Question) -> list[Asked]:
        """Put the prefix of its task before each text.

        Raises InputError if the model has no such task, if none is named and it has several, or if a text is too long.
        """
        texts, most = [self._with_prefix(text, question.task) for text in question.text], self._limits.input_tokens
        for number, text in enumerate(texts, start=1):
            if len(text) > most * _CHARACTERS_A_TOKEN:
                raise InputError(
                    f"text {number} has {len(text)} characters with its prefix: it must have at most "
                    f"{most * _CHARACTERS_A_TOKEN}, and {most} tokens"
                )
        with self._lock:
            lengths = [len(ids) for ids in self._counting(texts, verbose=False)["input_ids"]]
        for number, length in enumerate(lengths, start=1):
            if length > most:
                raise InputError(f"text {number} has {length} tokens with its prefix: it must have at most {most}")
        usual = [min(usual_new_tokens(self._folder, text), self._limits.new_tokens) for text in texts]
        return [Asked(text, question.spec(tokens)) for text, tokens in zip(texts, usual, strict=True)]

    def decode(self, texts: Sequence[str], spec: GenerationSpec, is_wanted: Callable[[], bool]) -> list[Generated]:
        """Return what the model generates for each text, until it is not wanted any more.

        Raises T5TrainError if its device has too little memory.
        """
        import torch

        try:
            return generate_batch(self._decoder, texts, spec, stopping_criteria=[lambda *_, **__: not is_wanted()])
        except torch.OutOfMemoryError as error:
            raise T5TrainError(
                f"{self._device} has too little memory for {len(texts)} texts at once: start the server with a "
                "lower --batch-sequences"
            ) from error

    def _with_prefix(self, text: str, task: str | None) -> str:
        """Return a text with the prefix of its task, unless it has it: the only task if none is named."""
        tasks = self._folder.run.tasks
        known = ", ".join(tasks)
        if task is not None and task not in tasks:
            has = f"must be one of {known}" if tasks else "must be left out: no task is recorded of this model"
            raise InputError(f"task is {task[:SHOWN]!r}: it {has}")
        if not tasks or text.startswith(tuple(tasks.values()) if task is None else tasks[task]):
            return text
        if task is None and len(tasks) > 1:
            raise InputError(
                f"the model has several tasks, and the text has the prefix of none: set task, to one of {known}"
            )
        return tasks[task or next(iter(tasks))] + text
