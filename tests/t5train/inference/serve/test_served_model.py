"""What a served model makes of a request: prefixes, lengths, settings, and the same answers in batches as alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import OutOfMemoryError

from t5train.errors import InputError, T5TrainError
from t5train.inference.model_folder import ModelFolder
from t5train.inference.serve import served_model
from t5train.inference.serve.limits import Limits
from t5train.inference.serve.question import Question
from t5train.inference.serve.served_model import ServedModel
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import generate
from t5train.release.export import export
from tests.support.synthetic_models import make_trained

LIMITS = Limits(input_tokens=40, new_tokens=100)
MakeModel = Callable[[str], ServedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes an export of a family, once for all tests."""
    made: dict[str, Path] = {}

    def make(version: str) -> Path:
        if version not in made:
            base = tmp_path_factory.mktemp("served")
            made[version] = export(*make_trained(base / "made", version), base / "model").path
        return made[version]

    return make


@pytest.fixture(scope="module")
def model(folder: Callable[[str], Path]) -> MakeModel:
    return lambda version: ServedModel(ModelFolder.open(folder(version)), "cpu", LIMITS)


def wanted() -> bool:
    return True


def question(**body: Any) -> Question:
    return Question.of(json.dumps(body).encode(), LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_answers_of_a_batch_are_those_of_single_requests(
    folder: Callable[[str], Path], model: MakeModel, version: str
) -> None:
    """In fp32. Padding changes logits by rounding: only where two tokens are nearly a tie can it change an answer."""
    texts = [f"{'word ' * length}<extra_id_0> of a <extra_id_1>" for length in (0, 2, 7, 11)] + ["no gap"]
    for num_beams in (1, 3):
        spec = GenerationSpec(max_new_tokens=9, num_beams=num_beams)
        batch = model(version).decode(texts, spec, wanted)
        assert batch == list(generate(folder(version), texts, spec, "cpu"))
        assert len({each.generated for each in batch}) > 1


@pytest.mark.parametrize(
    ("version", "body", "read"),
    [
        ("pairs", {"text": "3 1", "task": "reverse_digits"}, ["reverse: 3 1"]),
        ("pairs", {"text": ["order: 3 1", "3"], "task": "sort_digits"}, ["order: 3 1", "order: 3"]),
        ("pairs", {"text": ["order: 3 1", "reverse: 3"]}, ["order: 3 1", "reverse: 3"]),
        ("v1.1", {"text": "a <extra_id_0>"}, ["a <extra_id_0>"]),
    ],
)
def test_the_prefix_of_the_task_is_put_before_a_text_that_lacks_it(
    model: MakeModel, version: str, body: dict[str, Any], read: list[str]
) -> None:
    assert [each.text for each in model(version).asked(question(**body))] == read


def test_the_only_task_of_a_model_need_not_be_named(folder: Callable[[str], Path]) -> None:
    found = ModelFolder.open(folder("pairs"))
    only = found._replace(run=found.run._replace(tasks={"sort_digits": "order: "}))
    assert ServedModel(only, "cpu", LIMITS).asked(question(text="3 1"))[0].text == "order: 3 1"


@pytest.mark.parametrize(
    ("version", "body", "message"),
    [
        ("pairs", {"text": "3 1"}, "set task, to one of reverse_digits, sort_digits"),
        ("pairs", {"text": "3 1", "task": "en-de"}, "task is 'en-de': it must be one of reverse_digits, sort_digits"),
        ("v1.1", {"text": "3 1", "task": "en-de"}, "must be left out: no task is recorded of this model"),
        ("pairs", {"text": "3 1", "task": "x" * 99}, f"task is '{'x' * 60}': it must be one of"),
        ("v1.1", {"text": ["a", "word " * 60]}, "text 2 has "),
        ("v1.1", {"text": ["a", "x" * 2561]}, "text 2 has 2561 characters with its prefix: it must have at most 2560,"),
    ],
)
def test_a_text_that_the_model_would_read_wrongly_is_refused(
    model: MakeModel, version: str, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        model(version).asked(question(**body))
    assert message in str(refused.value)


def test_a_text_may_have_as_many_tokens_as_the_limit_with_its_prefix(
    folder: Callable[[str], Path],
) -> None:
    found = ModelFolder.open(folder("pairs"))
    tokens = len(found.load_tokenizer()("reverse: 3 1 4")["input_ids"])
    asked = question(text="3 1 4", task="reverse_digits")
    assert ServedModel(found, "cpu", LIMITS._replace(input_tokens=tokens)).asked(asked)
    with pytest.raises(
        InputError, match=f"^text 1 has {tokens} tokens with its prefix: it must have at most {tokens - 1}$"
    ):
        ServedModel(found, "cpu", LIMITS._replace(input_tokens=tokens - 1)).asked(asked)


@pytest.mark.parametrize(
    ("version", "text", "body", "most"),
    [
        ("v1.1", "<extra_id_0>", {}, 64),
        ("v1.1", " ".join(f"<extra_id_{gap}>" for gap in range(9)), {}, LIMITS.new_tokens),
        ("pairs", "order: 1", {}, 50),
        ("pairs", "order: 1", {"max_new_tokens": 7}, 7),
    ],
)
def test_as_many_tokens_are_generated_as_by_the_command_unless_it_is_said_or_beyond_the_limit(
    folder: Callable[[str], Path], version: str, text: str, body: dict[str, int], most: int
) -> None:
    found = ModelFolder.open(folder(version))
    pairs = found.run.settings.get("pairs")
    if pairs:
        pairs["target_tokens"] = 50
    (asked,) = ServedModel(found, "cpu", LIMITS).asked(question(text=text, **body))
    assert asked.spec.max_new_tokens == most


def test_too_little_memory_is_said_in_one_line(model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise OutOfMemoryError

    monkeypatch.setattr(served_model, "generate_batch", out_of_memory)
    with pytest.raises(T5TrainError, match=r"^cpu has too little memory for 2 texts .* --batch-sequences$"):
        model("v1.1").decode(["a", "b"], GenerationSpec(), wanted)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_what_nobody_wants_any_more_is_not_decoded_to_its_end(model: MakeModel, num_beams: int) -> None:
    spec = GenerationSpec(max_new_tokens=50, num_beams=num_beams)
    (answer,) = model("v1.1").decode(["a <extra_id_0>"], spec, lambda: False)
    assert answer.new_tokens == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"text": "\\ud800"}', "the body is not JSON"),
        (b"[1]", "the body is not an object"),
        (b"{}", "text is missing: set it"),
        (b'{"text": []}', "text is []: it must be a list of at least 1 items"),
        (b'{"text": ["a", ""]}', "item 2 of text is ''"),
        (b'{"text": "a", "num_beam": 2}', "'num_beam' is an unknown setting: it must be one of text, task,"),
        (b'{"text": "a", "num_beams": "2"}', "num_beams is '2': it must be a whole number"),
        (b'{"text": "a", "num_beams": 9}', "num_beams is 9: it must be at most 8"),
        (b'{"text": "a", "max_new_tokens": 101}', "max_new_tokens is 101: it must be at most 100"),
        (json.dumps({"text": ["a"] * 65}).encode(), "the number of texts is 65: it must be at most 64"),
        (b'{"text": [' + b"1," * 9999 + b"1]}", "item 1 of text is 1: it must be text"),
        (json.dumps(dict.fromkeys(map(str, range(9999)))).encode(), "'0' is an unknown setting"),
        (json.dumps({"k" * 9999: 1}).encode(), "kkk' is an unknown setting"),
    ],
)
def test_a_body_that_is_no_question_is_refused_with_what_is_wrong(body: bytes, message: str) -> None:
    with pytest.raises(InputError) as refused:
        Question.of(body, LIMITS)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200
