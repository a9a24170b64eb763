"""Reads and writes configuration files: the name of a recipe, and settings in nested YAML.

Only the structure is YAML's. How a value is read depends on its setting: a text setting takes what is written, so that
``name: 2026`` and ``revision: on`` are text, and other settings take numbers as Python writes them, so that ``1e-4`` is
a number. Nothing in a file is executed; tags are refused. A file that is written has every setting of a spec, with its
value and a comment.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from t5train.errors import InputError, SpecError
from t5train.files.os_errors import explain
from t5train.spec import RunSpec, nearest, setting_names
from t5train.spec.known_texts import is_relative_path
from t5train.spec.pairs_spec import GENERATED
from t5train.spec.recipes import RECIPES, recipe, unknown_recipe
from t5train.spec.run_spec import wrong_value
from t5train.spec.settings import Part, Setting, annotation_of, parts_of

_MAX_BYTES = 1 << 20
_REMEDY = "start from a file that `t5-pretrain init RECIPE > run.yaml` writes"
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULLS = {"", "~", "null", "Null", "NULL"}
_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile("[-+]?[0-9]{1,100}")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Configuration:
    """The content of a configuration file."""

    path: Path
    recipe: str | None
    """The recipe that the settings start from; None if the file names none."""
    settings: Mapping[str, Any]
    """``{"part.key": value}``. Text is quoted, so that ``with_settings`` does not read it as JSON."""
    lines: Mapping[str, int]
    """The line of each setting in the file."""

    def changes(self, recipe: RunSpec) -> dict[str, Any]:
        """Return the settings whose values are not those of the recipe, and in any case what the recipe trains on.

        Without the others, a hostfile determines ``cluster.ranks`` unless the file asks for another number.
        """
        values, data = recipe.model_dump(mode="json"), data_setting(recipe)
        return {
            name: value
            for name, value in self.settings.items()
            if name == data or value != _quoted(_value_in(values, name))
        }

    def where(self, setting: str) -> str:
        """Return the file and the line of a setting in it."""
        return _where(self.path, self.lines[setting])

    @contextmanager
    def locating(self, overridden: Collection[str] = ()) -> Iterator[None]:
        """Add file and lines to a SpecError that names settings of this file, except those that are overridden."""
        try:
            yield
        except SpecError as error:
            lines = [line for name, line in self.lines.items() if name not in overridden and _is_in(name, str(error))]
            if not lines:
                raise
            raise SpecError(f"{_where(self.path, *sorted(lines))}: {error}") from error


def read_config(path: Path) -> Configuration:
    """Read a configuration file.

    Raises InputError if the file cannot be read, and SpecError, with lines, if it is not YAML, or if the recipe or
    settings are unknown, or settings have no value or are there twice; then it also lists values that are not valid.
    Otherwise, whether values are valid is for the RunSpec to check.
    """
    root = _composed(path, _text_of(path))
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{path} has no settings: write lines such as `recipe: smoke`, or {_REMEDY}")
    found = _Reader(path)
    found.read(root)
    quoted = found.settings.pop("recipe", None)
    recipe = json.loads(quoted) if quoted else None
    found.require_none_wrong(recipe)
    return Configuration(path, recipe, found.settings, found.lines)


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {path}: correct the path, or {_REMEDY}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, not a configuration file: name a file in it, or {_REMEDY}") from None
    except OSError as error:
        raise InputError(f"the configuration file {path} cannot be read: {explain(error)}") from error
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path} is larger than 1 MiB, so it is not a configuration file: {_REMEDY}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{_where(path, line)}: not UTF-8 text. Save the file as UTF-8, or {_REMEDY}") from None


def _composed(path: Path, text: str) -> yaml.Node | None:
    """Return the root of the tree of nodes in a YAML file. No values are constructed."""
    try:
        return yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _where(path, mark.line + 1) if mark else str(path)
        said = (error.problem or error.context or "it cannot be read").replace("\t", "\\t")
        raise SpecError(
            f"{where}: not valid YAML: {said}. Indent with spaces, write `key: value`, and quote text that holds "
            "special characters"
        ) from None
    except yaml.reader.ReaderError as error:
        where = _where(path, text.count("\n", 0, error.position) + 1)
        raise SpecError(f"{where}: the character U+{error.character:04X} is not allowed in YAML. Remove it") from None
    except RecursionError:
        raise SpecError(f"{path} is nested too deeply to be a configuration file: {_REMEDY}") from None


class _Reader:
    """Collects settings, and the lines of settings and parts, from the nodes of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = setting_names()
        self._parts = {name[: match.start()] for name in self._names for match in re.finditer(r"\.", name)}
        self.settings: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self._wrong: list[tuple[int, str]] = []
        """Line and message of each fault."""

    def read(self, mapping: yaml.MappingNode, prefix: str = "") -> None:
        """Read all settings in a mapping; ``prefix`` is the name of its part with a dot."""
        for key, value in mapping.value:
            line = key.start_mark.line + 1
            try:
                self._read_one(prefix, key, value, line)
            except SpecError as error:
                self._wrong.append((line, str(error)))

    def require_none_wrong(self, recipe: str | None) -> None:
        """Raise SpecError with all faults, also those of values, if the recipe is unknown or structure is wrong."""
        if recipe is not None and recipe not in RECIPES:
            line = self.lines["recipe"]
            self._wrong.append((line, f"{_where(self.path, line)}: {unknown_recipe(recipe)}"))
        if not self._wrong:
            return
        for name, value in self.settings.items():
            if message := wrong_value(name, value):
                line = self.lines[name]
                self._wrong.append((line, f"{_where(self.path, line)}: {message}"))
        first, *others = [message for _, message in sorted(self._wrong)]
        raise SpecError("; ".join([first, *(each.removeprefix(f"{self.path}, ") for each in others)]))

    def _read_one(self, prefix: str, key: yaml.Node, value: yaml.Node, line: int) -> None:
        name = f"{prefix}{_key(self.path, line, key)}"
        if name in self.lines:
            raise SpecError(f"{_where(self.path, self.lines[name], line)}: {name} is there twice: keep one of them")
        self.lines[name] = line
        if name in self._parts:
            self._part(name, value)
        else:
            self._require_known(name)
            self.settings[name] = _value(self.path, line, name, value)

    def _part(self, name: str, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            self.read(node, f"{name}.")
        elif not isinstance(node, yaml.ScalarNode) or node.style is not None or node.value not in _NULLS:
            raise SpecError(
                f"{_where(self.path, self.lines[name])}: {name} is a group of settings: write them on the lines below "
                "it, indented"
            )

    def _require_known(self, name: str) -> None:
        if name not in self._names:
            meant = nearest(name, [*self._names, *sorted(self._parts)])
            raise SpecError(
                f"{_where(self.path, self.lines[name])}: unknown setting {name!r}{meant}. Correct or remove it; "
                "`t5-pretrain init RECIPE` lists all settings"
            )


def _key(path: Path, line: int, key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG:
        raise SpecError(f"{_where(path, line)}: the name of a setting must be plain text such as num_steps")
    name = str(key.value)
    if "." in name:
        part, _, rest = name.partition(".")
        raise SpecError(
            f"{_where(path, line)}: {name!r} has a dot: write {rest!r} on a line of its own, indented, below `{part}:`"
        )
    return name


def _value(path: Path, line: int, name: str, node: yaml.Node) -> Any:
    """Return the value of a setting. Text is quoted."""
    annotation = annotation_of(RunSpec, name)
    if isinstance(node, yaml.SequenceNode) and get_origin(annotation) is tuple:
        return [_scalar(path, line, name, item, _is_text(annotation)) for item in node.value]
    return _quoted(_scalar(path, line, name, node, _is_text(annotation)))


def _scalar(path: Path, line: int, name: str, node: yaml.Node, is_text: bool) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        key = name.rpartition(".")[2]
        raise SpecError(f"{_where(path, line)}: {name} takes one value, but holds several: write `{key}: VALUE`")
    if node.tag != _TEXT_TAG:
        raise SpecError(f"{_where(path, line)}: {name} has the tag {node.tag}: remove it, and write the value alone")
    text = str(node.value)
    if node.style is not None:
        return text
    if text == "":
        raise SpecError(f"{_where(path, line)}: {name} has no value: write one, or remove the line")
    if text in _NULLS:
        return None
    return text if is_text else _plain(text)


def _plain(text: str) -> Any:
    """Return the number or the truth value that plain text stands for; text that is neither as it is."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else _WORDS.get(text, text)


def _is_text(annotation: Any) -> bool:
    """Whether a setting is text, a path, or a list of text."""
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {str, Path})


def _quoted(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, str) else value


def _value_in(values: Mapping[str, Any], name: str) -> Any:
    for key in name.split("."):
        values = values[key]
    return values


def _is_in(name: str, message: str) -> bool:
    """Whether a message is about a setting. A name without a part is a word like any other, unless a value follows."""
    pattern = rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)"
    return re.search(pattern if "." in name else rf"{pattern} is ", message) is not None


def _where(path: Path, *lines: int) -> str:
    shown = [str(line) for line in lines]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{path}, line{'s' if len(shown) > 1 else ''} {listed}"


_WIDTH = 100
_PLAIN = re.compile("[A-Za-z/][A-Za-z0-9_./@+=:-]*[A-Za-z0-9_/]")
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off"}
_ABOUT = """\
A setting that you remove has the recipe's value. --set part.key=value and other options override this file. Relative \
paths are relative to the folder in which you type the command.

Most settings decide the result: with another text, model, optimizer, batch or seed, it is another run. Settings in \
layout, storage, cluster, monitor and profile, and those marked (execution), decide only where and how the work is \
done: change them whenever you continue a run."""
_EXAMPLES = {
    "corpus.source": "/data/text/*.jsonl.gz",
    "pairs.train": '["/data/wmt.jsonl#source=translation.en&target=translation.de&task=en-de"]',
}


def data_setting(recipe: RunSpec) -> str:
    """Return the setting that names what a run of this recipe trains on."""
    return "pairs.train" if recipe.is_fine_tuning else "corpus.source"


def recipe_text(spec: RunSpec, *, needs_source: bool) -> str:
    """Return the file from which a user starts. With ``needs_source``, the text is left for the user to fill in."""
    command = f"t5-pretrain {_command(spec)} --config run.yaml"
    opening = (
        f"Settings of a run, from the recipe {spec.recipe!r}. Save them as run.yaml, edit them, then:\n\n"
        f"    {command} --dry-run    # check them, and show what would run\n"
        f"    {command}"
    )
    return _text(spec, opening, needs_source)


def run_text(spec: RunSpec, path: Path) -> str:
    """Return the file that is stored with a run, at ``path``."""
    continued = [f"t5-pretrain {_command(spec)} --config {shlex.quote(str(path))}"]
    corpus, pairs = spec.corpus, spec.pairs
    texts = (corpus.source, *corpus.mixed_with, corpus.remove_listed)
    of_pairs = [
        each for each in (*pairs.train, *pairs.validation, *pairs.test) if each.partition("#")[0] not in GENERATED
    ]
    if any(map(is_relative_path, (*texts, *of_pairs, spec.tokenizer.path))):
        continued = [f"cd {shlex.quote(str(Path.cwd()))}", *continued]
    opening = f"Settings with which the run {spec.run_name!r} was started last. To continue it:\n\n" + "\n".join(
        f"    {command}" for command in continued
    )
    return _text(spec, opening, needs_source=False)


def _command(spec: RunSpec) -> str:
    return "finetune" if spec.is_fine_tuning else "run"


def _text(spec: RunSpec, opening: str, needs_source: bool) -> str:
    whole = parts_of(type(spec))
    lines = [*_comment(f"{opening}\n\n{_ABOUT}", ""), ""]
    required = data_setting(spec) if needs_source else None
    lines += _members(whole, spec.model_dump(mode="json"), "", required, _unused(spec))
    return "\n".join(lines) + "\n"


def _unused(spec: RunSpec) -> set[str]:
    """Names of settings without effect, as the run is on text or on pairs, whose values are those of the recipe."""
    of_text = {name for name in setting_names() if name.startswith(("corpus.", "objective."))}
    of_text -= {"corpus.license", "corpus.languages"}  # which the model card states of pairs, too
    of_pairs = {name for name in setting_names() if name.startswith("pairs.")}
    usual, values = recipe(spec.recipe).model_dump(), spec.model_dump()
    without_effect = of_text if spec.is_fine_tuning else of_pairs
    return {name for name in without_effect if _value_in(values, name) == _value_in(usual, name)}


def _members(
    part: Part, values: Mapping[str, Any], indent: str, required: str | None, unused: Collection[str]
) -> Iterator[str]:
    for member in part.members:
        value = values[member.key]
        if member.name in unused:
            continue
        if isinstance(member, Part):
            lines = list(_members(member, value, f"{indent}  ", required, unused))
            if lines:
                yield from ["", *_comment(member.description, indent), f"{indent}{member.key}:", *lines]
        elif member.name == required:
            yield from _comment(f"REQUIRED. {member.explained}", indent)
            yield f"{indent}# {member.key}: {_EXAMPLES[required]}"
        else:
            yield from _comment(_explained(member, part), indent)
            yield f"{indent}{member.key}: {_yaml(value)}"


def _explained(setting: Setting, part: Part) -> str:
    """The explanation of a setting, and whether it is the exception in its part."""
    if setting.name == "recipe":
        return f"{setting.description}."
    return f"{setting.explained} (execution)" if part.is_identity and not setting.is_identity else setting.explained


def _comment(text: str, indent: str) -> Iterator[str]:
    for paragraph in text.split("\n"):
        if paragraph.startswith(" "):
            yield f"{indent}# {paragraph}"
        else:
            wrapped = textwrap.wrap(paragraph, _WIDTH - len(indent) - 2, break_on_hyphens=False)
            yield from (f"{indent}# {line}".rstrip() for line in wrapped or [""])


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line, which YAML of any version reads as the same value."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    is_plain = not isinstance(value, str) or (_PLAIN.fullmatch(value) and value.lower() not in _RESERVED)
    style = None if is_plain else '"'
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=float("inf")).removesuffix("...\n")
    return str(text).strip()
