"""The settings of a spec: what each means and takes, how it is changed by name, and what is wrong with a value.

An *identity* setting decides the result, and is part of the fingerprint. An *execution* setting decides where and how
to run, and is not part of it. Each part of a spec names its execution settings in ``execution``; those of a part that
is execution as a whole need no names.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, TypeGuard, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from t5train.errors import SpecError, printable

_PATTERN = re.compile(r"\^\[([^\]]+)\]\[([^\]]+)\]\{0,(\d+)\}\$")
_NUMBERS = {"integer": "whole number", "number": "number"}
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


class Setting(NamedTuple):
    """One setting of a spec."""

    name: str
    """``part.key``."""
    description: str
    annotation: Any
    """Its type."""
    schema: Mapping[str, Any]
    """Its JSON schema."""
    is_identity: bool
    """Whether it decides the result of a run, and not only how the run is executed."""

    @property
    def key(self) -> str:
        """The name without its part."""
        return self.name.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """The values it takes, as in "it must be ...": ``a whole number of at least 1, or null``."""
        return allowed_values(self.schema)

    @property
    def choices(self) -> list[str]:
        """The values, if it takes one of a few; empty for others."""
        if self.schema.get("type") == "boolean":
            return ["true", "false"]
        return [str(each) for option in self.schema.get("anyOf", [self.schema]) for each in option.get("enum", [])]

    @property
    def explained(self) -> str:
        """The description and the allowed values, in sentences. That a value is any text is not worth a sentence."""
        allowed = self.allowed.removesuffix(" or null")
        sentence = "" if allowed in {"text", "a path"} else f" {self.allowed[0].upper()}{self.allowed[1:]}."
        return f"{self.description}.{sentence}"


class Part(NamedTuple):
    """A part of a spec: its settings, and the parts inside it."""

    name: str
    description: str
    is_identity: bool
    """Whether any of its settings decides the result of a run."""
    members: "tuple[Setting | Part, ...]"

    @property
    def key(self) -> str:
        """The name without the part that it is inside."""
        return self.name.rpartition(".")[2]


@cache
def parts_of(spec: type[BaseModel], name: str = "", is_identity: bool = True) -> Part:
    """Return a spec's class as a part, with everything inside it in the order of its fields."""
    members = tuple(_members(spec, f"{name}." if name else "", is_identity))
    first = (spec.__doc__ or "").partition("\n\n")[0]
    return Part(name, " ".join(first.split()), any(each.is_identity for each in members), members)


@cache
def settings_of(spec: type[BaseModel]) -> Mapping[str, Setting]:
    """Return every setting of a spec's class, by its name ``part.key``."""
    return {setting.name: setting for setting in _flat(parts_of(spec))}


def _flat(part: Part) -> Iterator[Setting]:
    for member in part.members:
        if isinstance(member, Part):
            yield from _flat(member)
        else:
            yield member


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Return which values a setting with this JSON schema takes, as the end of a sentence "it must be ..."."""
    if "anyOf" in schema:
        taken = [each for each in schema["anyOf"] if each.get("type") != "null"]
        allowed = allowed_values(taken[0])
        return f"{allowed}{',' if ' ' in allowed.removeprefix('a ') else ''} or null"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in _NUMBERS:
        return f"a {_NUMBERS[kind]}{_bounds(schema)}"
    if kind == "array":
        return _list(schema)
    return "true or false" if kind == "boolean" else _text(schema)


def _is_part(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _members(spec: type[BaseModel], prefix: str, is_identity: bool) -> Iterator[Setting | Part]:
    properties = spec.model_json_schema()["properties"]
    execution: frozenset[str] = getattr(spec, "execution", frozenset())
    for key, field in spec.model_fields.items():
        decides = is_identity and key not in execution
        if _is_part(field.annotation):
            yield parts_of(field.annotation, f"{prefix}{key}", decides)
        else:
            yield Setting(f"{prefix}{key}", field.description or "", field.annotation, properties[key], decides)


def _bounds(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:,} to {schema['maximum']:,}"
    bounds = [f"{words} {schema[bound]:,}" for bound, words in _BOUNDS.items() if bound in schema]
    return f" {' and '.join(bounds)}" if bounds else ""


def _list(schema: Mapping[str, Any]) -> str:
    if items := schema.get("prefixItems"):
        return f"a list of {len(items)} {_NUMBERS[items[0]['type']]}s"
    items = schema.get("items", {})
    return f"a list of {', '.join(items['enum']) if 'enum' in items else items.get('description', 'text')}"


def _text(schema: Mapping[str, Any]) -> str:
    if schema.get("format") == "path":
        return "a path"
    if match := _PATTERN.fullmatch(schema.get("pattern", "")):
        first, others = (" ".join(re.findall("[^-]-[^-]|.", characters)) for characters in match.group(1, 2))
        return f"text of at most {int(match[3]) + 1} of the characters {others}, the first one of {first}"
    return "text"


_SHOWN_CHARACTERS = 200

NAMES_ELSEWHERE = {
    "hostfile": "cluster.hostfile",
    "master_addr": "cluster.master_address",
    "checkpoint_dir": "storage.root",
    "tokenizer_name_or_dir": "tokenizer.path",
    "dataset_dir": "corpus.source",
    "num_iterations": "optimizer.num_steps",
    **dict.fromkeys(("steps", "max_steps"), "optimizer.num_steps"),
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.peak_learning_rate"),
    **dict.fromkeys(("data", "text", "dataset", "train_file"), "corpus.source"),
    "dataset_config_name": "corpus.config",
    **dict.fromkeys(("text_column", "text_column_name", "text_field"), "corpus.column"),
    **dict.fromkeys(("gpus", "num_gpus", "nproc"), "cluster.ranks"),
    **dict.fromkeys(("save_steps", "save_every"), "storage.checkpoint_every_steps"),
    "output_dir": "storage.root",
    "model_name_or_path": "model.start_from",
    "max_source_length": "pairs.input_tokens",
    "max_target_length": "pairs.target_tokens",
    "group_by_length": "pairs.pack",
    "per_device_train_batch_size": "layout.micro_batch_sequences",
    "lr_scheduler_type": "optimizer.schedule",
    "metric_for_best_model": "evaluate.best_metric",
    "early_stopping_patience": "evaluate.patience",
    "eval_steps": "storage.validate_every_steps",
    "save_total_limit": "storage.keep_last",
    "fp16": "optimizer.precision",
    "batch_size": "layout.micro_batch_sequences",
    "num_stage": "layout.pipeline_stages",
    "cpu_adam": "layout.offload",
    "moe": "model.moe.num_experts",
    "moe_ep_size": "layout.expert_parallel_size",
    **dict.fromkeys(("lora_rank", "lora_r"), "finetune.lora.rank"),
    "lora_alpha": "finetune.lora.alpha",
    "target_modules": "finetune.lora.targets",
    "rank": "cluster.ranks",
    "dropout": "model.dropout_rate",
}
"""Names that other T5 and DeepSpeed scripts use for settings, if the names here are not similar."""


def change(spec: type[BaseModel], values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set ``{"part.key": value}`` in a spec's plain values.

    Text is parsed as JSON if possible (``8``, ``true``, ``[1, 2]``, ``null``) and kept as text otherwise. For a setting
    of type text, ``2`` stays text. Raises SpecError for unknown settings; the error names the nearest known ones.
    """
    wrong = list[str]()
    for setting, value in settings.items():
        try:
            _place(spec, values, setting, value)
        except SpecError as error:
            wrong.append(str(error))
    if wrong:
        raise SpecError("; ".join(wrong))


def nearest(word: str, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name that ends with ``word``, means the same or is similar."""
    key = word.rpartition(".")[2]
    elsewhere = NAMES_ELSEWHERE.get(key)
    meaning = [each for each in known if each == elsewhere]
    named = [each for each in known if each.endswith(f".{word}")]
    meant = (meaning or named) if key == word else (named or meaning)
    meant = meant or [each for each in known if each.endswith(f".{key}")]
    match = meant or difflib.get_close_matches(word, known, 1, 0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def explain(error: ValidationError, spec: type[BaseModel] | None = None, only: str = "") -> str:
    """Return everything that is wrong with a model's values, in one line, in our words and not in pydantic's.

    With the class of a spec, it says which values a setting takes, and names the nearest known setting. With ``only``,
    it says what is wrong with this setting alone; nothing if that depends on others.
    """
    prefix = f"{only}." if only else ""
    about = [each for each in error.errors() if f"{'.'.join(map(str, each['loc']))}.".startswith(prefix)]
    return "; ".join(dict.fromkeys(_problem(each, spec) for each in about))


def _problem(detail: Mapping[str, Any], spec: type[BaseModel] | None) -> str:
    """Return what is wrong with one value: its name, what it is, and what it must be."""
    kind, loc = detail["type"], detail["loc"]
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    if kind == "missing" and isinstance(loc[-1], int):
        loc = loc[:-1]  # the list is too short, and is what was given
    where = printable(".".join(map(str, loc)))
    known = [] if spec is None else list(settings_of(spec))
    if kind == "missing" and loc == detail["loc"]:
        return f"{where} is missing: set it{_takes(spec, where, ', it must be ')}"
    given = f"{_item_of_list(where)} is {_shown(detail['input'])}"
    if kind == "extra_forbidden":
        return f"{given}: unknown setting{nearest(where, known)}"
    if not where:
        return f"the settings are {_shown(detail['input'])}: they must be settings by their name"
    if inside := [each for each in known if each.startswith(f"{where}.")]:
        return f"{given}, but it is a group of settings: set those that it holds, such as {inside[0]}"
    return f"{given}: it must be {_takes(spec, where) or _must_be(detail)}"


def _item_of_list(where: str) -> str:
    """Return how a setting is called, also if it is an item of a list, whose last step is a number from 0."""
    setting, _, step = where.rpartition(".")
    return f"item {int(step) + 1} of {setting}" if step.isdecimal() else where


def _takes(spec: type[BaseModel] | None, where: str, before: str = "") -> str:
    """Return which values a setting takes, after ``before``, or empty text; ``where`` can be an item of a list, too."""
    schemas = {} if spec is None else {name: known.schema for name, known in settings_of(spec).items()}
    setting, _, step = where.rpartition(".")
    of_list = schemas.get(setting, {})
    fixed = of_list.get("prefixItems", [])
    of_item = fixed[int(step)] if step.isdecimal() and int(step) < len(fixed) else of_list.get("items", {})
    schema = schemas.get(where) or (of_item if "enum" in of_item or of_item.get("type") in _NUMBERS else of_list)
    example = f", such as {schema['default']}" if "prefixItems" in schema and "default" in schema else ""
    return f"{before}{allowed_values(schema)}{example}" if schema else ""


_KINDS = {"string": "text", "int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}
_KINDS |= {"list": "a list", "tuple": "a list", "dict": "values by name", "model": "values by name", "path": "a path"}
_MUST_BE = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "one of {expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length} items",
    "too_long": "a list of at most {max_length} items",
}


def _must_be(detail: Mapping[str, Any]) -> str:
    """Return which values are accepted, as far as the kind of an error says so."""
    kind = detail["type"]
    if kind in _MUST_BE:
        return _MUST_BE[kind].format(**detail.get("ctx", {}))
    return _KINDS.get(kind.partition("_")[0], "another value")


def _shown(value: Any) -> str:
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


def _require_text(setting: str, value: Any) -> None:
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise SpecError(f"{setting} is {value!r}: it must be valid UTF-8 text") from None


def parsed(spec: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with values that are text parsed, as ``change`` does. Raises SpecError if one is unknown."""
    return {setting: _parsed(value, annotation_of(spec, setting)) for setting, value in settings.items()}


def _place(spec: type[BaseModel], values: dict[str, Any], setting: str, value: Any) -> None:
    annotation = annotation_of(spec, setting)
    *parents, key = setting.split(".")
    for parent in parents:
        values = values[parent]
    values[key] = _parsed(value, annotation)
    _require_text(setting, values[key])


def annotation_of(spec: type[BaseModel], setting: str) -> Any:
    """Return the type of a setting. Raises SpecError if the setting is unknown; the error names the nearest one."""
    known = settings_of(spec)
    if setting not in known:
        raise SpecError(f"unknown setting {setting!r}{nearest(setting, list(known))}")
    return known[setting].annotation


def _parsed(value: Any, annotation: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return value
    is_text = annotation is str or (get_origin(annotation) is not tuple and str in get_args(annotation))
    return value if is_text and not isinstance(parsed, str | None) else parsed


_Check = TypeVar("_Check", bound=Callable[[Any], Any])
_CHECK = "is_check"


def check(method: _Check) -> _Check:
    """Mark a method of a spec that raises ValueError if settings contradict each other. All are called."""
    setattr(method, _CHECK, True)
    return method


class SpecPart(BaseModel):
    """One part of a RunSpec. It is immutable, and rejects unknown settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    execution: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _passes_all_checks(self) -> Self:
        refused = list[str]()
        for method in [each for kind in type(self).__mro__ for each in vars(kind).values() if hasattr(each, _CHECK)]:
            try:
                method(self)
            except ValueError as error:
                refused.append(str(error))
        if refused:
            raise ValueError("; ".join(refused))
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings that are in the fingerprint, as plain JSON values."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in self.execution}
