"""Writes a spec as a configuration file in YAML: every setting, with its value and a comment.

``config_file`` reads it.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from t5train.spec import RunSpec
from t5train.spec.known_texts import is_relative_path
from t5train.spec.setting_info import Part, Setting, parts_of

_WIDTH = 100
_PLAIN = re.compile("[A-Za-z/][A-Za-z0-9_./@+=:-]*[A-Za-z0-9_/]")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off"}
_ABOUT = """\
A setting that you remove has the recipe's value. --set part.key=value and other options override this file. Relative \
paths are relative to the folder in which you type the command.

Most settings decide the result: with another text, model, optimizer, batch or seed, it is another run. Settings in \
layout, storage, cluster, monitor and profile, and those marked (execution), decide only where and how the work is \
done: change them whenever you continue a run."""
_EXAMPLE_SOURCE = "/data/text/*.jsonl.gz"


def recipe_text(spec: RunSpec, *, needs_source: bool) -> str:
    """Return the file from which a user starts. With ``needs_source``, the text is left for the user to fill in."""
    opening = (
        f"Settings of a run, from the recipe {spec.recipe!r}. Save them as run.yaml, edit them, then:\n\n"
        "    t5-pretrain run --config run.yaml --dry-run    # check them, and show what would run\n"
        "    t5-pretrain run --config run.yaml"
    )
    return _text(spec, opening, needs_source)


def run_text(spec: RunSpec, path: Path) -> str:
    """Return the file that is stored with a run, at ``path``."""
    continued = [f"t5-pretrain run --config {shlex.quote(str(path))}"]
    corpus = spec.corpus
    if any(map(is_relative_path, (corpus.source, *corpus.mixed_with, corpus.remove_listed, spec.tokenizer.path))):
        continued = [f"cd {shlex.quote(str(Path.cwd()))}", *continued]
    opening = f"Settings with which the run {spec.run_name!r} was started last. To continue it:\n\n" + "\n".join(
        f"    {command}" for command in continued
    )
    return _text(spec, opening, needs_source=False)


def _text(spec: RunSpec, opening: str, needs_source: bool) -> str:
    whole = parts_of(type(spec))
    lines = [*_comment(f"{opening}\n\n{_ABOUT}", ""), ""]
    lines += _members(whole, spec.model_dump(mode="json"), "", needs_source)
    return "\n".join(lines) + "\n"


def _members(part: Part, values: Mapping[str, Any], indent: str, needs_source: bool) -> Iterator[str]:
    for member in part.members:
        value = values[member.key]
        if isinstance(member, Part):
            yield ""
            yield from _comment(member.description, indent)
            yield f"{indent}{member.key}:"
            yield from _members(member, value, f"{indent}  ", needs_source)
        elif member.name == "corpus.source" and needs_source:
            yield from _comment(f"REQUIRED. {member.explained}", indent)
            yield f"{indent}# {member.key}: {_EXAMPLE_SOURCE}"
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
    is_plain = not isinstance(value, str) or (_PLAIN.fullmatch(value) and value.lower() not in _WORDS)
    style = None if is_plain else '"'
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=float("inf")).removesuffix("...\n")
    return str(text).strip()
