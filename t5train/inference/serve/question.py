"""A request to generate, and what it asks of a model."""

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from t5train.errors import InputError
from t5train.inference.serve.limits import Limits
from t5train.inference.text.decoding import GenerationSpec
from t5train.spec.settings import explain

_EXAMPLE = 'an object such as {"text": "..."}'
SHOWN = 60
"""Characters of an unknown name in an error."""
Text = Annotated[str, Field(min_length=1)]


def _as_list(text: Any) -> Any:
    return [text] if isinstance(text, str) else text


class Question(BaseModel):
    """The body of a request: texts, and how to generate. Defaults are those of ``t5-pretrain generate``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    text: Annotated[list[Text], FailFast(), BeforeValidator(_as_list), Field(min_length=1)]
    """One text or several."""
    task: str | None = None
    """A task that the model was fine-tuned with: its prefix is put before each text that lacks it."""
    max_new_tokens: int | None = Field(None, ge=1)
    num_beams: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0.01, le=100)
    """Of sampling; it and ``top_p`` imply it."""
    top_p: float | None = Field(None, ge=0.01, le=1)
    seed: int = Field(0, ge=0, lt=1 << 63)

    @classmethod
    def of(cls, body: bytes, limits: Limits) -> "Question":
        """Parse the body of a request. Raises InputError if it is none, or beyond the limits."""
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InputError(f"the body is not JSON ({error.msg}): send {_EXAMPLE}") from error
        if not isinstance(found, dict):
            raise InputError(f"the body is not an object: send {_EXAMPLE}")
        # A body has room for very many unknown names, and all other requests wait while an error describes them.
        if unknown := found.keys() - cls.model_fields.keys():
            name = f"{min(unknown)[:SHOWN]!r}"
            raise InputError(f"{name} is an unknown setting: it must be one of {', '.join(cls.model_fields)}")
        try:
            question = cls.model_validate(found)
        except ValidationError as error:
            raise InputError(explain(error)) from error
        for name, value, most in (
            ("the number of texts", len(question.text), limits.texts),
            ("max_new_tokens", question.max_new_tokens or 0, limits.new_tokens),
            ("num_beams", question.num_beams, limits.beams),
        ):
            if value > most:
                raise InputError(f"{name} is {value}: it must be at most {most}")
        return question

    def spec(self, usual_new_tokens: int) -> GenerationSpec:
        """Return how to generate for a text that needs so many new tokens unless the request says otherwise."""
        return GenerationSpec.of(
            max_new_tokens=self.max_new_tokens or usual_new_tokens,
            **self.model_dump(include={"num_beams", "temperature", "top_p", "seed"}),
        )
